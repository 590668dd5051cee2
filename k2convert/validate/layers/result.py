"""The results of a reference-layer check, as plain values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Variant(StrEnum):
    """Which weights, and whether the inputs of the quantized layers are FP4 too."""

    CONVERTED = "converted"
    CONVERTED_W4A4 = "converted-w4a4"
    PLAIN = "plain"
    PLAIN_W4A4 = "plain-w4a4"
    ACTIVATIONS_ONLY = "activations-only"
    """The source's weights with FP4 activations: the error that no weight conversion can remove."""


W4A4_VARIANTS = (Variant.CONVERTED_W4A4, Variant.PLAIN_W4A4, Variant.ACTIVATIONS_ONLY)


@dataclass(frozen=True, slots=True)
class LayerBudget:
    """The least weight-only SQNR in dB of a layer's output, and of any single expert's output.

    Measured on synthetic states, routed experts converted: layers 19.2 to 20.6 `optimal`, 16.2 to 17.7 `plain`; worst
    expert 16.9 to 17.9 and 13.9 to 14.8. Shared experts converted too: layers 18.5 and 16.0.
    """

    layer_sqnr_db: float = 15.0
    expert_sqnr_db: float = 12.0


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
    shared_experts_sqnr_db: float | None


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

    def error(self, variant: Variant) -> VariantError | None:
        """The error of one variant; None for W4A4 if the checkpoint has no input scales."""
        return next((error for error in self.errors if error.variant is variant), None)


@dataclass(frozen=True, slots=True)
class LayersReport:
    """All layers that were computed; `hidden_states` describes their inputs."""

    hidden_states: str
    budget: LayerBudget
    layers: tuple[LayerResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every layer kept its router and stayed within the budget."""
        return not any(layer.failures for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; figures that are not finite become None."""
        return {"passed": self.passed, **_plain(asdict(self))}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}  # type: ignore[reportUnknownVariableType]
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]  # type: ignore[reportUnknownVariableType]
    if isinstance(value, StrEnum):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
