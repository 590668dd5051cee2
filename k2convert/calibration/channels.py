"""Statistics for a conversion: whether they fit the source and the recipe, and what it uses of them, the importance and
the smoothing exponents of a weight's input columns.

Headers and the statistics file decide here, before anything is written. The digests of the norms' bytes are compared
too: before the start if the source is a folder, and after each download if it is on the Hub.

Smoothing multiplies channel j of the input of gate and up by 2^a_j, so its mean square is multiplied by 4^a_j. It is
exact, or an error that names the tensor.

The mean square m of few tokens n says little. It counts as n tokens next to PRIOR_TOKENS tokens that have, in each
column of a block of 16, the block's mean:

    m' = (n * m + 8 * mean of the block) / (n + 8)

An expert without tokens thus has an even importance, which is rule `mse`. The mean of the other experts is no help:
inner columns of different experts have nothing to do with each other. With 16 tokens in all, it brought SmolLM2 to 1.22
of the divergence of `mse` in a prototype; this rule brings it to 0.83 (scripts/bench/RESULTS.md).

Where the statistics say that the mean squares of a layer gained nothing (smoothing.py), the importance is even too.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from k2convert.calibration.statistics import LayerStatistics
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.choices import BLOCK_SIZE
from k2convert.errors import CalibrationError, FormatError
from k2convert.models import detect_family, locate_module
from k2convert.models.names import WEIGHT, Architecture, ColumnScaling, ModulePlace, Role, TensorName, reads_norm
from k2convert.models.projections import Projection
from k2convert.plan.plan import Plan
from k2convert.plan.recipe import Recipe
from k2convert.quantize.formats.bf16 import SourceWeight, scale_bits, scale_fp32
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.search_bf16 import block_importance
from k2convert.quantize.rules.search_int4 import MAX_IMPORTANCE
from k2convert.records.calibration import CalibrationRecord, LayerCalibration
from k2convert.records.fingerprint import source_digest

if TYPE_CHECKING:
    from k2convert.calibration.layer_files import LayerFiles, QuantizedLayers
    from k2convert.calibration.statistics import Statistics

MIN_TOKENS: Final = 64
"""An expert with fewer tokens has few: the importance of its down projection is drawn toward an even one."""

MIN_LAYER_TOKENS: Final = 1024
"""The same for a layer, whose tokens all go through the input of gate and up and through the shared experts."""

PRIOR_TOKENS: Final = 8

_ANEW: Final = "Make statistics of this source with `k2convert calibrate`."
_REMEDY: Final = "Make the statistics again with `k2convert calibrate`, or convert with --set smoothing=false."


@dataclass(frozen=True, slots=True)
class Calibration:
    """Statistics, of a file or of the layers that are done so far, and what a conversion uses of them.

    Errors are `weighted` by the importance of channels, or not. `codes` are the routed experts as the walk converted
    them, None if the rule needs no walk. Threads may share it. Without `codes` it can be pickled.
    """

    statistics: Statistics | LayerFiles
    weighted: bool
    smoothing: bool
    codes: QuantizedLayers | None = None

    def converted(self, module: str) -> Nvfp4Weight | None:
        """Return a module as the walk converted it; None for weights that no walk converts."""
        place = None if self.codes is None else locate_module(module)
        if self.codes is None or place is None or place.role is not Role.EXPERTS:
            return None
        return self.codes.read(module)

    def importance(self, parts: TensorName | ModulePlace) -> NDArray[np.uint8] | None:
        """Return the importance uint8 [K] of the input columns of a projection, None if errors are not weighted."""
        if not self.weighted:
            return None
        assert parts.layer is not None
        assert parts.projection is not None
        layer = self.statistics.layer(parts.layer)
        in_down = parts.projection == "down"
        is_shared_down = in_down and parts.role is Role.SHARED_EXPERTS
        if ("down" if in_down else "gate_up") in layer.without_imatrix and not is_shared_down:
            columns = layer.gate_up_mean_square.size
            if in_down:
                columns = layer.down_mean_square.shape[1]
            return np.full(columns, MAX_IMPORTANCE, dtype=np.uint8)
        if in_down:
            return block_importance(self._down(layer, parts))
        mean_square = self._of_all_tokens(layer.gate_up_mean_square)
        exponents = self.exponents(parts.layer)
        if exponents is not None:
            with np.errstate(over="ignore"):
                scaled = np.ldexp(mean_square, 2 * exponents.astype(np.int32))
            mean_square = np.minimum(scaled, np.finfo(np.float32).max)
        return block_importance(mean_square)

    def _down(self, layer: LayerStatistics, parts: TensorName | ModulePlace) -> NDArray[np.float32]:
        if parts.role is Role.SHARED_EXPERTS:
            if layer.shared_down_mean_square is None:
                raise self._misfit(layer, "no shared experts")
            return self._of_all_tokens(layer.shared_down_mean_square)
        expert = parts.expert or 0
        if expert >= layer.num_experts:
            raise self._misfit(layer, f"{layer.num_experts} experts")
        row = layer.down_mean_square[expert]
        if layer.num_experts == 1:
            return self._of_all_tokens(row)
        return drawn_to_even(row, int(layer.tokens[expert]), few=MIN_TOKENS)

    def _of_all_tokens(self, mean_square: NDArray[np.float32]) -> NDArray[np.float32]:
        return drawn_to_even(mean_square, self.statistics.tokens, few=MIN_LAYER_TOKENS)

    def _misfit(self, layer: LayerStatistics, found: str) -> CalibrationError:
        return CalibrationError(
            f"{self.statistics.path}: layer {layer.layer} has {found}: these statistics are of a different model. "
            "Make them for this source with `k2convert calibrate`."
        )

    def exponents(self, layer: int) -> NDArray[np.int8] | None:
        """Return the smoothing exponents int8 [K] of a layer, None if it is not scaled."""
        if not self.smoothing:
            return None
        found = self.statistics.layer(layer).smoothing_exponents
        return found if found.any() else None

    def of_projection(self, projection: Projection) -> NDArray[np.uint8] | None:
        """Return the importance uint8 [K] of a projection's columns, None if errors are not weighted."""
        return self.importance(_place(projection))

    def codes_of(self, projection: Projection, *, shape: tuple[int, int], global_scale: float) -> Nvfp4Weight | None:
        """Return a projection [N, K] as the walk converted it, None for those that no walk converts.

        Raises CalibrationError if it is not of this weight: `global_scale` is what the rule gives.
        """
        codes = self.converted(projection.module)
        if codes is not None and (codes.shape, codes.global_scale) != (shape, global_scale):
            raise CalibrationError(
                f"{projection.where}: the walk's codes are {list(codes.shape)} with global scale "
                f"{codes.global_scale!r}, but the source needs {list(shape)} with {global_scale!r}. The source "
                "changed: start again in a different folder."
            )
        return codes

    def scaled_weight(self, weight: SourceWeight, projection: Projection) -> SourceWeight:
        """Return a projection's weight [N, K] with the columns that smoothing divides; raises CalibrationError."""
        place = _place(projection)
        assert place.layer is not None
        exponents = self.exponents(place.layer) if reads_norm(place) else None
        if exponents is None:
            return weight
        with _exactly():
            return weight.divide_columns(exponents, name=projection.where)

    def scaled_copy(self, data: Bytes, tensor: TensorInfo, scaling: ColumnScaling) -> Bytes:
        """Return whole rows of a BF16 or FP32 tensor [.., K] with scaled columns; raises CalibrationError."""
        exponents = self.exponents(scaling.layer)
        if exponents is None:
            return data
        steps = -exponents if scaling.is_divided else exponents
        name = f"{tensor.shard}: {tensor.name}"
        with _exactly():
            if tensor.dtype == "BF16":
                bits = data.view(np.uint16).reshape(-1, exponents.size)
                return scale_bits(bits, steps, name=name).reshape(-1).view(np.uint8)
            values = data.view(np.float32).reshape(-1, exponents.size)
            return scale_fp32(values, steps, name=name).reshape(-1).view(np.uint8)

    def fallback_experts(self, layer: int) -> tuple[int, ...]:
        """Return the experts of a layer that have too few tokens for their down projection; none without weights."""
        found = self.statistics.layer(layer)
        if not self.weighted or found.is_dense:  # a dense MLP has no others to learn from
            return ()
        return tuple(np.flatnonzero(found.tokens < MIN_TOKENS).tolist())

    def exponents_digest(self) -> str | None:
        """Return the digest of all layers' smoothing exponents, None if no layer is scaled."""
        found = {layer: self.exponents(layer) for layer in self.statistics.layers}
        return digest_of_exponents({layer: exponents for layer, exponents in found.items() if exponents is not None})


