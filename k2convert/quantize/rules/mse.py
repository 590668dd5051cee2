"""Rule `mse`: the normal E4M3 scale of every block that has the least squared error, and a global scale g = 2**k.

    E(c) = sum over e = 0..15 of (|w_e| - v_e * c)**2       c = b * g, v_e the nearest E2M1 value, ties to the even code

is computed in float64, the sixteen terms added in this order, so that any backend arrives at the same sums and bytes.
Ties go to the larger scale; a block of zeros gets b = 1.0 and codes 0; never -0. Of INT4 weights q * s every sum that
decides is exact. The definition ranges over all 119 normal scales, but it is enough to try the 25 from amax/14 to
amax/1.75:

  * c < amax/14 leaves an error of more than (amax - 6c)**2 > .32 amax**2 on the largest element, and the scale next
    above amax/4 has less: c * v leaves at most c/4 .. c/2 <= .141 amax on each of sixteen elements.
  * c > amax/3.5 uses codes up to 3 only, so c/2 can hold the same values: no term of E(c/2) is larger, and rounding
    is monotone, so neither is the sum. A scale beyond amax/1.75 can thus at best tie with one in
    amax/3.5 .. amax/1.75, and only if that one is a winner itself.

Blocks whose winner is in that last octave, or for which no scale next above amax/4 exists, are searched in full. An
MXFP4 weight is cast (cast.py): no other scale has less error.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Magnitude, SourceWeight, bf16_values
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import (
    E2M1_MAX,
    E4M3_MAX,
    MAX_BYTE,
    MIN_NORMAL_BYTE,
    ONE_BYTE,
    SIGN_BIT,
    SMALLEST_NORMAL,
    Nvfp4Weight,
    check_global_scale,
    decode_e4m3,
    nearest_code,
    quantize_rows,
)
from k2convert.quantize.rules.cast import cast, cast_global_scale

LARGEST_STEP: Final = Fraction(13, 5)
"""The largest scale of a tensor must be able to reach t = 2.6: no block gains by a step beyond 16/7."""

MIN_GLOBAL_EXPONENT: Final = -126
"""Keeps g and 1/g normal FP32 numbers, so both layouts hold the same number."""

NUM_WINDOW_SCALES: Final = 25
"""Three octaves of eight, both ends included."""


def mse_global_scale(magnitude: Magnitude) -> float:
    """Return g = 2**k, k = max(ceil(log2(2.6 * s_max / 448)), -126), computed exactly; 1.0 if all is zero.

    For a BF16 source s_max is amax / 7, the scale that INT4 would have had. For an MXFP4 source it is that of the cast.
    """
    if magnitude.largest_exponent is not None:
        return cast_global_scale(magnitude.largest_exponent)
    scale_max = Fraction(magnitude.scale_max) if magnitude.is_int4 else Fraction(magnitude.amax) / 7
    if scale_max == 0:
        return 1.0
    least = LARGEST_STEP * scale_max / 448
    exponent = least.numerator.bit_length() - least.denominator.bit_length() - 1
    while Fraction(2) ** exponent < least:
        exponent += 1
    return 2.0 ** max(exponent, MIN_GLOBAL_EXPONENT)


def global_exponent(global_scale: float) -> int:
    """Return k of g = 2**k; FormatError if g is not a power of two."""
    check_global_scale(global_scale)
    fraction, exponent = math.frexp(global_scale)
    if fraction != 0.5:
        raise FormatError(f"the mse rule needs a power of two as global scale, not {global_scale!r}")
    return exponent - 1


def quantize_mse(weight: SourceWeight, global_scale: float) -> Nvfp4Weight:
    """Quantize a weight [N, K] with the best scale of every block for g = 2**k, in bounded memory.

    An INT4 weight with channel exponents is rounded to BF16 before.
    """
    exponent = global_exponent(global_scale)
    if isinstance(weight, Mxfp4Weight):
        return cast(weight, exponent)

    def quantize(rows: slice) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        blocks_ME = _values(weight.select(rows)).astype(np.float64).reshape(-1, BLOCK_SIZE)
        scale_bytes_M = _best_scale_bytes(blocks_ME, global_scale)
        codes_ME = nearest_code(np.abs(blocks_ME), (decode_e4m3(scale_bytes_M) * global_scale)[:, None])
        return codes_ME | np.uint8(SIGN_BIT) * ((codes_ME > 0) & (blocks_ME < 0)), scale_bytes_M

    return quantize_rows(weight.shape, global_scale, quantize)


def _values(weight: SourceWeight) -> NDArray[np.float32]:
    if isinstance(weight, Int4Weight) and weight.channel_exponents is None:
        return weight.values()
    return bf16_values(weight.bits)


def _best_scale_bytes(blocks_ME: NDArray[np.float64], global_scale: float) -> NDArray[np.uint8]:
    """Return the E4M3 byte (uint8 [M]) of the best normal scale of each block, float64 [M, 16]."""
    weights_EM = np.ascontiguousarray(np.abs(blocks_ME).T)
    amax_M = weights_EM.max(axis=0)
    all_bytes = np.arange(MIN_NORMAL_BYTE, MAX_BYTE + 1, dtype=np.uint8)
    steps = decode_e4m3(all_bytes) * global_scale
    ranks = np.searchsorted(steps, amax_M / 14)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    first_M = np.minimum(np.asarray(ranks, dtype=np.int64), len(steps) - 1)
    best_M = _search_scales(weights_EM, steps, first_M, NUM_WINDOW_SCALES)
    in_last_octave = 2 * amax_M < 7 * steps[best_M]
    out_of_reach = (amax_M > 4 * E4M3_MAX * global_scale) | (amax_M < 4 * SMALLEST_NORMAL * global_scale)
    unsure = np.flatnonzero((in_last_octave | out_of_reach) & (amax_M > 0))
    if unsure.size:
        best_M[unsure] = _search_scales(weights_EM[:, unsure], steps, np.zeros_like(unsure), len(steps))
    return np.where(amax_M == 0, np.uint8(ONE_BYTE), all_bytes[best_M])


def _search_scales(
    weights_EM: NDArray[np.float64],
    steps: NDArray[np.float64],
    first_M: NDArray[np.int64],
    num_scales: int,
) -> NDArray[np.int64]:
    """Return the index into `steps` of the best of `num_scales` scales from `first_M` on; int64 [M]."""
    best_M = first_M.copy()
    least_M = np.full(weights_EM.shape[1], np.inf)
    for index in range(num_scales):
        candidate_M = (first_M + index).clip(max=len(steps) - 1)
        step_M = steps[candidate_M]
        difference_EM = weights_EM - _nearest_value(weights_EM, step_M) * step_M
        terms_EM = difference_EM * difference_EM
        error_M = terms_EM[0].copy()
        for terms_M in terms_EM[1:]:  # in this order
            error_M += terms_M
        # Scales come in ascending order, so a tie goes to the larger one.
        better = error_M <= least_M
        least_M = np.where(better, error_M, least_M)
        best_M = np.where(better, candidate_M, best_M)
    return best_M


def _nearest_value(weights_EM: NDArray[np.float64], step_M: NDArray[np.float64]) -> NDArray[np.float64]:
    # The quotient of an 11-bit by a 4-bit significand is rounded, but never onto or across a midpoint that it does not
    # equal: they are at least 2**-16 apart. Rounding half to even in units of .5, 1 or 2 is then rounding to E2M1.
    ratio = weights_EM / step_M
    unit = np.where(ratio < 2, 0.5, np.where(ratio < 4, 1.0, 2.0))
    return np.minimum(np.rint(ratio / unit) * unit, E2M1_MAX)
