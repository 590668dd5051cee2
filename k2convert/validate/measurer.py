"""Checking weights during the pass over the shards: module by module, in a pool of threads."""

import math
import struct
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Final

from k2convert.calibrate.columns import Calibration
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.errors import remedy
from k2convert.models.names import TensorName
from k2convert.models.projections import SOURCE_REMEDY, projection_of
from k2convert.models.weights import load_projection
from k2convert.quantize.formats.int4 import SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.records.shard_record import ProjectionRecord
from k2convert.validate.contract.subject import Subject
from k2convert.validate.contract.tensors import shape_problems
from k2convert.validate.rule_check import is_measured_only
from k2convert.validate.scaling import over_powers
from k2convert.validate.totals import Totals
from k2convert.validate.weights import CheckedWeight, WrittenWeight, check_weights

if TYPE_CHECKING:
    from k2convert.validate.library_decoders import Decoder

MAX_PENDING: Final = 3  # sets of tensors checked at once; the pass over the shards waits for the slowest
MAX_HELD: Final = 4  # sets that wait for a tensor


@dataclass(slots=True)
class Measurer:
    """Collects the tensors of each module during the scan and checks them in the pool; a TensorVisitor.

    Modules that share a global scale are checked together if they come soon after one another. `sharing` maps each
    sharing key to the modules of the source that have it.
    """

    subject: Subject
    source: Checkpoint
    reader: ShardReader
    pool: ThreadPoolExecutor
    decoder: "Decoder | None"
    recorded: Mapping[str, ProjectionRecord]
    rule: Rule | None
    sharing: Mapping[str, Mapping[str, TensorName]]
    calibration: Calibration | None
    totals: Totals = field(default_factory=Totals)
    decoder_mismatches: set[str] = field(default_factory=set[str])
    _parts: dict[str, dict[str, Bytes]] = field(default_factory=dict[str, dict[str, Bytes]])
    _held: dict[str, dict[str, dict[str, Bytes]]] = field(default_factory=dict[str, dict[str, dict[str, Bytes]]])
    _pending: list[Future[list[CheckedWeight]]] = field(default_factory=list[Future[list[CheckedWeight]]])
    _room: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(MAX_PENDING))

    def tensor(self, module: str, parameter: str, data: Bytes) -> None:
        """Take one tensor; check its module once codes, block scales and global scale are there."""
        names = self.subject.names
        needed = (names.weight, names.block_scale, names.global_scale)
        if parameter not in needed:  # keeping the view would keep the whole batch in memory
            return
        parts = self._parts.setdefault(module, {})
        parts[parameter] = data
        if len(parts) == len(needed):
            del self._parts[module]
            found = self.subject.modules[module]
            if self.subject.is_in_source(found) and not shape_problems(self.subject, found):
                self._hold(module, parts)

    def _hold(self, module: str, parts: dict[str, Bytes]) -> None:
        """Check a module with those that share its global scale, when all of them are here or too many wait."""
        key = self.subject.modules[module].parts.sharing_key
        held = self._held.setdefault(key, {})
        held[module] = parts
        if len(held) >= len(self.sharing.get(key, ())):
            self._submit(key)
        elif len(self._held) > MAX_HELD:
            self._submit(next(iter(self._held)))

    def _submit(self, key: str) -> None:
        self._room.acquire()
        self._pending.append(self.pool.submit(self._check, key, self._held.pop(key)))

    def _check(self, key: str, held: dict[str, dict[str, Bytes]]) -> list[CheckedWeight]:
        try:
            weights = [self._weight(module, parts) for module, parts in held.items()]
            others = {module: place for module, place in self.sharing.get(key, {}).items() if module not in held}
            partners = [] if self.rule is None else [self._load(place) for place in others.values()]
            checked = check_weights(weights, partners=partners, names=self.subject.names, rule=self.rule)
            for found in checked:
                self.totals.add(self.subject.modules[found.module].parts.role, found)
            return [replace(found, metrics=None) for found in checked]
        finally:
            self._room.release()

    def _weight(self, module: str, parts: Mapping[str, Bytes]) -> WrittenWeight:
        names, record, place = self.subject.names, self.recorded.get(module), self.subject.modules[module].parts
        source = self._load(place)
        raw = parts[names.global_scale].tobytes()
        packed, block_scales = parts[names.weight], parts[names.block_scale]
        if self.decoder is not None:
            self._decode_by_library(module, packed, block_scales, raw, source.shape)
        recorded_scale = None if record is None else record.global_scale
        importance = None if self.calibration is None else self.calibration.importance(place)
        measured_only = is_measured_only(self.rule, place.role, has_statistics=self.calibration is not None)
        return WrittenWeight(
            module, source, packed, block_scales, raw, recorded_scale, importance, is_measured_only=measured_only
        )

    def _load(self, place: TensorName) -> SourceWeight:
        with remedy(SOURCE_REMEDY):
            weight = load_projection(self.reader, projection_of(self.source, place))
            return over_powers(weight, self.subject.scaling.of_weight(place))

    def _decode_by_library(
        self, module: str, packed: Bytes, block_scales: Bytes, raw: bytes, shape: tuple[int, int]
    ) -> None:
        from k2convert.validate.library_decoders import agrees

        assert self.decoder is not None
        global_scale = self.subject.names.decode_scalar(raw)
        if not 0 < global_scale < math.inf:  # rule 6 reports it
            self.decoder_mismatches.add(module)
            return
        rows, columns = shape
        written = Nvfp4Weight(
            packed=packed.copy().reshape(rows, columns // 2),
            block_scales=block_scales.copy().reshape(rows, columns // BLOCK_SIZE),
            global_scale=global_scale,
        )
        (stored,) = struct.unpack("<f", raw)
        theirs = self.decoder(written.packed, written.block_scales, stored)
        if not agrees(theirs, dequantize_nvfp4(written), stored=stored):
            self.decoder_mismatches.add(module)

    def settle(self) -> None:
        """Check the modules taken so far, and close the source's files."""
        self._submit_all()
        wait(self._pending)
        self.reader.close()

    def results(self) -> dict[str, CheckedWeight]:
        """Wait for the last module; return every checked module in the order of the shards."""
        self._submit_all()
        return {found.module: found for future in self._pending for found in future.result()}

    def _submit_all(self) -> None:
        for key in list(self._held):
            self._submit(key)
