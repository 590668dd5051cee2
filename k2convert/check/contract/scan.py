"""The one pass over the shards: hashes, block scales, scalars and copied tensors, in bounded memory.

Reading is most of the cost of checking 594 GB, so everything that needs data uses the same pass. Each shard is read
once in file order, in batches of whole tensors. The next batch is read while the current one is checked. Visitors get
the bytes too: to hash whole shards, or to decode converted tensors.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
from blake3 import blake3

from k2convert.check.contract.fp8 import count_unusable, has_partner
from k2convert.check.contract.modules import CONVERTED_WHILE_LOADING, Module, fp8_scales, numbers_of
from k2convert.check.contract.result import Result
from k2convert.check.contract.tensors import shape_problems
from k2convert.checkpoint.files import file_digest
from k2convert.checkpoint.header import DTYPE_BYTES, ShardHeader, TensorInfo
from k2convert.checkpoint.reader import Bytes, ShardReader, is_finite, is_zero, same_bytes
from k2convert.choices import BLOCK_SIZE
from k2convert.models.config import KV_SCALES
from k2convert.models.names import WEIGHT, WEIGHT_SCALE
from k2convert.quantize.formats.bf16 import round_to_bf16
from k2convert.records.events import SILENT, Events
from k2convert.records.ledger import Scalar, is_weight

BATCH_BYTES = 16 << 20
SUBNORMAL_LAST = 0x07
LARGEST_FINITE = 0x7E
_CODE_BYTES_A_BLOCK = BLOCK_SIZE // 2
_MAGNITUDES = np.uint8(0x77)  # of the two codes in a byte


ShardBytes = Callable[[str, Bytes], None]
"""Gets the next bytes of a shard, in file order, mostly from another thread."""
TensorBytes = Callable[[str, str, Bytes], None]
"""Gets module, parameter and bytes of one whole tensor of a converted module, in file order."""


Piece = tuple[TensorInfo, int, int]
"""Bytes [begin, end) of one tensor."""


@dataclass(slots=True)
class ScanResult:
    """Findings of the pass, by the names that tensors should have (see Result).

    `not_finite` are copied tensors with NaN or infinite values, `all_zero` weights without any other value than zero.
    `compared` are the copied tensors that were compared with the source. `scaled` are those of them that smoothing
    changes: the certificate compares them, and `misscaled` has its problems. `different` counts bytes; of a tensor in
    another dtype than the source's, numbers. `scalars` are four bytes each, as hex. `kv_scales` are least and largest.
    `shared_rows` are the scales of FP8 modules that share them with another one, as hex; empty if its rows differ.
    """

    digests: dict[str, str] = field(default_factory=dict[str, str])
    unreadable_bytes: dict[str, int] = field(default_factory=dict[str, int])
    invalid_scales: dict[str, int] = field(default_factory=dict[str, int])
    subnormal_scales: dict[str, int] = field(default_factory=dict[str, int])
    zero_blocks_with_codes: dict[str, int] = field(default_factory=dict[str, int])
    scalars: dict[str, Scalar] = field(default_factory=dict[str, Scalar])
    kv_scales: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    different: dict[str, int] = field(default_factory=dict[str, int])
    misscaled: dict[str, str] = field(default_factory=dict[str, str])
    not_finite: set[str] = field(default_factory=set[str])
    all_zero: set[str] = field(default_factory=set[str])
    shared_rows: dict[str, str] = field(default_factory=dict[str, str])
    compared: set[str] = field(default_factory=set[str])
    scaled: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, slots=True)
class _Target:
    """One tensor: its right name, its module if converted, its source if copied, and whether smoothing scales it."""

    name: str
    parameter: str
    module: Module | None
    is_readable: bool
    source: TensorInfo | None
    is_scaled: bool = False


def scan_shards(
    result: Result,
    *,
    shard_visitor: ShardBytes | None = None,
    tensor_visitor: TensorBytes | None = None,
    events: Events = SILENT,
    around: Callable[[str], AbstractContextManager[object]] = nullcontext,
    finished: Callable[[str, str], object] | None = None,
) -> ScanResult:
    """Read every readable shard once; raises SourceReadError if reading fails.

    `around` makes the context in which a shard is read: its files are opened and closed inside it. `finished` gets the
    name and the blake3 of each shard that was read, inside it too.
    """
    scan_result = ScanResult()
    source = result.source
    with (
        ShardReader(lambda shard: result.folder / shard) as reader,
        ShardReader(lambda shard: source.path(shard) if source is not None else result.folder / shard) as source_reader,
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="scan") as ahead,
    ):
        scan = _Scan(result, reader, source_reader, scan_result, ahead, shard_visitor, tensor_visitor, events)
        for shard, header in result.headers.items():
            with around(shard):
                scan_result.digests[shard] = scan.shard(header)
                reader.release()
                source_reader.release()
                if finished is not None:
                    finished(shard, scan_result.digests[shard])
        for shard in result.unreadable:
            path = result.folder / shard
            if path.is_file():
                with around(shard):
                    scan_result.digests[shard] = file_digest(path)
                    scan_result.unreadable_bytes[shard] = path.stat().st_size
    return scan_result


def _targets(result: Result, header: ShardHeader) -> dict[str, _Target]:
    """Return what to do with each tensor of a shard, by the name that it has there."""
    targets: dict[str, _Target] = {}
    problems: dict[str, dict[str, str]] = {}
    is_foreign = result.is_foreign
    for tensor in header.tensors.values():
        name = result.renamed.get(tensor.name, tensor.name)
        if result.tensors.get(name) is not tensor:  # a second one of this name
            continue
        module_name, _, parameter = name.rpartition(".")
        module = result.modules.get(module_name)
        if module is not None and (module.is_converted or module.is_fp8) and module.has_converted(parameter):
            if module_name not in problems:
                problems[module_name] = shape_problems(result, module)
            readable = parameter not in problems[module_name]
            targets[tensor.name] = _Target(name, parameter, module, readable, None)
            continue
        before = None
        if result.source is not None:
            before = result.source.tensors.get(name)
        if before is not None and (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
            before = before if is_foreign and result.is_recast(name) else None
        is_scaled = False
        if module is not None:
            parts = replace(module.parts, parameter=parameter)
            is_scaled = result.scaling.changes_copy(parts, family=result.family)
        targets[tensor.name] = _Target(name, parameter, None, True, before, is_scaled)
    return targets


@dataclass(frozen=True, slots=True)
class _Scan:
    result: Result
    reader: ShardReader
    source_reader: ShardReader
    scan_result: ScanResult
    ahead: ThreadPoolExecutor
    shard_visitor: ShardBytes | None
    tensor_visitor: TensorBytes | None
    events: Events
    targets: dict[str, _Target] = field(default_factory=dict[str, _Target])  # of the shard that is scanned

    def shard(self, header: ShardHeader) -> str:
        """Scan one shard; return the blake3 of the whole file."""
        self.targets.clear()
        self.targets.update(_targets(self.result, header))
        digest = blake3(self._read(header.shard, 0, header.data_begin).data)
        batches = list(self._batches(header))
        reading = None
        if batches:
            reading = self.ahead.submit(self._read_batch, batches[0])
        for number, batch in enumerate(batches):
            assert reading is not None
            data = reading.result()
            if number + 1 < len(batches):
                reading = self.ahead.submit(self._read_batch, batches[number + 1])
            digest.update(data.data)
            offset = 0
            for tensor, begin, end in batch:
                self._check(tensor, begin, data[offset : offset + end - begin])
                offset += end - begin
            self.events.progress(bytes_in=len(data))
        return digest.hexdigest()

    def _read_batch(self, batch: list[Piece]) -> Bytes:
        first, begin, _ = batch[0]
        last, _, end = batch[-1]
        return self._read(first.shard, first.begin + begin, last.begin + end)

    def _batches(self, header: ShardHeader) -> Iterator[list[Piece]]:
        """Yield adjacent pieces in file order. Tensors of converted modules stay whole, large copied ones are split."""
        batch: list[Piece] = []
        filled = 0
        position = 0
        for tensor in sorted(header.tensors.values(), key=lambda t: (t.begin, t.end)):
            target = self.targets.get(tensor.name)
            stays_whole = target is not None and target.module is not None
            size = max(tensor.num_bytes, 1) if stays_whole else BATCH_BYTES
            for begin in range(0, max(tensor.num_bytes, 1), size):
                end = min(begin + size, tensor.num_bytes)
                if batch and (position != tensor.begin + begin or filled + end - begin > BATCH_BYTES):
                    yield batch
                    batch = []
                    filled = 0
                batch.append((tensor, begin, end))
                filled += end - begin
                position = tensor.begin + end
        if batch:
            yield batch

    def _read(self, shard: str, begin: int, end: int) -> Bytes:
        data = self.reader.read(TensorInfo("(all)", "U8", (end - begin,), begin, end, shard))
        if self.shard_visitor is not None:
            self.shard_visitor(shard, data)
        return data

    def _check(self, tensor: TensorInfo, begin: int, data: Bytes) -> None:
        target = self.targets.get(tensor.name)
        if target is None:
            return
        if target.module is None:
            if not is_finite(data, tensor.dtype):
                self.scan_result.not_finite.add(target.name)
            if data.size and is_weight(target.name):  # its parts come in order
                if not is_zero(data):
                    self.scan_result.all_zero.discard(target.name)
                elif begin == 0:
                    self.scan_result.all_zero.add(target.name)
            if data.size and target.parameter in KV_SCALES and tensor.dtype in CONVERTED_WHILE_LOADING:
                scales = numbers_of(data, tensor.dtype)
                self.scan_result.kv_scales[target.name] = (float(scales.min()), float(scales.max()))
        if target.source is not None and target.source.dtype != tensor.dtype:
            self._compare_numbers(target, target.source, tensor, begin, data)
        elif target.source is not None:
            self._compare(target, target.source, begin, data)
        elif target.module is not None and target.module.is_fp8:
            if target.is_readable:
                self._check_fp8(target, target.module, tensor, data)
            if self.tensor_visitor is not None:
                self.tensor_visitor(target.module.name, target.parameter, data)
        elif target.module is not None:
            names = self.result.names
            if target.is_readable and target.parameter in (names.global_scale, names.input_scale):
                self.scan_result.scalars[target.name] = data.tobytes().hex()
            is_scale = target.is_readable and target.parameter == names.block_scale and data.size
            has_zero_start = is_zero(data[:BLOCK_SIZE] & _MAGNITUDES)  # most weights are answered by it
            if target.parameter == names.weight and has_zero_start and is_zero(data & _MAGNITUDES):
                self.scan_result.all_zero.add(target.module.name)
            if is_scale and (data.min() <= SUBNORMAL_LAST or data.max() > LARGEST_FINITE):  # most scales are good
                self._count_scales(target, target.module, data)
            if self.tensor_visitor is not None:
                self.tensor_visitor(target.module.name, target.parameter, data)

    def _compare(self, target: _Target, source: TensorInfo, begin: int, data: Bytes) -> None:
        scan_result = self.scan_result
        scan_result.compared.add(target.name)
        if target.is_scaled:
            scan_result.scaled.add(target.name)
            return
        before = self.source_reader.read(source, begin=begin, end=begin + data.size)
        if not same_bytes(before, data):
            changed = int(np.count_nonzero(before != data))
            scan_result.different[target.name] = scan_result.different.get(target.name, 0) + changed

    def _compare_numbers(
        self, target: _Target, source: TensorInfo, tensor: TensorInfo, begin: int, data: Bytes
    ) -> None:
        """Compare with the source's numbers, rounded to the dtype of the tensor."""
        first, last = (at // DTYPE_BYTES[tensor.dtype] * DTYPE_BYTES[source.dtype] for at in (begin, begin + data.size))
        before = numbers_of(self.source_reader.read(source, begin=first, end=last), source.dtype)
        if tensor.dtype == "BF16":
            before = round_to_bf16(before)
        elif tensor.dtype == "F16":
            with np.errstate(over="ignore"):
                before = before.astype(np.float16)
        self.scan_result.compared.add(target.name)
        changed = int(np.count_nonzero(before != numbers_of(data, tensor.dtype)))
        if changed:
            self.scan_result.different[target.name] = self.scan_result.different.get(target.name, 0) + changed

    def _check_fp8(self, target: _Target, module: Module, tensor: TensorInfo, data: Bytes) -> None:
        if count := count_unusable(self.result, module, tensor, data, read=self.reader.read):
            self.scan_result.invalid_scales[target.name] = count
        if target.parameter == WEIGHT and is_zero(data & np.uint8(LARGEST_FINITE + 1)):
            self.scan_result.all_zero.add(module.name)
        if target.parameter == WEIGHT_SCALE and has_partner(self.result, module):
            scales = fp8_scales(data, tensor, module.parameters[WEIGHT].shape[0])
            is_even = bool((scales == scales[:1]).all())
            self.scan_result.shared_rows[module.name] = scales[:1].tobytes().hex() if is_even else ""

    def _count_scales(self, target: _Target, module: Module, scales: Bytes) -> None:
        """Count the scales outside 2^-6 .. 448. Called only if there are any."""
        counts = np.bincount(scales, minlength=256)
        if invalid := int(counts[LARGEST_FINITE + 1 :].sum()):
            self.scan_result.invalid_scales[target.name] = invalid
        if subnormal := int(counts[1 : SUBNORMAL_LAST + 1].sum()):
            self.scan_result.subnormal_scales[target.name] = subnormal
        weight = module.parameters.get(self.result.names.weight)
        if counts[0] and weight is not None and not shape_problems(self.result, module):
            zero = np.flatnonzero(scales == 0)
            begin = int(zero[0]) * _CODE_BYTES_A_BLOCK
            end = (int(zero[-1]) + 1) * _CODE_BYTES_A_BLOCK
            codes = self.reader.read(weight, begin=begin, end=end).reshape(-1, _CODE_BYTES_A_BLOCK)
            dirty = int(np.count_nonzero(codes[zero - zero[0]].any(axis=1)))
            if dirty:
                self.scan_result.zero_blocks_with_codes[f"{module.name}.{self.result.names.weight}"] = dirty
