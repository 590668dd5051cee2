"""The quantizers: how one weight becomes NVFP4, chosen by kind.

The native one is k2convert's own arithmetic by the compiled kernels. The reference one (libraries.py) calls ModelOpt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from k2convert.choices import QuantizerKind, Rule
from k2convert.errors import RecipeError
from k2convert.quantize.formats.bf16 import Magnitude, SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.kernels import cpu
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules import RULES

if TYPE_CHECKING:
    from k2convert.quantize.libraries import ReferenceQuantizer

Quantizer: TypeAlias = "NativeQuantizer | ReferenceQuantizer"
"""Measures every tensor that shares a global scale, chooses it, and quantizes and measures each."""


def create_quantizer(kind: QuantizerKind, *, rule: Rule) -> Quantizer:
    """Create a quantizer; RecipeError if it does not offer the rule, MissingDependencyError if a library is missing."""
    if kind == "native":
        return NativeQuantizer(rule)
    if not RULES[rule].is_modelopt:
        offered = " or ".join(name for name, arithmetic in RULES.items() if arithmetic.is_modelopt)
        raise RecipeError(
            f"the reference quantizer writes what ModelOpt writes, which is rule {offered}, not {rule}. "
            f"Use --rule {offered} with it, or quantizer native."
        )
    from k2convert.quantize.libraries import ReferenceQuantizer

    return ReferenceQuantizer()


@dataclass(frozen=True, slots=True)
class NativeQuantizer:
    """A rule on the CPU; holds no state, so threads may share it."""

    rule: Rule

    def measure(self, source: SourceWeight, *, name: str) -> Magnitude:
        """Measure one weight; FormatError if a value is not usable."""
        return cpu.measure_magnitude(source, name=name)

    def global_scale(self, magnitude: Magnitude) -> float:
        """Choose the global scale of a set of tensors from their merged magnitude."""
        return RULES[self.rule].global_scale(magnitude)

    def quantize(
        self,
        source: SourceWeight,
        *,
        name: str,
        magnitude: Magnitude,
        global_scale: float,
    ) -> tuple[Nvfp4Weight, WeightMetrics]:
        """Quantize and measure one weight. `magnitude` is that of all weights that share the global scale."""
        converted = cpu.convert(source, rule=self.rule, global_scale=global_scale)
        metrics = measure_quantized(
            source,
            converted.weight,
            name=name,
            magnitude=magnitude,
            converted=converted,
            rule=self.rule,
        )
        return converted.weight, metrics
