"""The loop: read, convert, write, record; shard after shard, tensor after tensor, in bounded memory.

Within a shard, steps (an expert's gate and up, a down projection, a piece of a copied tensor) are read by one pool of
threads, converted by another, a bounded number of bytes ahead, and written in file order by the shard's own thread.
Reads, arithmetic and writes release the interpreter's lock, so they overlap. A shard is done when its record is
written; until then nothing stands under its name.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import numpy as np

from k2convert.checkpoint.header import TensorInfo, encode_header
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.checkpoint.writer import ALIGNMENT, ShardWriter
from k2convert.errors import FormatError
from k2convert.models.projections import Projection
from k2convert.models.weights import load_projection
from k2convert.plan.plan import ConvertStep, CopyStep, Plan, ShardJob, step_sources
from k2convert.plan.recipe import Recipe
from k2convert.quantize.formats.int4 import Int4Weight, SourceWeight, dequantize_int4
from k2convert.quantize.quantizer import Quantizer
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ProjectionRecord, ShardRecord

COPY_BYTES = 16 << 20
INFLIGHT_BYTES = 192 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of the loop: bytes and tensors since the last report; `finished` names a shard just recorded."""

    bytes_in: int = 0
    bytes_out: int = 0
    tensors: int = 0
    finished: str | None = None


Report = Callable[[Progress], None]


class InterruptedRun(Exception):  # noqa: N818 - not an error: somebody asked to stop
    """The run was asked to stop between two steps."""


_Result = tuple[list[Bytes], list[ProjectionRecord]]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The bytes of one piece, read beforehand."""

    parts: dict[str, Bytes]

    def read(self, tensor: TensorInfo) -> Bytes:
        return self.parts[tensor.name]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One unit of work: what it reads, and the call that makes of it buffers in file order and records."""

    num_bytes: int
    bytes_in: int
    tensors: int
    reads: tuple[tuple[TensorInfo, int, int], ...]
    call: Callable[["_Loaded"], _Result]


@dataclass(frozen=True, slots=True)
class ShardConverter:
    """Converts single shards of a plan into a folder; safe to call from several threads at once."""

    plan: Plan
    reader: ShardReader
    quantizer: Quantizer
    destination: Path
    pool: ThreadPoolExecutor
    reading: ThreadPoolExecutor
    fingerprint: str
    header_digests: Mapping[str, str]
    stop: Event
    preallocate: bool = True
    for_upload: bool = False
    inflight_bytes: int = INFLIGHT_BYTES

    def convert(self, job: ShardJob, *, report: Report) -> ShardRecord:
        """Write one shard under its final name and return its record (not yet journalled)."""
        outputs = [(o.name, o.dtype, o.shape, o.num_bytes) for o in job.outputs]
        header = encode_header(outputs, metadata=dict(job.metadata), alignment=ALIGNMENT)
        file_bytes = len(header) + job.data_bytes
        path, records = self.destination / job.name, list[ProjectionRecord]()
        with ShardWriter(path, file_bytes, preallocate=self.preallocate, for_upload=self.for_upload) as writer:
            writer.write(header)
            for piece, (buffers, measured) in self._ahead(self._pieces(job)):
                for buffer in buffers:
                    writer.write(buffer.data)
                records += measured
                report(Progress(piece.bytes_in, sum(b.nbytes for b in buffers), piece.tensors))
            digest = writer.commit()
        return ShardRecord(
            shard=job.name,
            fingerprint=self.fingerprint,
            blake3=digest,
            file_bytes=file_bytes,
            num_tensors=len(outputs),
            source_headers={shard: self.header_digests[shard] for shard in job.source_shards},
            projections=tuple(records),
            sha256=writer.sha256,
        )

    def _ahead(self, pieces: Iterator[_Piece]) -> Iterator[tuple[_Piece, _Result]]:
        """Run pieces in the pools ahead of the writer, at most `inflight_bytes` of them (or one larger piece)."""
        waiting: deque[tuple[_Piece, Future[_Result]]] = deque()
        inflight = 0
        following = next(pieces, None)
        try:
            while waiting or following is not None:
                while following is not None and (not waiting or inflight + following.num_bytes <= self.inflight_bytes):
                    loading = self.reading.submit(self._load, following)
                    waiting.append((following, self.pool.submit(self._make, following, loading)))
                    inflight += following.num_bytes
                    following = next(pieces, None)
                if self.stop.is_set():
                    raise InterruptedRun
                piece, future = waiting.popleft()
                result = future.result()
                inflight -= piece.num_bytes
                yield piece, result
        finally:
            for _, future in waiting:
                future.cancel()

    def _load(self, piece: _Piece) -> _Loaded:
        if self.stop.is_set():
            raise InterruptedRun
        return _Loaded({t.name: self.reader.read(t, begin=begin, end=end) for t, begin, end in piece.reads})

    def _make(self, piece: _Piece, loading: Future[_Loaded]) -> _Result:
        return piece.call(loading.result())

    def _pieces(self, job: ShardJob) -> Iterator[_Piece]:
        for step in job.steps:
            if isinstance(step, CopyStep):
                size = step.tensor.num_bytes
                for begin in range(0, max(size, 1), COPY_BYTES):
                    end = min(begin + COPY_BYTES, size)
                    last = 1 if end == size else 0
                    reads = ((step.tensor, begin, end),)
                    yield _Piece(end - begin, end - begin, last, reads, partial(self._copy, step))
            else:
                reads = tuple((t, 0, t.num_bytes) for t in step_sources(step))
                bytes_in = sum(end for _, _, end in reads)
                bytes_out = sum(o.num_bytes for o in step.outputs)
                yield _Piece(bytes_in + bytes_out, bytes_in, len(step.outputs), reads, partial(self._convert, step))

    def _copy(self, step: CopyStep, loaded: _Loaded) -> _Result:
        return [loaded.read(step.tensor)], []

    def _convert(self, step: ConvertStep, loaded: _Loaded) -> _Result:
        if self.plan.recipe.target == "bf16":
            return [_dequantize(load_projection(loaded, p)) for p in step.members], []
        sources = [(p, load_projection(loaded, p)) for p in step.members]
        magnitudes = [self.quantizer.measure(source, name=_where(p)) for p, source in sources]
        for partner in step.partners:
            magnitudes.append(self.quantizer.measure(load_projection(loaded, partner), name=_where(partner)))
        shared = magnitudes[0]
        for magnitude in magnitudes[1:]:
            shared = shared.merge(magnitude)
        buffers: list[Bytes] = []
        records: list[ProjectionRecord] = []
        for projection, source in sources:
            tensors, record = self._quantize(projection, source, shared)
            buffers += tensors
            records.append(record)
        return buffers, records

    def _quantize(
        self, projection: Projection, source: SourceWeight, shared: Magnitude
    ) -> tuple[list[Bytes], ProjectionRecord]:
        global_scale = self.quantizer.global_scale(shared, is_int4=isinstance(source, Int4Weight))
        result, metrics = self.quantizer.quantize(
            source, name=projection.module, magnitude=shared, global_scale=global_scale
        )
        buffers = [result.packed.reshape(-1), result.block_scales.reshape(-1)]
        scalars = scalar_bytes(self.plan.recipe, projection, global_scale)
        buffers += [np.frombuffer(raw, dtype=np.uint8) for raw in scalars]
        return buffers, ProjectionRecord(projection.module, projection.role, global_scale, metrics.to_dict())


