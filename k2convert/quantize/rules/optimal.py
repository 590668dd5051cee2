"""The `optimal` rule for INT4 sources: the best normal E4M3 scale of every block, in exact arithmetic.

For a global scale g = 2**k, each block gets the E4M3 scale b in 2**-6 .. 448 that minimises

    sum over the block of (q * s - v * b * g)**2        v the nearest E2M1 value

Ties go to the larger scale; a block of zeros gets b = 1.0 and codes 0; codes are rounded to nearest, ties to the even
code, and never -0. Because s, b and g are an integer times a power of two, the error is an integer (scale_tables.py)
and the result does not depend on order, device or thread count. It is a product of the block's histogram of |q| with
a table: sums below 2**53 in float64, hence exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.blocks import (
    BLOCKS_PER_GROUP,
    block_histograms,
    equal_runs,
    row_chunks,
    unpack_histograms,
)
from k2convert.quantize.formats.e2m1 import pack_nibbles, unpack_nibbles
from k2convert.quantize.formats.e4m3 import MAX_EXPONENT, MIN_EXPONENT, ONE_BYTE
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.lazy_torch import torch
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, check_global_scale
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.scale_tables import (
    HIGHEST_OFFSET,
    LOWEST_OFFSET,
    MIN_MANTISSA,
    NUM_CANDIDATES,
    NUM_OFFSETS,
    ScaleTables,
    scale_tables,
)

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_STEP: Final = Fraction(13, 5)
"""The largest scale of a tensor must be able to reach t = 2.6: no block gains by a step beyond 16/7."""

MIN_GLOBAL_EXPONENT: Final = -126
"""Keeps g and 1/g normal FP32 numbers, so both layouts hold the same number."""

PIECE_BLOCKS: Final = 32
SEARCH_BLOCKS: Final = 1 << 14
"""Blocks contracted with the table at once (11 MB of float64)."""

RANK_BITS: Final = 7

ALL_ZERO_HISTOGRAM: Final = BLOCK_SIZE
"""The histogram word of sixteen zero codes."""


def optimal_global_scale(magnitude: Magnitude, *, is_int4: bool) -> float:
    """Return g = 2**k, k = max(ceil(log2(2.6 * s_max / 448)), -126), computed exactly; 1.0 where all is zero.

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
    """Return k of g = 2**k; FormatError where g is no power of two."""
    check_global_scale(global_scale)
    fraction, exponent = math.frexp(global_scale)
    if fraction != 0.5:
        raise FormatError(f"the optimal rule needs a power of two as global scale, not {global_scale!r}")
    return exponent - 1


