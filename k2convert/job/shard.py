"""Convert one shard: the function that every job runs, in this process or another.

Within a shard, pieces (an expert's gate and up, a down projection, a part of a copied tensor) are read by one pool of
threads and converted by another, a bounded number of bytes ahead. The shard's own thread writes them in file order.
Reads, arithmetic and writes release the GIL, so they overlap. The shard appears under its name when it is complete.
"""

import math
import shlex
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.checkpoint.files import TEMPORARY_SUFFIX, known_sha256
from k2convert.checkpoint.header import DTYPE_BYTES, TensorInfo
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.reader import Bytes, FileHash, ShardReader, is_finite, is_zero
from k2convert.checkpoint.writer import ShardWriter
from k2convert.choices import FP8_BLOCK
from k2convert.errors import CheckpointError, FormatError, InterruptedRun, MalformedFileError, remedy
from k2convert.job.resources import Threads, encoded_header, open_threads
from k2convert.models.projections import SOURCE_REMEDY, Projection, load_projection
from k2convert.plan.plan import ConvertStep, CopyStep, Fp8Step, ShardJob, step_sources
from k2convert.plan.recipe import Recipe
from k2convert.quantize.formats.bf16 import SourceWeight
from k2convert.quantize.formats.fp8 import block_amax, quantize_fp8, quantize_fp8_blocks
from k2convert.quantize.kernels.cpu import Fp8Sums, encode_fp8, fp8_sums
from k2convert.quantize.metrics.measure import fp8_metrics, measure_quantized
from k2convert.quantize.quantizer import Quantizer, create_quantizer
from k2convert.quantize.rules import RULES
from k2convert.records.events import SILENT, Events
from k2convert.records.ledger import ProjectionRecord, ShardRecord, is_weight

if TYPE_CHECKING:
    from k2convert.calibration.layer_files import Calibration
    from k2convert.job.prepare import Job

COPY_BYTES: Final = 16 << 20
_HASHED_SHARE: Final = 0.9  # of a source shard that must be read, so that hashing it reads little more
PIECE_BYTES: Final = 16 << 10  # what a piece takes besides its tensors' bytes: without it, small ones had no bound


@dataclass(frozen=True, slots=True)
class ShardTask:
    """Inputs of the conversion of one shard, as values that can be pickled."""

    shard: ShardJob
    recipe: Recipe
    source_folder: Path
    destination: Path
    fingerprint: str
    header_digests: dict[str, str]  # of the shards that are read
    inflight_bytes: int  # in memory at most
    family: str  # the name of the source's
    for_upload: bool = False  # compute the sha256 too
    sha256: str | None = None  # of the source shard of that name, if a download left it and nearly all is read
    calibration: "Calibration | None" = None  # for rule gptq
    suffix: str = TEMPORARY_SUFFIX  # of the temporary file


def shard_task(job: "Job", name: str) -> ShardTask:
    """Return the task of one shard of a job, without its calibration."""
    shard = next(shard for shard in job.plan.jobs if shard.name == name)
    checkpoint = job.source.checkpoint
    headers = job.source.checkpoint.headers
    is_read = (
        job.source.remote is None and name in headers and shard.bytes_in >= _HASHED_SHARE * headers[name].file_bytes
    )
    return ShardTask(
        shard=shard,
        recipe=job.plan.recipe,
        source_folder=job.source.checkpoint.folder if job.source.remote is None else job.downloads,
        destination=job.destination.folder,
        fingerprint=job.digest,
        header_digests={source: headers[source].digest for source in shard.source_shards},
        inflight_bytes=job.limits.inflight // job.limits.workers,
        for_upload=job.target is not None,
        sha256=known_sha256(checkpoint.path(name)) if is_read else None,
        family=job.plan.family,
    )


