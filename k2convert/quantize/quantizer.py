"""The interface between the conversion loop and the arithmetic: one Protocol, two implementations.

    native     k2convert's own code; needs no torch on the CPU
    reference  the published pipeline: compressed-tensors dequantizes, ModelOpt quantizes (`max` only)

A call does not change a quantizer, so any number of threads may share one.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import QuantizerKind, Rule
from k2convert.errors import RecipeError
from k2convert.quantize.formats.int4 import SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules.magnitude import Magnitude


class Quantizer(Protocol):
    """Turns one weight into NVFP4: measure every tensor that shares a global scale, choose it, quantize each."""

    def measure(self, source: SourceWeight, *, name: str) -> Magnitude:
        """Measure one weight; FormatError, naming it, if a value is not usable."""
        ...

    def global_scale(self, magnitude: Magnitude, *, is_int4: bool) -> float:
        """Choose the global scale from the merged magnitude of all tensors that share it."""
        ...

    def quantize(
        self,
        source: SourceWeight,
        *,
        name: str,
        magnitude: Magnitude,
        global_scale: float,
        importance: NDArray[np.uint8] | None = None,
    ) -> tuple[Nvfp4Weight, WeightMetrics]:
        """Quantize and measure one weight. `magnitude` is that of the whole set.

        `importance` uint8 [K], 1..255, is for rules that use it; others ignore it.
        """
        ...


def create_quantizer(kind: QuantizerKind, *, rule: Rule, device: str) -> Quantizer:
    """Create a quantizer; RecipeError if it does not offer the rule, MissingDependencyError if a library is missing."""
    if kind == "native":
        from k2convert.quantize.native import create_native_quantizer

        return create_native_quantizer(rule, device)
    from k2convert.quantize.rules import RULES

    if not RULES[rule].is_modelopt:
        offered = " or ".join(name for name, arithmetic in RULES.items() if arithmetic.is_modelopt)
        raise RecipeError(
            f"the reference quantizer writes what ModelOpt writes, which is rule {offered}, not {rule}. "
            f"Use --rule {offered} with it, or quantizer native."
        )
    from k2convert.quantize.libraries import create_reference_quantizer

    return create_reference_quantizer()
