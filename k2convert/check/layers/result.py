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


W4A4_VARIANTS = (Variant.CONVERTED_W4A4, Variant.MAX_W4A4, Variant.ACTIVATIONS_ONLY)

_LABELS: Final[dict[str, str]] = {
    Variant.CONVERTED_W4A4: "this result as served (W4A4)",
    Variant.CONVERTED: "its weights alone (W4A16)",
    Variant.MAX_W4A4: "usual rule, W4A4",
    Variant.MAX: "usual rule (max)",
    Variant.ACTIVATIONS_ONLY: "INT4 weights with FP4 activations",
}


def labels(found: Collection[str]) -> dict[str, str]:
    """Return what people read for each of the variants `found`, in the order in which they are shown."""
    served = {} if Variant.CONVERTED_W4A4 in found else {Variant.CONVERTED: "this result as served (W4A16)"}
    return {variant: label for variant, label in (_LABELS | served).items() if variant in found}


@dataclass(frozen=True, slots=True)
class VariantError:
    """Error of one layer's output against the INT4 source in FP32.

    `sqnr_db` over all tokens, `cosine` the mean over tokens and `worst_cosine` the least; experts are judged by their
    own outputs. Infinite if nothing differs, -infinite if a value is not finite.
    """

    variant: Variant
    sqnr_db: float
    cosine: float
    worst_cosine: float
    worst_expert: int
    worst_expert_sqnr_db: float
    shared_experts_sqnr_db: float | None = None


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One MoE layer: `num_reached` of `num_experts` experts were chosen by some token (the others were still run)."""

    layer: int
    tokens: int
    num_experts: int
    num_reached: int
    router_unchanged: bool
    errors: tuple[VariantError, ...]
    failures: tuple[str, ...]

    @property
    def router(self) -> str:
        """The router in words."""
        if self.router_unchanged:
            return "unchanged"
        return "CHANGED"

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

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON; figures that are not finite become None."""
        return {"passed": self.passed, **shown(self)}
