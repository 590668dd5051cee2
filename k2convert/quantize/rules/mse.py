"""The `mse` rule for INT4 sources: the best normal E4M3 scale of every block, in exact arithmetic.

For a global scale g = 2**k, each block gets the E4M3 scale b in 2**-6 .. 448 that minimizes

    sum over the block of (q * s - v * b * g)**2        v the nearest E2M1 value

Ties go to the larger scale; a block of zeros gets b = 1.0 and codes 0; codes are rounded to nearest, ties to the even
code, and never -0. Because s, b and g are an integer times a power of two, the error is an integer (scale_tables.py)
and the result does not depend on order, device or thread count. It is a product of the block's histogram of |q| with
a table: sums below 2**53 in float64, hence exact.

Weights with channel exponents go through rules/channel_search.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.blocks import BLOCKS_PER_GROUP, row_chunks, run_starts
from k2convert.quantize.formats.e2m1 import pack_nibbles, unpack_nibbles
from k2convert.quantize.formats.e4m3 import ONE_BYTE
from k2convert.quantize.formats.histograms import block_histograms, unpack_histograms
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, check_global_scale
from k2convert.quantize.rules.channel_search import quantize_columns
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.scale_tables import (
    HIGHEST_OFFSET,
    LOWEST_OFFSET,
    MIN_MANTISSA,
    candidate_tables,
)

LARGEST_STEP: Final = Fraction(13, 5)
"""The largest scale of a tensor must be able to reach t = 2.6: no block gains by a step beyond 16/7."""

MIN_GLOBAL_EXPONENT: Final = -126
"""Keeps g and 1/g normal FP32 numbers, so both layouts hold the same number."""

SEARCH_BLOCKS: Final = 1 << 14
"""Blocks multiplied with the table at once (11 MB of float64)."""

ALL_ZERO_HISTOGRAM: Final = BLOCK_SIZE
"""The histogram word of sixteen zero codes."""


def mse_global_scale(magnitude: Magnitude, *, is_int4: bool) -> float:
    """Return g = 2**k, k = max(ceil(log2(2.6 * s_max / 448)), -126), computed exactly; 1.0 if all is zero.

    For a BF16 source s_max is amax / 7, the scale that INT4 would have had.
    """
    scale_max = Fraction(magnitude.scale_max) if is_int4 else Fraction(magnitude.amax) / 7
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


def quantize_mse(weight: Int4Weight, global_scale: float) -> Nvfp4Weight:
    """Quantize an INT4 weight to the nearest NVFP4 weight that g = 2**k allows, in bounded memory."""
    exponent = global_exponent(global_scale)
    if weight.channel_exponents is not None:
        return quantize_columns(weight, exponent, None)
    rows, columns = weight.shape
    tables = candidate_tables()
    words_M = block_histograms(weight.packed)
    mantissas_M, offsets_M = split_scales(weight.scales, exponent)
    candidates_M = best_candidates(words_M, mantissas_M, offsets_M)
    empty_M = (words_M == ALL_ZERO_HISTOGRAM) | (mantissas_M == 0)
    scales_M = np.where(empty_M, np.uint8(ONE_BYTE), tables.scale_bytes[offsets_M - LOWEST_OFFSET, candidates_M])
    maps_M = tables.nibble_maps[(mantissas_M - MIN_MANTISSA).clip(min=0), candidates_M]
    maps_NB = np.where(empty_M, 0, maps_M).reshape(rows, columns // BLOCK_SIZE)
    packed = np.empty_like(weight.packed)
    for start, stop in row_chunks(rows, columns):
        packed[start:stop] = _apply_maps(weight.packed[start:stop], maps_NB[start:stop])
    scales_NB = scales_M.reshape(rows, columns // BLOCK_SIZE)
    return Nvfp4Weight(packed=packed, block_scales=scales_NB, global_scale=global_scale)


def split_scales(scales_NG: NDArray[np.float32], exponent: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split BF16 scales (as float32) into one (ms, kg - es) per block, both int64 [N * K/16].

    ms is 128..255 (subnormal scales are normalized), 0 if the scale is zero; kg - es is clamped to the range in which
    it makes a difference.
    """
    fractions, exponents = np.frexp(scales_NG.reshape(-1))
    mantissas = (fractions * (2 * MIN_MANTISSA)).astype(np.int64)
    # frexp gives s = fraction * 2**e with the fraction in [1/2, 1); ms = 256 * fraction, hence es = e - 8.
    offsets = (exponent + 8 - exponents.astype(np.int64)).clip(LOWEST_OFFSET, HIGHEST_OFFSET)
    return mantissas.repeat(BLOCKS_PER_GROUP), offsets.repeat(BLOCKS_PER_GROUP)


def best_candidates(
    words_M: NDArray[np.int64], mantissas_M: NDArray[np.int64], offsets_M: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return int64 [M]: the rank of the best candidate of every block, ties to the first (the larger scale)."""
    best_M = np.zeros_like(words_M)
    for batch in _batches(words_M, mantissas_M, offsets_M):
        # argmin returns the first of equal errors.
        best_M[batch.members] = np.where(batch.exists, batch.errors, np.inf).argmin(axis=1)
    return best_M


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Errors of some blocks under every candidate.

    members  int64 [m]        the blocks
    errors   float64 [m, 82]  integers, in units of (s / 2ms)**2
    exists   bool [m, 82]     whether the candidate is a normal E4M3 scale for the block's exponent
    """

    members: NDArray[np.int64]
    errors: NDArray[np.float64]
    exists: NDArray[np.bool_]


def _batches(
    words_M: NDArray[np.int64], mantissas_M: NDArray[np.int64], offsets_M: NDArray[np.int64]
) -> Iterator[_Batch]:
    """Yield the errors of all blocks with a non-zero scale, at most SEARCH_BLOCKS at a time.

    Blocks with equal ms share a table: a batch is one product of histograms [m, 9] with a table [9, 82].
    """
    tables = candidate_tables()
    exists_by_offset = tables.scale_bytes > 0
    order = np.argsort(mantissas_M.astype(np.uint8), kind="stable")[np.count_nonzero(mantissas_M == 0) :]
    for first in range(0, order.size, SEARCH_BLOCKS):
        batch = order[first : first + SEARCH_BLOCKS]
        histograms = unpack_histograms(words_M[batch]).astype(np.float64)
        exists, mantissas = exists_by_offset[offsets_M[batch] - LOWEST_OFFSET], mantissas_M[batch]
        starts = run_starts(mantissas).tolist()
        for start, stop in zip(starts, [*starts[1:], batch.size], strict=True):
            table = tables.errors[int(mantissas[start]) - MIN_MANTISSA]
            yield _Batch(batch[start:stop], histograms[start:stop] @ table, exists[start:stop])


def _apply_maps(packed: NDArray[np.uint8], maps_NB: NDArray[np.int64]) -> NDArray[np.uint8]:
    rows, row_bytes = packed.shape
    nibbles_NBE = unpack_nibbles(packed).reshape(rows, -1, BLOCK_SIZE)
    mapped = ((maps_NB[:, :, None] >> (4 * nibbles_NBE.astype(np.int64))) & 0xF).astype(np.uint8)
    return pack_nibbles(mapped.reshape(rows, 2 * row_bytes))