def digest_of_exponents(exponents: Mapping[int, NDArray[np.int8]]) -> str | None:
    """Return the blake3 of the smoothing exponents int8 [K] by layer, in order, without layers of zeros, or None."""
    digest = blake3()
    is_scaled = False
    for layer, values in sorted(exponents.items()):
        if values.any():
            digest.update(f"{layer}\0".encode() + values.astype(np.int8).tobytes())
            is_scaled = True
    return digest.hexdigest() if is_scaled else None


def drawn_to_even(mean_square: NDArray[np.float32], tokens: int, *, few: int) -> NDArray[np.float32]:
    """Return mean squares f32 [K]; with those of fewer than `few` tokens, PRIOR_TOKENS more, even in each block."""
    if tokens >= few:
        return mean_square
    blocks = mean_square.astype(np.float64).reshape(-1, BLOCK_SIZE)
    # Columns are added in order, so that the result is the same on every machine.
    total = blocks[:, 0].copy()
    for column in range(1, BLOCK_SIZE):
        total += blocks[:, column]
    even = PRIOR_TOKENS * total[:, None] / BLOCK_SIZE
    return ((tokens * blocks + even) / (tokens + PRIOR_TOKENS)).astype(np.float32).reshape(-1)


def _place(projection: Projection) -> ModulePlace:
    place = locate_module(projection.module)
    assert place is not None
    return place


