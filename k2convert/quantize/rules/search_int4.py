"""The search of rule `mse` for INT4 weights: the best normal E4M3 scale of every block, exactly.

A weight is q * s. For a global scale g = 2**k, each block gets the E4M3 scale b in 2**-6 .. 448 that minimizes

    sum over the block of (q_j * s - v_j * b * g)**2        v_j the nearest E2M1 value

Ties go to the larger scale; a block of zeros gets b = 1.0 and codes 0; codes are rounded to nearest, ties to the even
code, and never -0. Because s, b and g are an integer times a power of two, the error is an integer, and the result
does not depend on order or thread count.

With s = ms * 2**es, b = mb * 2**eb and g = 2**kg, ms in 128..255 and mb in 8..15, a weight is 2k * ms and a value
2v * mb * 2**j, in units of s / (2 ms), where j = eb + (kg - es). kernels/cpu.py proves that ten shifts are enough:

    j >= 10    every code is zero: one candidate, first in rank
    j < 0      every non-zero code saturates: one candidate, last in rank

An error is below 2**25, so sums are integers, exact in float64 in any order.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Magnitude
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight, unpack_int4
from k2convert.quantize.formats.nvfp4 import (
    BLOCKS_PER_GROUP,
    DOUBLED_VALUES,
    MAX_BYTE,
    MAX_EXPONENT,
    MIN_EXPONENT,
    ONE_BYTE,
    SIGN_BIT,
    Nvfp4Weight,
    check_global_scale,
    nearest_code,
    quantize_rows,
)
from k2convert.quantize.rules.cast import cast_global_scale

MIN_MANTISSA: Final = 128
NUM_SHIFTS: Final = 10

LARGEST_STEP: Final = Fraction(13, 5)
"""The largest scale of a tensor must be able to reach t = 2.6: no block gains by a step beyond 16/7."""

MIN_GLOBAL_EXPONENT: Final = -126
"""Keeps g and 1/g normal FP32 numbers, so both layouts hold the same number."""


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


LOWEST_OFFSET: Final = -MAX_EXPONENT - 1
HIGHEST_OFFSET: Final = NUM_SHIFTS - MIN_EXPONENT
"""kg - es is clamped to this range. Outside it only one candidate exists, the saturated or the zero one."""

_ALL_ZERO_STEP: Final = 2.0**60
_SATURATED_STEP: Final = 2.0**-60
"""Steps that give the two candidates that are not on the grid their codes."""


def quantize_int4(weight: Int4Weight, exponent: int) -> Nvfp4Weight:
    """Quantize an INT4 weight without channel exponents with g = 2**exponent, in bounded memory."""
    return quantize_rows(weight.shape, 2.0**exponent, lambda rows: _quantize_chunk(weight.select(rows), exponent))


def _quantize_chunk(weight: Int4Weight, exponent: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return nibbles uint8 [M, 16] and E4M3 bytes uint8 [M].

    Blocks with equal ms share the errors of each |q|, so all their errors are one matrix product. Errors are integers,
    in units of (s / 2 ms)**2.
    """
    codes_ME = unpack_int4(weight.packed).reshape(-1, BLOCK_SIZE)
    sizes_ME = np.abs(codes_ME).astype(np.int64)
    # frexp gives s = fraction * 2**e with the fraction in [1/2, 1); ms = 256 * fraction, hence es = e - 8.
    fractions, steps = np.frexp(weight.scales.reshape(-1).repeat(BLOCKS_PER_GROUP))
    mantissas_M = (fractions * (2 * MIN_MANTISSA)).astype(np.int64)
    empty_M = (mantissas_M == 0) | ~codes_ME.any(axis=1)
    mantissas_M = mantissas_M.clip(min=MIN_MANTISSA)
    offsets_M = (exponent + 8 - steps.astype(np.int64)).clip(LOWEST_OFFSET, HIGHEST_OFFSET) - LOWEST_OFFSET
    bytes_OC = scale_candidates()[1]
    exists_OC = bytes_OC > 0
    best_M = np.zeros_like(mantissas_M)
    nibbles_ME = np.zeros(codes_ME.shape, dtype=np.uint8)
    for mantissa in np.unique(mantissas_M).tolist():
        batch = np.flatnonzero(mantissas_M == mantissa)
        places = np.arange(batch.size)[:, None] * NUM_MAGNITUDES + sizes_ME[batch]
        counts_Mk = np.bincount(places.reshape(-1), minlength=batch.size * NUM_MAGNITUDES).reshape(-1, NUM_MAGNITUDES)
        codes_kC, errors_kC = codes_and_errors(mantissa)
        errors_MC = counts_Mk @ errors_kC
        errors_MC[~exists_OC[offsets_M[batch]]] = np.inf
        best_M[batch] = errors_MC.argmin(axis=1)  # the first of equal errors
        nibbles_ME[batch] = codes_kC[sizes_ME[batch], best_M[batch, None]]
    nibbles_ME[empty_M] = 0
    nibbles_ME |= np.uint8(SIGN_BIT) * ((nibbles_ME > 0) & (codes_ME < 0))
    return nibbles_ME, np.where(empty_M, np.uint8(ONE_BYTE), bytes_OC[offsets_M, best_M])


@lru_cache(maxsize=1)
def scale_candidates() -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Return the steps mb * 2**j float64 [C], from large to small, and their E4M3 bytes uint8 [O, C].

    C = 82 candidates by rank, O = 26 offsets kg - es. A byte is 0 if the candidate does not exist at this offset. The
    first and the last candidate are not on the grid: every code is zero, or saturates if it is not zero.
    """
    grid = [(j, mantissa) for j in reversed(range(NUM_SHIFTS)) for mantissa in reversed(range(8, 16))]
    steps = np.array([_ALL_ZERO_STEP, *(float(mantissa << j) for j, mantissa in grid), _SATURATED_STEP])
    rows: list[list[int]] = []
    for offset in range(LOWEST_OFFSET, HIGHEST_OFFSET + 1):
        exponents = [(j - offset, mantissa) for j, mantissa in grid]
        found = [e + 10 << 3 | mantissa - 8 if MIN_EXPONENT <= e <= MAX_EXPONENT else 0 for e, mantissa in exponents]
        largest = offset + MAX_EXPONENT
        ends = [MAX_BYTE if is_there else 0 for is_there in (largest >= NUM_SHIFTS, largest < 0)]
        rows.append([ends[0], *(byte if byte <= MAX_BYTE else 0 for byte in found), ends[1]])
    return steps, np.array(rows, dtype=np.uint8)


@cache
def codes_and_errors(mantissa: int) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Return the code and the error of each |q| under each candidate, uint8 and float64 [9, 82], for one ms."""
    wanted_k1 = np.arange(NUM_MAGNITUDES)[:, None] * float(mantissa)
    steps_C = scale_candidates()[0]
    codes_kC = nearest_code(wanted_k1, steps_C)
    # The two candidates off the grid count as zero codes.
    reached_kC = np.array(DOUBLED_VALUES)[codes_kC] * steps_C
    reached_kC[:, [0, -1]] = 0
    return codes_kC, (2 * wanted_k1 - reached_kC) ** 2
