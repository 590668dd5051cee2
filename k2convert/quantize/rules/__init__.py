"""The rules by which block scales are chosen, in one table: adding a rule is a row here, a word in `choices.Rule` and a
file in this folder. A compiled kernel is optional (see kernels/): without one, this arithmetic converts.

    max            the block maximum over 6
    search_int4    the best scale of every block of an INT4 weight, and the global scale of every search
    search_bf16    the best scale of every block of a weight whose numbers are BF16
    cast           MXFP4: codes are copied, scales relabeled
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from k2convert.choices import Rule
from k2convert.quantize.formats.bf16 import Magnitude, SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, check_global_scale
from k2convert.quantize.rules.cast import cast
from k2convert.quantize.rules.max import max_global_scale, quantize_max
from k2convert.quantize.rules.search_bf16 import quantize_bf16
from k2convert.quantize.rules.search_int4 import global_exponent, mse_global_scale, quantize_int4


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


def quantize_best(weight: SourceWeight, global_scale: float) -> Nvfp4Weight:
    """Quantize a weight [N, K] with the best scale of every block for g = 2**k, in bounded memory.

    An MXFP4 weight is cast: no other scale has less error. An INT4 weight with channel exponents is searched as BF16.
    """
    exponent = global_exponent(global_scale)
    if isinstance(weight, Mxfp4Weight):
        return cast(weight, exponent)
    if isinstance(weight, Int4Weight) and weight.channel_exponents is None:
        return quantize_int4(weight, exponent)
    return quantize_bf16(weight, exponent)


_MSE: Final = RuleArithmetic(
    summary="Every block gets the E4M3 scale with the least squared error; the global scale is a power of two.",
    global_scale=mse_global_scale,
    quantize=quantize_best,
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
