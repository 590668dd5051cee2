"""The search of rule `mse` for INT4 weights: the best normal E4M3 scale of every block, exactly.

Column j holds q * s * 2**-a_j, with an exponent a_j in -4..4 of smoothing (0 without), and has an importance w_j, an
integer 1..255, (255 for all without one). For a global scale g = 2**k, each block gets the E4M3 scale b in
2**-6 .. 448 that minimizes

    sum over the block of w_j * (q_j * s * 2**-a_j - v_j * b * g)**2        v_j the nearest E2M1 value

Ties go to the larger scale; a block of zeros gets b = 1.0 and codes 0; codes are rounded to nearest, ties to the even
code, and never -0. Because s, b and g are an integer times a power of two, the error is an integer, and the result
does not depend on order or thread count.

With s = ms * 2**es, b = mb * 2**eb and g = 2**kg, ms in 128..255 and mb in 8..15, a weight is 2k * ms * 2**(4 - a) and
a value 2v * mb * 2**(j + 4), in units of s / (32 ms), where j = eb + (kg - es). A column with the exponent a sees the
shift j + a. kernels/cpu.py proves that ten shifts are enough for a = 0. So, whatever the importance, the
shifts -4 .. 13 are enough here:

    j >= 14    every column sees 10 or more, so every code is zero: one candidate, first in rank
    j < -4     every column sees less than 0, so every non-zero code saturates: one candidate, last in rank

An error is below 2**40, and the importances of a block add up to at most 4080. So sums are integers below 2**53, exact
in float64 in any order.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, MAX_COLUMN_EXPONENT
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Magnitude, describe
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


MAX_IMPORTANCE: Final = 255

LOWEST_SHIFT: Final = -MAX_COLUMN_EXPONENT
PAST_SHIFT: Final = NUM_SHIFTS + MAX_COLUMN_EXPONENT
"""From this shift on every code is zero."""
LOWEST_OFFSET: Final = LOWEST_SHIFT - MAX_EXPONENT - 1
HIGHEST_OFFSET: Final = PAST_SHIFT - MIN_EXPONENT
"""kg - es is clamped to this range. Outside it only one candidate exists, the saturated or the zero one."""

_ALL_ZERO_STEP: Final = 2.0**60
_SATURATED_STEP: Final = 2.0**-60
"""Steps that give the two candidates that are not on the grid their codes."""


def check_importance(importance: NDArray[np.uint8], columns: int) -> None:
    """Refuse an importance that is not uint8 [K] of positive numbers (FormatError)."""
    if importance.dtype != np.uint8 or importance.shape != (columns,):
        raise FormatError(f"importance must be uint8 [{columns}], not {describe(importance)}")
    if columns and not importance.min():
        raise FormatError("importance must be 1 to 255 for every column, but a column has 0")


def quantize_columns(weight: Int4Weight, exponent: int, importance: NDArray[np.uint8] | None) -> Nvfp4Weight:
    """Quantize an INT4 weight with g = 2**exponent and the importance uint8 [K] of its columns, in bounded memory."""
    return quantize_rows(
        weight.shape,
        2.0**exponent,
        lambda start, stop: _quantize_chunk(weight.rows(start, stop), exponent, importance),
    )


def _quantize_chunk(
    weight: Int4Weight, exponent: int, importance: NDArray[np.uint8] | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return nibbles uint8 [M, 16] and E4M3 bytes uint8 [M].

    A block's elements fall into fields by exponent and |q|: field 9 * (a + 4) + |q|. Blocks with equal ms share the
    tables of fields, so all their errors are one matrix product. Errors are integers, in units of (s / 32 ms)**2, times
    the importance.
    """
    rows, columns = weight.shape
    codes_ME = unpack_int4(weight.packed).reshape(-1, BLOCK_SIZE)
    exponents_K = weight.channel_exponents
    if exponents_K is None:
        exponents_K = np.zeros(columns, dtype=np.int8)
    exponents_ME = np.tile(exponents_K, rows).reshape(-1, BLOCK_SIZE)
    weights_ME = None
    if importance is not None:
        weights_ME = np.tile(importance.astype(np.float64), rows).reshape(-1, BLOCK_SIZE)
    # frexp gives s = fraction * 2**e with the fraction in [1/2, 1); ms = 256 * fraction, hence es = e - 8.
    fractions, steps = np.frexp(weight.scales.reshape(-1).repeat(BLOCKS_PER_GROUP))
    mantissas_M = (fractions * (2 * MIN_MANTISSA)).astype(np.int64)
    empty_M = (mantissas_M == 0) | ~codes_ME.any(axis=1)
    mantissas_M = mantissas_M.clip(min=MIN_MANTISSA)
    offsets_M = (exponent + 8 - steps.astype(np.int64)).clip(LOWEST_OFFSET, HIGHEST_OFFSET) - LOWEST_OFFSET
    best_M = np.zeros_like(mantissas_M)
    bytes_OC = column_candidates()[1]
    exists_OC = bytes_OC > 0
    # Without smoothing nine of the 81 fields occur. Leaving out the others halves the time.
    lowest = int(exponents_ME.min(initial=0))
    highest = int(exponents_ME.max(initial=0))
    used = slice(NUM_MAGNITUDES * (lowest + MAX_COLUMN_EXPONENT), NUM_MAGNITUDES * (highest + MAX_COLUMN_EXPONENT + 1))
    num_fields = used.stop - used.start
    fields_ME = NUM_MAGNITUDES * (exponents_ME - lowest).astype(np.int64) + np.abs(codes_ME)
    for mantissa in np.unique(mantissas_M).tolist():
        batch = np.flatnonzero(mantissas_M == mantissa)
        places = np.arange(batch.size)[:, None] * num_fields + fields_ME[batch]
        weights = None
        if weights_ME is not None:
            weights = weights_ME[batch].reshape(-1)
        sums = np.bincount(places.reshape(-1), weights, batch.size * num_fields)
        errors = sums.reshape(-1, num_fields) @ _field_errors(mantissa)[used]
        errors[~exists_OC[offsets_M[batch]]] = np.inf
        best_M[batch] = errors.argmin(axis=1)  # the first of equal errors
    codes_SFC = _field_codes()
    first_M = codes_SFC.shape[1] * (mantissas_M - MIN_MANTISSA) + used.start
    fields_ME += first_M[:, None]
    fields_ME *= codes_SFC.shape[2]
    fields_ME += best_M[:, None]
    nibbles_ME = codes_SFC.reshape(-1)[fields_ME]
    nibbles_ME[empty_M] = 0
    nibbles_ME |= np.uint8(SIGN_BIT) * ((nibbles_ME > 0) & (codes_ME < 0))
    return nibbles_ME, np.where(empty_M, np.uint8(ONE_BYTE), bytes_OC[offsets_M, best_M])


