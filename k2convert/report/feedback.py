"""What a report says of rule `feedback`: the error after each layer, the corrections, and what got no feedback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k2convert.records.calibration import CalibrationRecord, FeedbackLayer, OutputErrors

LAYER_COLUMNS = (
    "layer", "held-out error after the layer", "with rule optimal", "from earlier layers", "gate and up: ridge",
    "gain of it", "shrinkage", "down: corrected", "experts by shrinkage", "experts without feedback",
)  # fmt: skip
_MOST_EXPERTS = 12


@dataclass(frozen=True, slots=True)
class FeedbackTotals:
    """What rule `feedback` did in all MoE layers.

    `measured_layers` have an error on windows that were kept out of the fit, and `better_layers` of them have less than
    with rule `optimal`. `corrected_layers` corrected gate and up for the errors of
    earlier layers, `plain_layers` rounded them without feedback. `corrected_experts` and `plain_experts` are the same
    of the experts' down projections. `last` are the errors after the last layer, None if nothing was kept out.
    """

    layers: int
    measured_layers: int
    better_layers: int
    corrected_layers: int
    plain_layers: int
    experts: int
    corrected_experts: int
    plain_experts: int
    last: OutputErrors | None


def layers_of(record: CalibrationRecord | None) -> dict[int, FeedbackLayer]:
    """Return what the rule did in each MoE layer, in order; empty for every other rule."""
    layers = {} if record is None else record.layers
    return {number: layer.feedback for number, layer in sorted(layers.items()) if layer.feedback is not None}


def feedback_totals(record: CalibrationRecord | None) -> FeedbackTotals | None:
    """Sum up the layers; None for every other rule."""
    layers = list(layers_of(record).values())
    if record is None or not layers:
        return None
    held_out = list(record.held_out.values())
    return FeedbackTotals(
        layers=len(layers),
        measured_layers=len(held_out),
        better_layers=sum(found.feedback_error < found.optimal_error for found in held_out),
        corrected_layers=sum(layer.ridge is not None for layer in layers),
        plain_layers=sum(layer.shrinkage is None for layer in layers),
        experts=sum(len(layer.down_ridges) for layer in layers),
        corrected_experts=sum(ridge is not None for layer in layers for ridge in layer.down_ridges),
        plain_experts=sum(shrinkage is None for layer in layers for shrinkage in layer.down_shrinkages),
        last=held_out[-1] if held_out else None,
    )


def sentences(record: CalibrationRecord) -> tuple[str, ...]:
    """Return what the rule did, one thing a sentence; empty for every other rule."""
    found = feedback_totals(record)
    if found is None:
        return ()
    listed = [
        "Rule feedback converted the layers in order. In each layer it chose codes that keep the outputs of the INT4 "
        "model, for the inputs that the layers converted before it give. It does not keep the weights: their SQNR is "
        "lower than that of rule optimal.",
        f"{found.corrected_layers:,} of {found.layers:,} layers corrected gate and up for errors of earlier layers. "
        f"{found.corrected_experts:,} of {found.experts:,} experts corrected down.",
    ]
    if found.plain_layers or found.plain_experts:
        listed.append(
            f"Rounded without feedback, as rule weighted does: gate and up of {found.plain_layers:,} of "
            f"{found.layers:,} layers, down of {found.plain_experts:,} of {found.experts:,} experts. They saw too few "
            "tokens, or feedback gained nothing on tokens that it was not fitted to."
        )
    if found.last is None:
        return (*listed, f"The error of the outputs: {record.measured_on}.")
    listed.append(
        f"The chart shows the error after each MoE layer, {record.measured_on}: the mean over tokens of "
        "|h - h'|^2 / |h|^2, where h are the hidden states of the INT4 model. It is smaller than with rule optimal in "
        f"{found.better_layers:,} of {found.measured_layers:,} layers."
    )
    return (*listed, *([f"Warning: {record.warning}"] if record.warning else []))


def shrinkages_by_layer(layers: Mapping[int, FeedbackLayer]) -> dict[float | None, list[int]]:
    """Return the number of experts of each layer by the shrinkage of down: ascending, then None (no feedback)."""
    counts = [Counter(layer.down_shrinkages) for layer in layers.values()]
    found = {shrinkage for count in counts for shrinkage in count}
    ordered = sorted(shrinkage for shrinkage in found if shrinkage is not None)
    return {key: [count[key] for count in counts] for key in (*ordered, *([None] if None in found else []))}


def layer_rows(record: CalibrationRecord) -> list[tuple[str, ...]]:
    """Return one row per MoE layer; empty for every other rule."""
    return [_layer_row(number, layer) for number, layer in layers_of(record).items()]


def _layer_row(number: int, layer: FeedbackLayer) -> tuple[str, ...]:
    errors = layer.held_out
    counts = {key: count for key, (count,) in shrinkages_by_layer({number: layer}).items() if key is not None}
    return (
        str(number),
        "not measured" if errors is None else f"{errors.feedback_error:.3g}",
        "" if errors is None else f"{errors.optimal_error:.3g}",
        "" if errors is None else f"{errors.inherited_error:.3g}",
        "none" if layer.ridge is None else f"{layer.ridge:g}",
        "" if layer.ridge is None else f"{100 * layer.ridge_gain:.1f} %",
        "no feedback" if layer.shrinkage is None else f"{layer.shrinkage:g}",
        f"{sum(ridge is not None for ridge in layer.down_ridges):,} of {len(layer.down_ridges):,}",
        ", ".join(f"{shrinkage:g}: {count:,}" for shrinkage, count in counts.items()) or "none",
        _experts([expert for expert, shrinkage in enumerate(layer.down_shrinkages) if shrinkage is None]),
    )


def _experts(experts: Sequence[int]) -> str:
    rest = len(experts) - _MOST_EXPERTS
    return ", ".join(map(str, experts[:_MOST_EXPERTS])) + (f" and {rest:,} more" if rest > 0 else "") or "none"


def feedback_document(record: CalibrationRecord) -> dict[str, Any]:
    """Return what the rule did as plain data, for --json: the layers by number, as the ledger has them."""
    return {str(number): layer.to_dict() for number, layer in layers_of(record).items()}
