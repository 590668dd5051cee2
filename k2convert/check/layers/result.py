"""The results of a reference-layer check, as plain values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from k2convert.plan.recipe import Budget
from k2convert.records.document import shown


class Variant(StrEnum):
    """Which weights, and whether the inputs of the quantized layers are FP4 too."""

    CONVERTED = "converted"
    CONVERTED_W4A4 = "converted-w4a4"
    MAX = "max"
    MAX_W4A4 = "max-w4a4"
    ACTIVATIONS_ONLY = "activations-only"
    """The source's weights with FP4 activations: the error that no weight conversion can remove."""
    PRUNING_ALONE = "pruning-alone"
    """The source's weights of the kept experts, against those of all experts."""
    PRUNED_RESULT = "pruned-result"
    """The result as it is served, against the source's weights of all experts."""


W4A4_VARIANTS = (Variant.CONVERTED_W4A4, Variant.MAX_W4A4, Variant.ACTIVATIONS_ONLY)

AGAINST_WHOLE = (Variant.PRUNING_ALONE, Variant.PRUNED_RESULT)
"""The variants of a pruned result that are compared with all experts of the source."""

_LABELS: Final[dict[str, str]] = {
    Variant.CONVERTED_W4A4: "this result as served (W4A4)",
    Variant.CONVERTED: "its weights alone (W4A16)",
    Variant.MAX_W4A4: "usual rule, W4A4",
    Variant.MAX: "usual rule (max)",
    Variant.ACTIVATIONS_ONLY: "INT4 weights with FP4 activations",
    Variant.PRUNING_ALONE: "pruning alone, against the whole INT4",
    Variant.PRUNED_RESULT: "this result as served, against the whole INT4",
}


def labels(found: Collection[str]) -> dict[str, str]:
    """Return what people read for each of the variants `found`, in the order in which they are shown."""
    served = {} if Variant.CONVERTED_W4A4 in found else {Variant.CONVERTED: "this result as served (W4A16)"}
    return {variant: label for variant, label in (_LABELS | served).items() if variant in found}


def reference_name(found: Collection[str]) -> str:
    """Return what the variants are compared with that are not compared with the whole INT4."""
    if Variant.PRUNING_ALONE in found:
        return "the pruned INT4"
    return "INT4"


@dataclass(frozen=True, slots=True)
class VariantError:
    """Error of one layer's output against the INT4 source in FP32: of a pruned result, against its kept experts.

    `sqnr_db` over all tokens, `cosine` the mean over tokens and `worst_cosine` the least; experts are judged by their
    own outputs. Infinite if nothing differs, -infinite if a value is not finite. The variants that are compared with
    all experts have no figures of experts.
    """

    variant: Variant
    sqnr_db: float
    cosine: float
    worst_cosine: float
    worst_expert: int | None = None
    worst_expert_sqnr_db: float | None = None
    shared_experts_sqnr_db: float | None = None


@dataclass(frozen=True, slots=True)
class LayerPruning:
    """Number of experts in the source's layer, and the share of its router's weight that the dropped ones get."""

    num_source_experts: int
    router_weight_left_out: float


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One MoE layer: `num_reached` of `num_experts` experts were chosen by some token (the others were still run).

    The router of a pruned result is unchanged if it has the source's rows of the kept experts.
    """

    layer: int
    tokens: int
    num_experts: int
    num_reached: int
    router_unchanged: bool
    errors: tuple[VariantError, ...]
    failures: tuple[str, ...]
    pruning: LayerPruning | None = None

    @property
    def router(self) -> str:
        """The router in words."""
        if not self.router_unchanged:
            return "CHANGED"
        if self.pruning is None:
            return "unchanged"
        return f"renumbered, {self.num_experts} of {self.pruning.num_source_experts} rows"

    def error(self, variant: Variant) -> VariantError | None:
        """The error of one variant; None for W4A4 if the checkpoint has no input scales."""
        return next((error for error in self.errors if error.variant is variant), None)


@dataclass(frozen=True, slots=True)
class LayersReport:
    """All layers that were computed; `hidden_states` describes their inputs.

    Measured on synthetic states, routed experts converted: layers 19.2 to 20.6 dB `mse`, 16.2 to 17.7 `max`; worst
    expert 16.9 to 17.9 and 13.9 to 14.8. Shared experts converted too: layers 18.5 and 16.0.
    """

    hidden_states: str
    budget: Budget
    layers: tuple[LayerResult, ...]

    @property
    def passed(self) -> bool:
        """Return whether every layer kept its router and stayed within the budget."""
        return not any(layer.failures for layer in self.layers)

    @property
    def router_weights_left_out(self) -> dict[int, float]:
        """The share of the router's weight that the dropped experts have, by layer; empty if none were dropped."""
        return {one.layer: one.pruning.router_weight_left_out for one in self.layers if one.pruning is not None}

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON; figures that are not finite become None."""
        return {"passed": self.passed, **shown(self)}
