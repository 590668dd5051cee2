"""Comparing a shard with its source while it is converted, for results whose shards leave the disk.

Every byte is compared before it goes to the file, because the source may be freed while it is read:

    converted    codes and scales are made again by the rule from the source's weights as they were loaded (a sample by
                 the reference arithmetic), and decoded by the independent decoder; the figures must be those that the
                 conversion recorded. Codes of a walk through the layers must be those of a second reading; they are
                 decoded and measured too. The weights must be read from where the source file's own header has them
    copied       the bytes must be those of a second reading, at the place that the source file's own header states;
                 with norm scaling, those bytes times the powers of two of the statistics
    pruned       which expert of the source a name means, and which rows a router has, is derived again from the
                 list of kept experts
    header       it is parsed again, and every tensor must lie where it says

The file's hash must be that of the compared bytes, and only bytes with that hash are uploaded. A second reading of a
file in the page cache comes from there: it checks the programs, not the disk.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from k2convert.calibrate.columns import Calibration
from k2convert.checkpoint.header import ShardHeader, TensorInfo, parse_header
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.reader import Bytes
from k2convert.choices import Rule
from k2convert.errors import FormatError, InvalidCheckpointError
from k2convert.models import FAMILIES, locate_module, parse_tensor_name
from k2convert.models.names import ModulePlace, TensorName
from k2convert.models.projections import Projection
from k2convert.models.weights import TensorSource, load_projection
from k2convert.plan.plan import ConvertStep
from k2convert.plan.pruning import KeptExperts
from k2convert.plan.recipe import Recipe
from k2convert.quantize.formats.int4 import SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.shard_record import ProjectionRecord, SourceCheck
from k2convert.validate.scaling import NO_SCALING, Scaling, over_powers, scaled_bytes
from k2convert.validate.source_places import SourcePlaces
from k2convert.validate.totals import differing_totals, is_same_error
from k2convert.validate.weights import CheckedWeight, WrittenWeight, check_weights

_REMEDY: Final = (
    "The shard was not uploaded. Run the same command again: the shard is made again. If this happens twice, check "
    "the memory, or choose a different --device."
)


class ShardCheck:
    """Compares one shard's bytes with the source, piece by piece. Pieces may come from several threads at once.

    `header` are the bytes that begin the file, `source_digests` the planned digests of the source shards' headers in
    `source_folder`. `kept` are the experts that a pruned result keeps. A difference raises InvalidCheckpointError, a
    source that changed CheckpointError.
    """

    def __init__(
        self,
        header: bytes,
        *,
        shard: str,
        file_bytes: int,
        recipe: Recipe,
        source_folder: Path,
        source_digests: Mapping[str, str],
        calibration: Calibration | None = None,
        kept: KeptExperts | None = None,
    ) -> None:
        self._header: ShardHeader = parse_header(header, shard=shard, file_bytes=file_bytes)
        self._names = LAYOUTS[recipe.layout]
        self._rule: Rule | None = recipe.rule if recipe.quantizer == "native" else None
        self._calibration = calibration
        self._source = SourcePlaces(source_folder, digests=source_digests, kept=kept)
        self._lock = Lock()  # guards the counts; a dict's single operations need no lock
        self._expected: dict[tuple[str, int], bytes] = {}
        self._copied: Counter[str] = Counter()
        self._decoded: dict[str, dict[str, float | int | None]] = {}
        self._hash = blake3(header)

    def read_copy(self, tensor: TensorInfo, begin: int, end: int) -> None:
        """Read bytes [begin, end) of a tensor to copy, before the conversion reads them and may free them."""
        place = self._place(tensor)
        data = self._scaled(place, begin, self._source.read(place, begin, end))
        self._expected[tensor.name, begin] = blake3(data).digest()

    def _place(self, tensor: TensorInfo) -> TensorInfo:
        """Return where the source has a tensor, by its own header; refuse a plan that reads it elsewhere."""
        place = self._source.find(tensor.name, shard=tensor.shard)
        if place is None or (place.begin, place.end) != (tensor.begin, tensor.end):
            raise self._error(tensor.name, "is not read from where the source has it")
        return place

    def _scaled(self, tensor: TensorInfo, begin: int, data: bytes) -> bytes:
        """Return the bytes that a copy must have: the source's, or those times the powers of two of norm scaling."""
        family = next((f for f in FAMILIES if f.classify(tensor.name.rpartition(".")[0]) is not None), None)
        if self._calibration is None or family is None:
            return data
        parts = parse_tensor_name(tensor.name, family=family)
        exponents = self._scaling(parts).of_copy(parts, family=family)
        if exponents is None:
            return data
        try:
            found = scaled_bytes(np.frombuffer(data, np.uint8), dtype=tensor.dtype, begin=begin, exponents=exponents)
        except FormatError as error:
            raise self._error(tensor.name, str(error)) from None
        return found.tobytes()

    def _scaling(self, place: ModulePlace | TensorName) -> Scaling:
        """Return the norm scaling of a module's layer, as the statistics state it."""
        if self._calibration is None or place.layer is None:
            return NO_SCALING
        exponents = self._calibration.exponents(place.layer)
        return NO_SCALING if exponents is None else Scaling({place.layer: exponents})

    def check_copy(self, tensor: TensorInfo, begin: int, data: Bytes, *, position: int) -> None:
        """Check bytes of a copied tensor, from its byte `begin` on, that go to `position` in the file."""
        place = self._header.tensors.get(tensor.name)
        found = self._expected.pop((tensor.name, begin))
        if place is None or place.begin + begin != position or blake3(data.data).digest() != found:
            raise self._error(tensor.name, "the bytes to write are not the source's")
        with self._lock:
            self._copied[tensor.name] += len(data)

    def check_projections(
        self,
        step: ConvertStep,
        records: Sequence[ProjectionRecord],
        buffers: Sequence[Bytes],
        *,
        source: TensorSource,
        position: int,
    ) -> None:
        """Compare the `buffers` of a step, which go to `position` in the file, with the source and the records."""
        starts: dict[int, Bytes] = {}
        for buffer in buffers:
            starts[position] = buffer
            position += len(buffer)
        weights = [
            self._written(projection, record, starts, source)
            for projection, record in zip(step.members, records, strict=True)
        ]
        partners = [self._load(source, partner) for partner in step.partners]
        found = check_weights(weights, partners=partners, names=self._names, rule=self._rule)
        for checked, record in zip(found, records, strict=True):
            self._compare(checked, record)
            self._decoded[checked.module] = checked.error.to_dict() | {"sampled_blocks": checked.sampled_blocks}

    def _load(self, source: TensorSource, projection: Projection) -> SourceWeight:
        """Read a weight of the source, and divide its columns as norm scaling does."""
        for tensor in projection.sources:
            self._place(tensor)
        weight, place = load_projection(source, projection), locate_module(projection.module)
        return weight if place is None else over_powers(weight, self._scaling(place).of_weight(place))

    def _codes(self, projection: Projection) -> Nvfp4Weight | None:
        """Read the codes of the walk through the layers a second time, if it converted this projection."""
        return None if self._calibration is None else self._calibration.converted(projection.module)

    def _importance(self, projection: Projection) -> NDArray[np.uint8] | None:
        place = locate_module(projection.module)
        return None if self._calibration is None or place is None else self._calibration.importance(place)

    def _written(
        self, projection: Projection, record: ProjectionRecord, starts: Mapping[int, Bytes], source: TensorSource
    ) -> WrittenWeight:
        """Find a projection's bytes where the header says they are."""
        names, parts, codes = self._names, dict[str, Bytes](), self._codes(projection)
        for parameter in (names.weight, names.block_scale, names.global_scale):
            place = self._header.tensors.get(f"{projection.module}.{parameter}")
            data = None if place is None else starts.get(place.begin)
            if place is None or data is None or len(data) != place.num_bytes:
                raise self._error(projection.module, f"its {parameter} is not where the header says")
            parts[parameter] = data
        return WrittenWeight(
            projection.module,
            self._load(source, projection),
            parts[names.weight],
            parts[names.block_scale],
            parts[names.global_scale].tobytes(),
            record.global_scale,
            self._importance(projection),
            is_measured_only=codes is not None,
            codes=codes,
        )

    def _compare(self, checked: CheckedWeight, record: ProjectionRecord) -> None:
        """Refuse bytes that are not what the rule gives, and figures that are not those of the bytes."""
        if checked.problems:
            raise self._error(checked.module, "; ".join(checked.problems))
        if record.metrics is None:
            return
        if not is_same_error(checked.error, record.metrics):
            raise self._error(
                checked.module,
                f"the bytes to write decode to a squared error of {checked.error.squared_error:.6g}, but "
                f"{record.metrics['squared_error']:.6g} was measured",
            )
        if checked.metrics is not None:
            stated, measured = WeightMetrics.from_dict(record.metrics), checked.metrics.to_dict()
            for place, problem in differing_totals({checked.module: stated}, {checked.module: measured}):
                raise self._error(place, problem)

    def write(self, data: memoryview) -> None:
        """Take the next checked bytes of the file, in order."""
        self._hash.update(data)

    def finish(self, digest: str) -> SourceCheck:
        """Return what was found, if every tensor was compared and the written file has the `digest` of their bytes."""
        converted = {f"{module}.{name}" for module in self._decoded for name in self._names.parameters}
        for name, tensor in self._header.tensors.items():
            if name not in converted and (name not in self._copied or self._copied[name] != tensor.num_bytes):
                raise self._error(name, "was not compared with the source")
        if self._hash.hexdigest() != digest:
            raise self._error("the file", "does not hold the bytes that were compared with the source")
        return SourceCheck(digest, tuple(sorted(self._copied)), dict(sorted(self._decoded.items())))

    def _error(self, where: str, problem: str) -> InvalidCheckpointError:
        return InvalidCheckpointError(f"{self._header.shard}: {where}: {problem}. {_REMEDY}")
