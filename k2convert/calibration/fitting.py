"""Statistics for a conversion: whether they fit the source and the recipe, and the ledger's entry.

Headers and the statistics file decide here, before anything is written. The digests of the norms' bytes are compared
too: before the start if the source is a folder, and after each download if it is on the Hub.
"""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from k2convert.calibration.channels import Calibration
from k2convert.calibration.statistics import Statistics
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.errors import CalibrationError
from k2convert.models import detect_family, locate_module
from k2convert.models.names import WEIGHT, Architecture
from k2convert.plan.plan import Plan
from k2convert.plan.recipe import Recipe
from k2convert.quantize.rules import RULES
from k2convert.records.calibration import CalibrationRecord, LayerCalibration
from k2convert.records.fingerprint import source_digest
from k2convert.records.pruning import PruningRecord

if TYPE_CHECKING:
    from k2convert.calibration.layer_files import LayerFiles

_REMEDY = "Make statistics of this source with `k2convert calibrate`."


def choose_calibration(
    statistics: Statistics, *, recipe: Recipe, source: Checkpoint, pruning: PruningRecord | None
) -> Calibration:
    """Decide what a settled recipe uses of statistics; raises CalibrationError if they are of another source.

    Statistics are of all experts of the source, whichever are kept, or of the same ones.
    """
    check_statistics_source(statistics, source)
    weighted = RULES[recipe.rule].uses_importance
    return Calibration(statistics.keep_experts(pruning), weighted=weighted, smoothing=bool(recipe.smoothing))


def check_statistics_source(statistics: Statistics, source: Checkpoint) -> None:
    """Refuse statistics of a source whose shards have other headers (CalibrationError)."""
    if statistics.source_headers != source_digest(source):
        raise CalibrationError(f"{statistics.path}: was made from a source with other shard headers. {_REMEDY}")


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
                f"but the source has {expected[1]} of {expected[0]} x {expected[2]}. {_REMEDY}"
            )
        if calibration.exponents(number) is not None:
            scaled.append(number)
    for number in set(calibration.statistics.layers) - set(architecture.moe_layers):
        if calibration.statistics.layer(number).smoothing_exponents.any():
            raise CalibrationError(
                f"{calibration.statistics.path}: layer {number} is scaled, but it has no experts. {_REMEDY}"
            )
    return scaled


def check_widths(calibration: Calibration, plan: Plan) -> None:
    """Check that every kind of projection has importance for each of its columns; raises CalibrationError."""
    seen: set[tuple[object, ...]] = set()
    for projection in plan.projections:
        place = locate_module(projection.module)
        assert place is not None
        kind = (place.layer, place.role, place.projection)
        if kind in seen:
            continue
        seen.add(kind)
        importance = calibration.importance(place)
        if importance is not None and importance.size != projection.num_columns:
            raise CalibrationError(
                f"{calibration.statistics.path}: has {importance.size} columns for {projection.module}, which has "
                f"{projection.num_columns}. {_REMEDY}"
            )


def norm_tensors(statistics: "Statistics | LayerFiles", source: Checkpoint) -> dict[int, TensorInfo]:
    """Return the norms before the MLPs of the statistics' layers, by layer, as far as the source has them."""
    family = detect_family(source)
    named = {layer: f"{family.mlp_norm.format(layer=layer)}.{WEIGHT}" for layer in statistics.layers}
    return {layer: source.tensors[name] for layer, name in named.items() if name in source.tensors}


def check_norms(
    statistics: "Statistics | LayerFiles", source: Checkpoint, *, folder: Path, shards: Collection[str] | None = None
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
                    f"differs. {_REMEDY}"
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