@lru_cache(maxsize=1)
def column_candidates() -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Return the steps mb * 2**(j + 4) float64 [C], from large to small, and their E4M3 bytes uint8 [O, C].

    C = 146 candidates by rank, O = 34 offsets kg - es. A byte is 0 if the candidate does not exist at this offset.
    """
    grid = [(j, mantissa) for j in reversed(range(LOWEST_SHIFT, PAST_SHIFT)) for mantissa in reversed(range(8, 16))]
    steps = [float(mantissa << (j - LOWEST_SHIFT)) for j, mantissa in grid]
    return np.array([_ALL_ZERO_STEP, *steps, _SATURATED_STEP]), candidate_bytes(
        range(LOWEST_SHIFT, PAST_SHIFT), range(LOWEST_OFFSET, HIGHEST_OFFSET + 1)
    )


def candidate_bytes(shifts: range, offsets: range) -> NDArray[np.uint8]:
    """Return the E4M3 bytes uint8 [O, C] of the candidates by rank; 0 if one does not exist at an offset kg - es."""
    rows: list[list[int]] = []
    for offset in offsets:
        grid = [(j - offset, mantissa) for j in reversed(shifts) for mantissa in reversed(range(8, 16))]
        found = [e + 10 << 3 | mantissa - 8 if MIN_EXPONENT <= e <= MAX_EXPONENT else 0 for e, mantissa in grid]
        largest = offset + MAX_EXPONENT
        ends = [MAX_BYTE if is_there else 0 for is_there in (largest >= shifts.stop, largest < shifts.start)]
        rows.append([ends[0], *(byte if byte <= MAX_BYTE else 0 for byte in found), ends[1]])
    return np.array(rows, dtype=np.uint8)


@cache
def _field_errors(mantissa: int) -> NDArray[np.float64]:
    """Return the error of an element of each field under each candidate, float64 [81, 146], for one ms."""
    wanted_FC = _wanted(mantissa)
    steps_C = column_candidates()[0]
    # The two candidates off the grid count as zero codes.
    reached_FC = np.array(DOUBLED_VALUES)[nearest_code(wanted_FC, steps_C)] * steps_C
    reached_FC[:, [0, -1]] = 0
    return (2 * wanted_FC - reached_FC) ** 2


@cache
def _field_codes() -> NDArray[np.uint8]:
    """Return the code of an element of each field under each candidate for every ms, uint8 [128, 81, 146]."""
    steps_C = column_candidates()[0]
    mantissas = range(MIN_MANTISSA, 2 * MIN_MANTISSA)
    return np.stack([nearest_code(_wanted(mantissa), steps_C) for mantissa in mantissas])


def _wanted(mantissa: int) -> NDArray[np.float64]:
    """Return the weight of an element of each field, float64 [81, 1]."""
    shifts = np.arange(2 * MAX_COLUMN_EXPONENT, -1, -1)[:, None]
    return np.ldexp(np.arange(NUM_MAGNITUDES) * float(mantissa), shifts).reshape(-1, 1)
