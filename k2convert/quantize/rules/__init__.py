"""The rules by which block scales are chosen, in one table: adding a rule is a row here, a word in `choices.Rule` and a
file in this folder. A compiled kernel is optional (see kernels/): without one, this arithmetic converts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import Rule
from k2convert.quantize.formats.int4 import Int4Weight, SourceWeight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, check_global_scale
from k2convert.quantize.rules.cast import cast
from k2convert.quantize.rules.imatrix import quantize_bf16
from k2convert.quantize.rules.max import Magnitude, max_global_scale, quantize_max
from k2convert.quantize.rules.mse import check_importance, global_exponent, mse_global_scale, quantize_columns


class GlobalScale(Protocol):
    """Chooses the global scale of a set of tensors from their merged magnitude.

    It is positive, finite and exactly representable in FP32, in which it is stored: `float(np.float32(scale))`.
    """

    def __call__(self, magnitude: Magnitude, *, is_int4: bool) -> float: ...


@dataclass(frozen=True, slots=True)
class RuleArithmetic:
    """Definition of a rule.

    `quantize` gets a weight, the global scale, and the importance uint8 [K] of its columns, 1..255, or None: then every
    column counts the same. A rule that does not use it ignores it.
    """

    summary: str
    """One sentence for people."""
    global_scale: GlobalScale
    quantize: Callable[[SourceWeight, float, NDArray[np.uint8] | None], Nvfp4Weight]
    uses_importance: bool = False
    """Set if the rule knows the importance of channels, which comes from a statistics file."""
    has_power_of_two_scale: bool = False
    """Set if the global scale is always a power of two."""
    needs_walk: bool = False
    """Set if the codes of routed experts come from a walk through the layers of the model. One tensor is not enough to
    regenerate them, so they are measured; the fields above are for all other weights."""
    casts_mxfp4: bool = False
    """Set if MXFP4 weights are cast: their codes are copied, and their scales relabeled."""
    is_modelopt: bool = False
    """Set if ModelOpt's max calibration writes the same bytes, so that the reference quantizer offers the rule."""


def _max_scale(magnitude: Magnitude, *, is_int4: bool) -> float:  # noqa: ARG001
    return max_global_scale(magnitude)


def quantize_best(
    weight: SourceWeight, global_scale: float, importance: NDArray[np.uint8] | None = None
) -> Nvfp4Weight:
    """Quantize a weight [N, K] with the best scale of every block for g = 2**k, in bounded memory.

    With the importance uint8 [K] of its columns this is rule `imatrix`, without it rule `mse`. An MXFP4 weight is cast:
    no other scale has less error.
    """
    exponent = global_exponent(global_scale)
    if isinstance(weight, Mxfp4Weight):
        return cast(weight, exponent)
    if importance is not None:
        check_importance(importance, weight.shape[1])
    if isinstance(weight, Int4Weight):
        return quantize_columns(weight, exponent, importance)
    return quantize_bf16(weight, global_scale, importance)


IMATRIX_NOTE: Final = (
    "Rule imatrix minimizes the error weighted by the inputs. The unweighted SQNR of its weights is expected to "
    "be a little lower than that of rule mse."
)

_MSE: Final = RuleArithmetic(
    summary="Every block gets the E4M3 scale with the least squared error; the global scale is a power of two.",
    global_scale=mse_global_scale,
    quantize=lambda weight, global_scale, _: quantize_best(weight, global_scale),
    has_power_of_two_scale=True,
    casts_mxfp4=True,
)
_WEIGHTED: Final = replace(
    _MSE,
    summary="Every block gets the E4M3 scale with the least squared error on the inputs that were measured; "
    "the global scale is a power of two.",
    quantize=quantize_best,
    uses_importance=True,
)

RULES: Final[dict[Rule, RuleArithmetic]] = {
    "mse": _MSE,
    "imatrix": _WEIGHTED,
    "gptq": replace(
        _WEIGHTED,
        summary="Codes and scales of the experts are chosen layer by layer, so that each one makes up for the errors "
        "before it on the inputs that were measured; the global scale is a power of two.",
        needs_walk=True,
    ),
    "max": RuleArithmetic(
        summary="Every block gets its largest weight over 6 as scale, the bytes of ModelOpt's max calibration.",
        global_scale=_max_scale,
        quantize=lambda weight, global_scale, _: quantize_max(weight, global_scale),
        is_modelopt=True,
    ),
}
"""One row for each word of `choices.Rule`."""


def check_rule_scale(rule: Rule, global_scale: float) -> None:
    """Refuse a global scale that the rule cannot use (FormatError)."""
    check_global_scale(global_scale)
    if RULES[rule].has_power_of_two_scale:
        global_exponent(global_scale)
