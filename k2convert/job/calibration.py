"""Statistics in a job: what the recipe needs of them, whether they are of this source, what the ledger says of them.

Headers and the statistics file decide here, before anything is written. The digests of the norms' bytes are compared
too: before the start if the source is a folder, and after each download if it is on the Hub.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from k2convert.calibrate.columns import Calibration, CollectedLayers
from k2convert.calibrate.statistics import Statistics
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.errors import CalibrationError, RecipeError
from k2convert.job.places import Source
from k2convert.models import detect_family, locate_module
from k2convert.models.names import WEIGHT, Architecture
from k2convert.plan.plan import Plan
from k2convert.plan.recipe import Budget, Recipe
from k2convert.quantize.rules import RULES
from k2convert.records.calibration import CalibrationRecord, LayerCalibration
from k2convert.records.fingerprint import source_digest

WALK_TENSOR_SQNR_DB: Final = 13.0
"""The budget of a tensor whose codes come from a walk, in dB. The walk keeps outputs, not weights: the worst tensor of
k2-tiny had 17.2 dB and that of SmolLM2 18.2 dB, against 22.5 dB by rule `optimal` on k2-tiny."""

_REMEDY = "Make statistics of this source with `k2convert calibrate`."


def settle_recipe(recipe: Recipe, *, has_statistics: bool, has_text: bool = False) -> Recipe:
    """Return the recipe with norm scaling decided: on or off with statistics or text, unset without.

    With a text to calibrate on, the rule is the one that needs a walk through the layers. Raises RecipeError for a
    recipe that needs statistics or a text and has none, or has them and cannot use them.
    """
    if has_text:
        return _settle_walk(recipe, has_statistics=has_statistics)
    rule = RULES[recipe.rule]
    if rule.needs_walk and recipe.target == "nvfp4":
        instead = " It makes its own statistics: leave out --statistics." if has_statistics else ""
        raise RecipeError(
            f"recipe {recipe.name}: rule {recipe.rule} converts the model layer by layer on a text: pass the text with "
            f"--calibrate FILE.{instead}"
        )
    is_weighted = rule.uses_importance
    if not has_statistics:
        if is_weighted or recipe.norm_scaling:
            what = f"rule {recipe.rule}" if is_weighted else "norm scaling"
            raise RecipeError(
                f"recipe {recipe.name}: {what} needs --statistics FILE, which `k2convert calibrate` makes."
            )
        return recipe.model_copy(update={"norm_scaling": None})
    if recipe.target != "nvfp4" or recipe.quantizer == "reference":
        what = f"target {recipe.target}" if recipe.target != "nvfp4" else "quantizer reference"
        raise RecipeError(f"recipe {recipe.name}: {what} uses no statistics. Leave out --statistics.")
    is_scaled = _is_scaled(recipe)
    if not is_weighted and not is_scaled:
        raise RecipeError(
            f"recipe {recipe.name}: rule {recipe.rule} without norm scaling uses no statistics. Leave out "
            "--statistics, or use --rule weighted or --norm-scaling."
        )
    return recipe.model_copy(update={"norm_scaling": is_scaled})


def _is_scaled(recipe: Recipe) -> bool:
    """Return whether norms are scaled, by default for FP4 activations alone: weights lose 10 % by it on SmolLM2."""
    return recipe.activations == "w4a4" if recipe.norm_scaling is None else recipe.norm_scaling


def _settle_walk(recipe: Recipe, *, has_statistics: bool) -> Recipe:
    """Return a recipe for a conversion with --calibrate: its rule, and whether norms are scaled."""
    (walked,) = (name for name, arithmetic in RULES.items() if arithmetic.needs_walk)
    if has_statistics:
        raise RecipeError("--calibrate makes its own statistics. Leave out --statistics, or --calibrate.")
    if recipe.target != "nvfp4" or recipe.quantizer == "reference":
        what = f"target {recipe.target}" if recipe.target != "nvfp4" else "quantizer reference"
        raise RecipeError(f"recipe {recipe.name}: {what} cannot be calibrated. Leave out --calibrate.")
    if "rule" in recipe.model_fields_set and recipe.rule != walked:
        raise RecipeError(
            f"recipe {recipe.name}: --calibrate converts by rule {walked}, not {recipe.rule}. Leave out the rule, or "
            "--calibrate."
        )
    settled: dict[str, Any] = {"rule": walked, "norm_scaling": _is_scaled(recipe)}
    if "budget" not in recipe.model_fields_set:
        settled["budget"] = Budget(tensor_sqnr_db=WALK_TENSOR_SQNR_DB)
    return recipe.model_copy(update=settled)


def choose_calibration(statistics: Statistics, *, recipe: Recipe, source: Source) -> Calibration:
    """Decide what a settled recipe uses of statistics; raises CalibrationError if they are of another source.

    Statistics are of all experts of the source, whichever are kept.
    """
    check_statistics_source(statistics, source.checkpoint)
    if source.pruning is not None:
        statistics = statistics.keep_experts(source.pruning)
    weighted = RULES[recipe.rule].uses_importance
    return Calibration(statistics, weighted=weighted, norm_scaling=bool(recipe.norm_scaling))


def check_statistics_source(statistics: Statistics, source: Checkpoint) -> None:
    """Refuse statistics of a source whose shards have other headers (CalibrationError)."""
    if statistics.source_headers != source_digest(source):
        raise CalibrationError(
            f"{statistics.path}: was made from a different source: the headers of its shards differ. {_REMEDY}"
        )


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
        if calibration.statistics.layer(number).norm_exponents.any():
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


def norm_tensors(statistics: CollectedLayers, source: Checkpoint) -> dict[int, TensorInfo]:
    """Return the norms before the MLPs of the statistics' layers, by layer, as far as the source has them."""
    family = detect_family(source)
    named = {layer: f"{family.mlp_norm.format(layer=layer)}.{WEIGHT}" for layer in statistics.layers}
    return {layer: source.tensors[name] for layer, name in named.items() if name in source.tensors}


def check_norms(
    statistics: CollectedLayers, source: Checkpoint, *, folder: Path, shards: Collection[str] | None = None
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
                    f"{statistics.path}: was made from a different source: {tensor.shard}: {tensor.name} differs. "
                    f"{_REMEDY}"
                )


def calibration_record(found: Statistics, calibration: Calibration, architecture: Architecture) -> CalibrationRecord:
    """Return what the ledger says of the calibration with the statistics that were found."""
    return CalibrationRecord(
        statistics=found.digest,
        texts=found.texts,
        tokens=found.tokens,
        window=found.window,
        windows=found.windows,
        dropped_windows=found.dropped,
        seed=found.seed,
        weighted=calibration.weighted,
        norm_scaling=calibration.norm_scaling,
        exponents_digest=calibration.exponents_digest(),
        layers={number: _layer_record(calibration, number) for number in architecture.moe_layers},
        statistics_from=found.origin,
    )


def _layer_record(calibration: Calibration, number: int) -> LayerCalibration:
    layer = calibration.statistics.layer(number)
    counts: dict[int, int] = {}
    if calibration.norm_scaling:
        values, numbers = np.unique(layer.norm_exponents, return_counts=True)
        counts = dict(zip(values.tolist(), numbers.tolist(), strict=True))
    return LayerCalibration(
        tokens=tuple(layer.tokens.tolist()),
        fallback=calibration.fallback_experts(number),
        exponents=counts,
    )