@contextmanager
def _exactly() -> Generator[None]:
    try:
        yield
    except FormatError as error:
        raise CalibrationError(f"{error} {_REMEDY}") from None


def choose_calibration(statistics: Statistics, *, recipe: Recipe, source: Checkpoint) -> Calibration:
    """Decide what a settled recipe uses of statistics; raises CalibrationError if they are of another source."""
    check_statistics_source(statistics, source)
    weighted = RULES[recipe.rule].uses_importance
    return Calibration(statistics, weighted=weighted, smoothing=bool(recipe.smoothing))


def check_statistics_source(statistics: Statistics, source: Checkpoint) -> None:
    """Refuse statistics of a source whose shards have other headers (CalibrationError)."""
    if statistics.source_headers != source_digest(source):
        raise CalibrationError(f"{statistics.path}: was made from a source with other shard headers. {_ANEW}")


def scaled_layers(calibration: Calibration, architecture: Architecture) -> list[int]:
    """Return the MoE layers in which a channel is scaled; raises CalibrationError for a layer that does not fit."""
    scaled: list[int] = []
    for number in architecture.moe_layers:
        layer = calibration.statistics.layer(number)
        found = (layer.gate_up_mean_square.size, *layer.down_mean_square.shape)
        expected = (architecture.hidden_size, architecture.num_experts, architecture.moe_intermediate_size)
        if found != expected:
            raise CalibrationError(
                f"{calibration.statistics.path}: layer {number} is of {found[1]} experts of {found[0]} x {found[2]}, "
                f"but the source has {expected[1]} of {expected[0]} x {expected[2]}. {_ANEW}"
            )
        if calibration.exponents(number) is not None:
            scaled.append(number)
    for number in set(calibration.statistics.layers) - set(architecture.moe_layers):
        if calibration.statistics.layer(number).smoothing_exponents.any():
            raise CalibrationError(
                f"{calibration.statistics.path}: layer {number} is scaled, but it has no experts. {_ANEW}"
            )
    return scaled


def check_widths(calibration: Calibration, plan: Plan) -> None:
    """Check that every kind of projection has importance for each of its columns; raises CalibrationError."""
    seen: set[tuple[object, ...]] = set()
    for projection in plan.projections:
        place = _place(projection)
        kind = (place.layer, place.role, place.projection)
        if kind in seen:
            continue
        seen.add(kind)
        importance = calibration.importance(place)
        if importance is not None and importance.size != projection.num_columns:
            raise CalibrationError(
                f"{calibration.statistics.path}: has {importance.size} columns for {projection.module}, which has "
                f"{projection.num_columns}. {_ANEW}"
            )


def norm_tensors(statistics: Statistics | LayerFiles, source: Checkpoint) -> dict[int, TensorInfo]:
    """Return the norms before the MLPs of the statistics' layers, by layer, as far as the source has them."""
    family = detect_family(source)
    named = {layer: f"{family.mlp_norm.format(layer=layer)}.{WEIGHT}" for layer in statistics.layers}
    return {layer: source.tensors[name] for layer, name in named.items() if name in source.tensors}


def check_norms(
    statistics: Statistics | LayerFiles, source: Checkpoint, *, folder: Path, shards: Collection[str] | None = None
) -> None:
    """Compare the bytes of the norms before the MLPs with the statistics; raises CalibrationError naming one.

    `folder` has the shards. Only norms in `shards` are read, if that is given.
    """
    with ShardReader(lambda name: folder / name) as reader:
        for layer, tensor in norm_tensors(statistics, source).items():
            if shards is not None and tensor.shard not in shards:
                continue
            if blake3(reader.read(tensor).data).hexdigest() != statistics.layer(layer).norm_digest:
                raise CalibrationError(
                    f"{statistics.path}: was made from a source with other norms: {tensor.shard}: {tensor.name} "
                    f"differs. {_ANEW}"
                )


def calibration_record(found: Statistics, calibration: Calibration, architecture: Architecture) -> CalibrationRecord:
    """Return the ledger's entry of the calibration with these statistics."""
    return CalibrationRecord(
        statistics=found.digest,
        texts=found.texts,
        tokens=found.tokens,
        window=found.window,
        windows=found.windows,
        dropped_windows=found.dropped,
        seed=found.seed,
        imatrix=calibration.weighted,
        smoothing=calibration.smoothing,
        exponents_digest=calibration.exponents_digest(),
        layers={number: _layer_record(calibration, number) for number in architecture.moe_layers},
        statistics_from=found.origin,
    )


def _layer_record(calibration: Calibration, number: int) -> LayerCalibration:
    layer = calibration.statistics.layer(number)
    counts: dict[int, int] = {}
    if calibration.smoothing:
        values, numbers = np.unique(layer.smoothing_exponents, return_counts=True)
        counts = dict(zip(values.tolist(), numbers.tolist(), strict=True))
    return LayerCalibration(
        tokens=tuple(layer.tokens.tolist()),
        fallback=calibration.fallback_experts(number),
        exponents=counts,
        without=layer.without_imatrix if calibration.weighted else (),
    )
