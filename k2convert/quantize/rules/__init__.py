"""The rules by which block scales are chosen, in one table. They are the definition: kernels/ gives the same bytes.

max     the block maximum over 6
mse     the best scale of every block, and the global scale of every search
cast    MXFP4: codes are copied, scales relabeled
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from k2convert.choices import Rule
from k2convert.quantize.formats.bf16 import Magnitude, SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, check_global_scale
from k2convert.quantize.rules.max import max_global_scale, quantize_max
from k2convert.quantize.rules.mse import global_exponent, mse_global_scale, quantize_mse


@dataclass(frozen=True, slots=True)
class RuleArithmetic:
    """Definition of a rule.

    `global_scale` chooses the scale of a set of tensors from their merged magnitude. It is positive, finite and exactly
    representable in FP32, in which it is stored: `float(np.float32(scale))`.

    `quantize` gets a weight and the global scale.
    """

    summary: str
    """One sentence for people."""
    global_scale: Callable[[Magnitude], float]
    quantize: Callable[[SourceWeight, float], Nvfp4Weight]
    has_power_of_two_scale: bool = False
    """Set if the global scale is always a power of two."""
    needs_text: bool = False
    """Set if quantized weights come from a pass through the layers of the model. One tensor is not enough to
    compute them again."""
    casts_mxfp4: bool = False
    """Set if MXFP4 weights are cast: their codes are copied, and their scales relabeled."""
    is_modelopt: bool = False
    """Set if ModelOpt's max calibration writes the same bytes, so that the reference quantizer offers the rule."""


_MSE: Final = RuleArithmetic(
    summary="Every block gets the E4M3 scale with the least squared error; the global scale is a power of two.",
    global_scale=mse_global_scale,
    quantize=quantize_mse,
    has_power_of_two_scale=True,
    casts_mxfp4=True,
)
RULES: Final[dict[Rule, RuleArithmetic]] = {
    "mse": _MSE,
    "gptq": replace(
        _MSE,
        summary="Weights are quantized layer by layer, and each layer compensates for the errors of those before it "
        "on the calibration inputs; the global scale is a power of two.",
        needs_text=True,
    ),
    "max": RuleArithmetic(
        summary="Every block gets its largest weight over 6 as scale, the bytes of ModelOpt's max calibration.",
        global_scale=max_global_scale,
        quantize=quantize_max,
        is_modelopt=True,
    ),
}
"""One row for each word of `choices.Rule`."""


def check_rule_scale(rule: Rule, global_scale: float) -> None:
    """Refuse a global scale that the rule cannot use (FormatError)."""
    check_global_scale(global_scale)
    if RULES[rule].has_power_of_two_scale:
        global_exponent(global_scale)