def convert_shard(
    task: ShardTask, *, threads: Threads | None = None, events: Events = SILENT, stop: Event | None = None
) -> ShardRecord:
    """Write one shard and return its record, not in the journal yet.

    Raises InterruptedRun when `stop` is set, CheckpointError, SourceReadError, DiskFullError, DestinationWriteError.
    """
    shard = task.shard
    recipe = task.recipe
    assert task.calibration is not None or recipe.target == "bf16" or not RULES[recipe.rule].needs_text
    header = encoded_header(shard)
    file_bytes = len(header) + shard.data_bytes
    records = list[ProjectionRecord]()
    has_values = set[str]()
    path = task.destination / shard.name
    with (
        _opened(task, threads, stop or Event()) as work,
        ShardWriter(path, file_bytes, for_upload=task.for_upload, suffix=task.suffix) as writer,
        closing(work.ahead(work.pieces())) as results,
    ):
        writer.write(header)
        for piece, (buffers, measured) in results:
            for buffer in buffers:
                writer.write(buffer.data)
            records += measured
            if piece.copied and not all(map(is_zero, buffers)):
                has_values.add(piece.copied)
            events.progress(bytes_in=piece.bytes_in, bytes_out=piece.bytes_out, tensors=piece.tensors)
        work.check_source()
        digest = writer.commit()
    copied = [step.tensor for step in shard.steps if isinstance(step, CopyStep)]  # a bias may be all zero
    return ShardRecord(
        shard=shard.name,
        fingerprint=task.fingerprint,
        blake3=digest,
        file_bytes=file_bytes,
        num_tensors=shard.num_outputs,
        source_headers={name: task.header_digests[name] for name in shard.source_shards},
        projections=tuple(records),
        sha256=writer.sha256,
        zero_copies=tuple(t.name for t in copied if t.num_bytes and is_weight(t.name) and t.name not in has_values),
    )


@contextmanager
def _opened(task: ShardTask, threads: Threads | None, stop: Event) -> Generator["_Work"]:
    """Open the source shards of a task, for a conversion by `threads`, or by threads of its own."""
    path = task.source_folder / task.shard.name
    with (
        open_threads(1) if threads is None else nullcontext(threads) as (converters, readers),
        ShardReader(lambda name: task.source_folder / name) as reader,
        remedy(SOURCE_REMEDY),
        nullcontext() if task.sha256 is None else FileHash(path) as source_hash,
    ):
        quantizer = create_quantizer(task.recipe.quantizer, rule=task.recipe.rule)
        yield _Work(task, quantizer, reader, converters, readers, stop, source_hash)


_Result = tuple[Iterable[Bytes], Iterable[ProjectionRecord]]  # the writer goes through both, after all pieces before
_Loaded = dict[str, Bytes]  # the bytes of tensors, or parts of them, by name


@dataclass(frozen=True, slots=True)
class _Piece:
    """One unit of work: what it reads, and the call that returns its buffers in file order and its records.

    `copied` is the tensor of which it is a part, if it is copied.
    """

    num_bytes: int
    bytes_in: int
    bytes_out: int
    tensors: int
    reads: tuple[tuple[TensorInfo, int, int], ...]
    call: Callable[[Future[_Loaded]], _Result]
    copied: str = ""


