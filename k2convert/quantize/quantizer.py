"""The seam between the conversion loop and the arithmetic: one Protocol, two implementations.

    native     k2convert's own code; INT4 on CPUs needs no torch
    reference  the published pipeline itself: compressed-tensors dequantises, ModelOpt quantises (`plain` only)

A quantizer holds no state that a call changes: any number of threads may share one.
"""

from __future__ import annotations

from typing import Protocol

from k2convert.choices import QuantizerKind, Rule
from k2convert.errors import RecipeError
from k2convert.quantize.formats.arrays import Nvfp4Arrays, SourceArrays
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules.magnitude import Magnitude


class Quantizer(Protocol):
    """Turns one weight into NVFP4: measure every tensor that shares a global scale, choose it, quantise each."""

    def measure(self, source: SourceArrays, *, name: str) -> Magnitude:
        """Measure one weight; FormatError, naming it, where a value is not usable."""
        ...

    def global_scale(self, magnitude: Magnitude, *, is_int4: bool) -> float:
        """Choose the global scale from the merged magnitude of all tensors that share it."""
        ...

    def quantize(
        self, source: SourceArrays, *, name: str, magnitude: Magnitude, global_scale: float
    ) -> tuple[Nvfp4Arrays, WeightMetrics]:
        """Quantise and measure one weight. `magnitude` is that of the whole set."""
        ...


def create_quantizer(kind: QuantizerKind, *, rule: Rule, device: str) -> Quantizer:
    """Create a quantizer; RecipeError where it does not offer the rule, MissingDependencyError without the extra."""
    if kind == "native":
        from k2convert.quantize.native import create_native_quantizer

        return create_native_quantizer(rule, device)
    if rule != "plain":
        raise RecipeError(
            f"the reference quantizer writes what ModelOpt writes, which is rule plain, not {rule}; "
            "use --rule plain with it, or --quantizer native"
        )
    from k2convert.quantize.libraries import create_reference_quantizer

    return create_reference_quantizer()