def quantize_optimal(weight: Int4Weight, global_scale: float) -> Nvfp4Weight:
    """Quantise an INT4 weight to the nearest NVFP4 weight that g = 2**k allows, in bounded memory."""
    exponent = global_exponent(global_scale)
    rows, columns = weight.shape
    tables = scale_tables(weight.packed.device)
    words_M = block_histograms(weight.packed)
    mantissas_M, offsets_M = split_scales(weight.scales, exponent)
    candidates_M = best_candidates(words_M, mantissas_M, offsets_M, tables=tables)
    empty_M = (words_M == ALL_ZERO_HISTOGRAM) | (mantissas_M == 0)
    scales_M = tables.scale_bytes[(offsets_M - LOWEST_OFFSET).long(), candidates_M]
    scales_NB = torch.where(empty_M, ONE_BYTE, scales_M).view(rows, columns // BLOCK_SIZE)
    maps_M = tables.nibble_maps[(mantissas_M - MIN_MANTISSA).clamp(min=0).long(), candidates_M]
    maps_NB = torch.where(empty_M, 0, maps_M).view(rows, columns // BLOCK_SIZE)
    packed = torch.empty_like(weight.packed)
    for start, stop in row_chunks(rows, columns):
        packed[start:stop] = _apply_maps(weight.packed[start:stop], maps_NB[start:stop])
    return Nvfp4Weight(packed=packed, block_scales=scales_NB, global_scale=global_scale)


def split_scales(scales_NG: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """Split bf16 scales into one (ms, kg - es) per block, both int16 [N * K/16].

    ms is 128..255 (subnormal scales are normalised), 0 where the scale is zero; kg - es is clamped to where it matters.
    """
    fractions, exponents = torch.frexp(scales_NG.to(torch.float32))
    mantissas_NG = (fractions * (2 * MIN_MANTISSA)).to(torch.int16)
    # frexp gives s = fraction * 2**e with the fraction in [1/2, 1); ms = 256 * fraction, hence es = e - 8.
    offsets_NG = (exponent + 8 - exponents).clamp(LOWEST_OFFSET, HIGHEST_OFFSET).to(torch.int16)
    return (
        mantissas_NG.repeat_interleave(BLOCKS_PER_GROUP, dim=-1).flatten(),
        offsets_NG.repeat_interleave(BLOCKS_PER_GROUP, dim=-1).flatten(),
    )


def best_candidates(words_M: Tensor, mantissas_M: Tensor, offsets_M: Tensor, *, tables: ScaleTables) -> Tensor:
    """Return int64 [M]: the rank of the best candidate of every block, ties to the first (the larger scale)."""
    best_M = torch.zeros_like(words_M)
    for batch in _batches(words_M, mantissas_M, offsets_M, tables=tables):
        ranked = batch.errors * (1 << RANK_BITS) + torch.arange(NUM_CANDIDATES, device=words_M.device)
        lowest = torch.where(batch.exists, ranked, torch.inf).amin(dim=-1)
        best_M[batch.members] = (lowest.to(torch.int64) & ((1 << RANK_BITS) - 1))[batch.filled]
    return best_M


def count_outside_normal(weight: Int4Weight, global_scale: float) -> int:
    """Count blocks that an E4M3 mantissa with an exponent beyond the normal range would serve strictly better.

    Only a few scales can have such blocks, so almost every tensor is done after one look at its scales. Steps below
    t = 1/12 never help, and from t = 16/7 on halving the step costs nothing (every code is at most 3, and 2v exists):
    a block is safe where the smallest normal scale has j <= 0 and the first one beyond 448 has t >= 16/7. With the
    rule's own g that leaves scales some 2**8 below the largest.
    """
    mantissas_M, offsets_M = split_scales(weight.scales, global_exponent(global_scale))
    # The first scale beyond 448 is 15 * 2**5, hence t = 15 * 2**(5 + kg - es) / ms; doubled once more for 2**-1.
    doubled_beyond_M = 15 << (offsets_M.to(torch.int64) + MAX_EXPONENT + 1)
    suspect_M = (offsets_M + MIN_EXPONENT > 0) | (7 * doubled_beyond_M < 2 * 16 * mantissas_M)
    suspects = torch.nonzero(suspect_M & (mantissas_M > 0)).flatten()
    if suspects.numel() == 0:
        return 0
    words = block_histograms(weight.packed)[suspects]
    tables = scale_tables(weight.packed.device)
    count = 0
    for batch in _batches(words, mantissas_M[suspects], offsets_M[suspects], tables=tables):
        # The saturated candidate stands in the table with the error of zero codes: too large, but its true error is
        # beaten by a larger scale as well, so the comparison comes out the same.
        normal = torch.where(batch.exists, batch.errors, torch.inf).amin(dim=-1)
        count += int((batch.errors.amin(dim=-1) < normal)[batch.filled].sum())
    return count


@dataclass(frozen=True, slots=True)
class _Batch:
    """Errors of some blocks under every candidate.

    errors   float64 [p, 32, 82]  integers, in units of (s / 2ms)**2
    exists   bool [p, 1, 82]      whether the candidate is a normal E4M3 scale
    filled   bool [p, 32]         whether the slot holds a block
    members  int64 [m]            the blocks in the filled slots
    """

    errors: Tensor
    exists: Tensor
    filled: Tensor
    members: Tensor


def _batches(words_M: Tensor, mantissas_M: Tensor, offsets_M: Tensor, *, tables: ScaleTables) -> Iterator[_Batch]:
    """Yield the errors of all blocks with a non-zero scale, SEARCH_BLOCKS at a time.

    Blocks with equal (ms, kg - es) share a table, so they are sorted into pieces of 32, and a piece is one product of
    histograms [32, 9] with the table [9, 82].
    """
    keys_M = mantissas_M.to(torch.int64) * NUM_OFFSETS + (offsets_M - LOWEST_OFFSET)
    order = torch.argsort(keys_M)
    order = order[int((mantissas_M == 0).sum()) :]
    starts, lengths = equal_runs(keys_M[order])
    pieces = (lengths + PIECE_BLOCKS - 1) // PIECE_BLOCKS
    # A run's blocks take consecutive slots from the start of its first piece.
    shifts = (pieces.cumsum(0) - pieces) * PIECE_BLOCKS - starts
    slots = torch.full((int(pieces.sum()) * PIECE_BLOCKS,), -1, dtype=torch.int64, device=words_M.device)
    slots[torch.arange(order.numel(), device=words_M.device) + shifts.repeat_interleave(lengths)] = order
    slots_pm = slots.view(-1, PIECE_BLOCKS)
    for first in range(0, slots_pm.shape[0], SEARCH_BLOCKS // PIECE_BLOCKS):
        members_pm = slots_pm[first : first + SEARCH_BLOCKS // PIECE_BLOCKS]
        keys_p = keys_M[members_pm[:, 0]]
        histograms = unpack_histograms(words_M[members_pm.clamp(min=0)]).to(torch.float64)
        filled = members_pm >= 0
        yield _Batch(
            errors=histograms @ tables.errors[keys_p // NUM_OFFSETS - MIN_MANTISSA],
            exists=(tables.scale_bytes[keys_p % NUM_OFFSETS] > 0).unsqueeze(1),
            filled=filled,
            members=members_pm[filled],
        )


def _apply_maps(packed: Tensor, maps_NB: Tensor) -> Tensor:
    rows, row_bytes = packed.shape
    nibbles_NBE = unpack_nibbles(packed).view(rows, -1, BLOCK_SIZE)
    mapped = ((maps_NB.unsqueeze(-1) >> (4 * nibbles_NBE.to(torch.int64))) & 0xF).to(torch.uint8)
    return pack_nibbles(mapped.view(rows, 2 * row_bytes))