@dataclass(frozen=True, slots=True)
class _Work:
    task: ShardTask
    quantizer: Quantizer
    reader: ShardReader
    converters: ThreadPoolExecutor
    readers: ThreadPoolExecutor
    stop: Event
    source_hash: FileHash | None

    def check_source(self) -> None:
        """Compare the source shard's sha256 with the one that its download left (CheckpointError)."""
        expected = self.task.sha256
        path = self.task.source_folder / self.task.shard.name
        if self.source_hash is not None and (digest := self.source_hash.hexdigest()) != expected:
            raise CheckpointError(
                f"{path}: is damaged: its sha256 is {digest}, but the Hub stated {expected}. "
                f"`hf download REPO {shlex.quote(path.name)} --force-download` replaces it."
            )

    def ahead(self, pieces: Iterator[_Piece]) -> Generator[tuple[_Piece, _Result]]:
        """Run pieces in the pools ahead of the writer: at most `inflight_bytes` of them, or one larger piece."""
        waiting: deque[tuple[_Piece, Future[_Loaded], Future[_Result]]] = deque()
        inflight = 0
        limit = self.task.inflight_bytes
        following = next(pieces, None)
        try:
            while waiting or following is not None:
                while following is not None and (not waiting or inflight + following.num_bytes <= limit):
                    loading = self.readers.submit(self._load, following)
                    converting = self.converters.submit(following.call, loading)
                    waiting.append((following, loading, converting))
                    inflight += following.num_bytes + PIECE_BYTES
                    following = next(pieces, None)
                if self.stop.is_set():
                    raise InterruptedRun
                piece, _, converting = waiting.popleft()
                result = converting.result()
                inflight -= piece.num_bytes + PIECE_BYTES
                yield piece, result
        finally:
            unfinished: list[Future[Any]] = [future for _, *futures in waiting for future in futures]
            wait([future for future in unfinished if not future.cancel()])  # they read files that are closed next

    def _load(self, piece: _Piece) -> _Loaded:
        if self.stop.is_set():
            raise InterruptedRun
        if self.source_hash is not None:
            own = (t.begin + end for t, _, end in piece.reads if t.shard == self.task.shard.name)
            self.source_hash.wait(max(own, default=0))
        return {t.name: self.reader.read(t, begin=begin, end=end) for t, begin, end in piece.reads}

    def pieces(self) -> Iterator[_Piece]:
        for step in self.task.shard.steps:
            if isinstance(step, CopyStep):
                tensor = step.tensor
                if tensor.num_bytes == 0:
                    continue  # nothing to read or to write
                part = COPY_BYTES
                if step.scaling is not None:  # whole rows
                    row_bytes = tensor.shape[-1] * DTYPE_BYTES[tensor.dtype]
                    part = max(COPY_BYTES // row_bytes, 1) * row_bytes
                for begin in range(0, tensor.num_bytes, part):
                    end = min(begin + part, tensor.num_bytes)
                    reads = ((tensor, begin, end),)
                    tensors = int(end == tensor.num_bytes)
                    call = partial(self._copy, step)
                    size = end - begin
                    yield _Piece(size, size, size, tensors, reads, call, tensor.name)
            elif isinstance(step, Fp8Step):
                yield from self._fp8_pieces(step)
            else:
                reads = tuple((t, 0, t.num_bytes) for t in step_sources(step))
                bytes_in = sum(end for _, _, end in reads)
                bytes_out = step.num_bytes
                call = partial(self._quantize_members, step)
                yield _Piece(bytes_in + bytes_out, bytes_in, bytes_out, step.num_outputs, reads, call)

    def _fp8_pieces(self, step: Fp8Step) -> Iterator[_Piece]:
        """Yield pieces of whole rows and blocks. The last one has the scales of all, which follow the codes."""
        tensor = step.tensor
        num_rows, columns = tensor.shape
        rows = max(COPY_BYTES // (2 * columns * FP8_BLOCK), 1) * FP8_BLOCK
        weight = _Fp8Parts(step, Lock(), {})
        for start in range(0, num_rows, rows):
            end = min(start + rows, num_rows)
            codes = (end - start) * columns
            bytes_in, bytes_out, tensors = 2 * codes, codes, 0
            if end == num_rows:
                bytes_in += 0 if step.partner is None else step.partner.num_bytes
                bytes_out += step.num_bytes - num_rows * columns
                tensors = step.num_outputs
            reads = ((tensor, 2 * start * columns, 2 * end * columns),)
            call = partial(self._quantize_fp8, weight, start, end)
            yield _Piece(3 * codes, bytes_in, bytes_out, tensors, reads, call)

    def _quantize_members(self, step: ConvertStep, loading: Future[_Loaded]) -> _Result:
        loaded = loading.result()
        if self.task.recipe.target == "bf16":
            weights = (load_projection(lambda tensor: loaded[tensor.name], p) for p in step.members)
            return [weight.bits.view(np.uint8).reshape(-1) for weight in weights], []
        sources = [(p, self._load_scaled(loaded, p)) for p in step.members]
        magnitudes = [self.quantizer.measure(source, name=p.where) for p, source in sources]
        for partner in step.partners:
            magnitudes.append(self.quantizer.measure(self._load_scaled(loaded, partner), name=partner.where))
        shared = magnitudes[0]
        for magnitude in magnitudes[1:]:
            shared = shared.merge(magnitude)
        global_scale = self.quantizer.global_scale(shared)
        calibration = self.task.calibration
        buffers: list[Bytes] = []
        records: list[ProjectionRecord] = []
        for projection, source in sources:
            name = projection.module
            if calibration is not None:
                result = calibration.quantized_weight(projection, shape=source.shape, global_scale=global_scale)
                metrics = measure_quantized(source, result, name=name, magnitude=shared)
            else:
                result, metrics = self.quantizer.quantize(
                    source, name=name, magnitude=shared, global_scale=global_scale
                )
            buffers += [result.packed.reshape(-1), result.block_scales.reshape(-1)]
            scalars = scalar_bytes(self.task.recipe, projection, global_scale)
            buffers += [np.frombuffer(raw, dtype=np.uint8) for raw in scalars]
            records.append(ProjectionRecord(name, projection.role, global_scale, metrics))
        return buffers, records

    def _load_scaled(self, loaded: _Loaded, projection: Projection) -> SourceWeight:
        weight = load_projection(lambda tensor: loaded[tensor.name], projection)
        calibration = self.task.calibration
        if calibration is None:
            return weight
        return calibration.scaled_weight(weight, projection)

    def _copy(self, step: CopyStep, loading: Future[_Loaded]) -> _Result:
        data = loading.result()[step.tensor.name]
        scaling = step.scaling
        calibration = self.task.calibration
        if not is_finite(data, step.tensor.dtype):
            raise MalformedFileError(f"{step.tensor.shard}: {step.tensor.name}: has NaN or infinite values.")
        if scaling is None or calibration is None:
            return [data], []
        return [calibration.scaled_copy(data, step.tensor, scaling)], []

    def _quantize_fp8(self, weight: "_Fp8Parts", start: int, end: int, loading: Future[_Loaded]) -> _Result:
        step = weight.step
        tensor = step.tensor
        data = loading.result()[tensor.name]
        if step.scaling is not None and self.task.calibration is not None:
            data = self.task.calibration.scaled_copy(data, tensor, step.scaling)
        bits = data.view(np.uint16).reshape(-1, tensor.shape[1])
        name = f"{tensor.shard}: {tensor.name}"
        try:
            if step.has_blocks:
                shared = None if step.partner is None else self._shared_amax(weight)
                part = quantize_fp8_blocks(bits, name=name, shared=shared, encode=encode_fp8)
            else:
                part = quantize_fp8(bits, name=name, encode=encode_fp8)
        except FormatError as error:
            raise MalformedFileError(str(error)) from None
        weight.parts[start] = part.scales, fp8_sums(bits, part)
        codes = part.codes.reshape(-1)
        if end < tensor.shape[0]:
            return [codes], []
        return chain([codes], weight.all_scales()), weight.record()

    def _shared_amax(self, weight: "_Fp8Parts") -> NDArray[np.float32]:
        """Return max |w| float32 [C] of a weight and its partner for each column of blocks: found once, in parts."""
        with weight.lock:
            if weight.shared is not None:
                return weight.shared
            amax = list[NDArray[np.float32]]()
            for tensor in step_sources(weight.step):
                row_bytes = 2 * tensor.shape[1]
                size = max(COPY_BYTES // row_bytes, 1) * row_bytes
                for begin in range(0, tensor.num_bytes, size):
                    data = self.reader.read(tensor, begin=begin, end=min(begin + size, tensor.num_bytes))
                    bits = data.view(np.uint16).reshape(-1, tensor.shape[1])
                    amax.append(block_amax(bits, name=f"{tensor.shard}: {tensor.name}").max(axis=0))
            weight.shared = shared = np.max(amax, axis=0)
            return shared


@dataclass(slots=True)
class _Fp8Parts:
    """Scales and sums of the rows of an FP8 weight, by the first row of each piece."""

    step: Fp8Step
    lock: Lock
    parts: dict[int, tuple[NDArray[np.float32], Fp8Sums]]
    shared: NDArray[np.float32] | None = None

    def all_scales(self) -> Iterator[Bytes]:
        for start in sorted(self.parts):
            yield self.parts[start][0].reshape(-1).view(np.uint8)

    def record(self) -> Iterator[ProjectionRecord]:
        sums = (self.parts[start][1] for start in sorted(self.parts))
        metrics = fp8_metrics(sums, num_weights=math.prod(self.step.tensor.shape))
        yield ProjectionRecord(self.step.module, self.step.role, 1.0, metrics)


def scalar_bytes(recipe: Recipe, projection: Projection, global_scale: float) -> list[bytes]:
    """Return the scalars of one converted projection as the layout stores them: global scale, input scale if W4A4."""
    names = LAYOUTS[recipe.layout]
    try:
        scalars = [names.encode_scalar(global_scale)]
    except FormatError as error:
        raise FormatError(f"{projection.where}: {error}") from None
    if recipe.activations == "w4a4":
        scale = recipe.input_scale.gate_up
        if projection.kind == "down":
            scale = recipe.input_scale.down
        scalars.append(names.encode_scalar(scale))
    return scalars