def scalar_bytes(recipe: Recipe, projection: Projection, global_scale: float) -> list[bytes]:
    """The scalars of one converted projection as the layout stores them: global scale, then input scale if W4A4."""
    names = LAYOUTS[recipe.layout]
    try:
        scalars = [names.encode_scalar(global_scale)]
    except FormatError as error:
        raise FormatError(f"{_where(projection)}: {error}") from None
    if recipe.activations == "w4a4":
        scale = recipe.input_scale.down if projection.projection == "down" else recipe.input_scale.gate_up
        scalars.append(names.encode_scalar(scale))
    return scalars


def run_conversion(
    *,
    plan: Plan,
    converters: Sequence[ShardConverter],
    journal: Journal,
    fingerprint: str,
    workers: int,
    report: Report,
) -> dict[str, ShardRecord]:
    """Convert every shard not yet in the journal, `workers` at a time; returns all records by shard.

    Only records with this digest of the job's fingerprint count: a shard of another job is written anew.
    Shards go to the converters (one a device) as these come free, so several devices share one plan. The first failure
    stops the others between two steps; what was recorded stays. An interrupt does the same.
    """
    finished = journal.finished(fingerprint=fingerprint)
    pending = [job for job in plan.jobs if job.name not in finished]

    free: SimpleQueue[ShardConverter] = SimpleQueue()
    for i in range(max(workers, 1)):
        free.put(converters[i % len(converters)])

    def work(job: ShardJob) -> None:
        converter = free.get()
        try:
            record = converter.convert(job, report=report)
        finally:
            free.put(converter)
        journal.record(record)
        finished[job.name] = record
        report(Progress(finished=job.name))

    with ThreadPoolExecutor(max_workers=max(workers, 1), thread_name_prefix="shard") as shards:
        futures = [shards.submit(work, job) for job in pending]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((f for f in done if f.exception() is not None), None)
            if failed is not None:
                failed.result()
        finally:
            for converter in converters:
                converter.stop.set()
            for future in futures:
                future.cancel()
    return finished


def _where(projection: Projection) -> str:
    return f"{projection.home.shard}: {projection.module}"


def _dequantize(source: SourceWeight) -> Bytes:
    weight = dequantize_int4(source) if isinstance(source, Int4Weight) else source
    return weight.bits.view(np.uint8).reshape(-1)
