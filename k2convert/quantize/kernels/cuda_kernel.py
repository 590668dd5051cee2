"""INT4 -> NVFP4 on a CUDA device in one pass, written in triton; `kernels.cuda` launches it.

One lane is one block: 8 source bytes in two 32-bit words, 8 result bytes out. The error of a block under a candidate
is a sum over its 16 elements: the factor of the channel, importance * 4**(4 - a), times the error of |q| from one
table. An element with the exponent a sees the candidate that is 8 a grid indices further up (cpp/channels.hpp says why
and which candidates can win). Sums are integers below 2**53 times a power of two, exact in float64.
"""

# triton's language has no types, and its functions are compiled from this source.
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportMissingTypeArgument=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

LANES = tl.constexpr(16)
RANKS = tl.constexpr(82)
ONE = tl.constexpr(0x38)
LOWEST_BYTE = tl.constexpr(0x08)
HIGHEST_BYTE = tl.constexpr(0x7E)
TABLE_BELOW = tl.constexpr(64)
"""The table of errors begins at this grid index below zero."""
TABLE_SIZE = tl.constexpr(224)
MAGNITUDES = tl.constexpr(9)
CANDIDATES = tl.constexpr(146)
"""All candidates of rules/mse.py: rank r has the grid index RANK_ZERO_INDEX - r, but for the first and last,
under which every code is zero or saturated; both count as zero codes."""
RANK_ZERO_INDEX = tl.constexpr(112)
GRID_CHUNKS = tl.constexpr(9)
UNROLLED = tl.constexpr(4)
ALL_ZERO_INDEX = tl.constexpr(512)
SATURATED_INDEX = tl.constexpr(-512)


@triton.jit
def _code_of(low, high, e):
    """Return q = -8..7 of the element e of every block."""
    return ((tl.where(e < 8, low, high) >> (4 * (e & 7))) & 15) - 8


@triton.jit
def _magnitude_of(low, high, e):
    code = _code_of(low, high, e)
    return tl.maximum(code, -code)


@triton.jit
def _errors_at(low, high, column, table, indices, eighths, factors, errors):
    """Return the error of every block under grid indices, float64 [blocks, 16], for indices [1 or blocks, 16]."""
    sums = tl.zeros((low.shape[0], 16), tl.float64)
    for e in tl.range(0, 16, loop_unroll_factor=UNROLLED):
        row = table + _magnitude_of(low, high, e) * TABLE_SIZE + tl.load(eighths + column + e)
        sums += tl.load(factors + column + e)[:, None] * tl.load(errors + row[:, None] + indices)
    return sums


@triton.jit
def _search_columns(low, high, column, table, first, eighths, factors, errors, chunks):
    """Return the grid index of the best candidate from `first` on; the last one of equal errors."""
    lanes = tl.arange(0, 16)[None, :]
    least = tl.full((low.shape[0], 16), float("inf"), tl.float64)
    places = tl.zeros((low.shape[0], 16), tl.int32)
    for chunk in range(chunks):
        place = chunk * LANES + lanes
        sums = _errors_at(low, high, column, table, first[:, None] + place, eighths, factors, errors)
        is_better = sums <= least
        places = tl.where(is_better, place, places)
        least = tl.where(is_better, sums, least)
    best = tl.min(least, axis=1)
    return first + tl.max(tl.where(least == best[:, None], places, -1), axis=1)


@triton.jit
def _settle_columns(low, high, column, table, offsets, eighths, factors, errors, scale_bytes):
    """Search all candidates that exist, as the definition does; return (grid index, byte, better outside)."""
    lanes = tl.arange(0, 16)[None, :]
    bytes_of = scale_bytes + offsets * CANDIDATES
    least = tl.full((low.shape[0], 16), float("inf"), tl.float64)
    best = tl.full((low.shape[0], 16), float("inf"), tl.float64)
    ranks = tl.zeros((low.shape[0], 16), tl.int32)
    for chunk in range(GRID_CHUNKS):
        rank = chunk * LANES + 1 + lanes
        sums = _errors_at(low, high, column, table, RANK_ZERO_INDEX - rank, eighths, factors, errors)
        is_better = (tl.load(bytes_of[:, None] + rank) > 0) & (sums < best)
        ranks = tl.where(is_better, rank, ranks)
        best = tl.where(is_better, sums, best)
        least = tl.minimum(least, sums)
    # At this grid index every code is zero, whatever the exponent.
    zeros = _errors_at(low, high, column, table, RANK_ZERO_INDEX + lanes * 0, eighths, factors, errors)
    zero_error = tl.max(zeros, axis=1)
    error = tl.min(best, axis=1)
    chosen = tl.min(tl.where(best == error[:, None], ranks, CANDIDATES), axis=1)
    is_zero = (tl.load(bytes_of) > 0) & (zero_error <= error)
    is_last = (tl.load(bytes_of + (CANDIDATES - 1)) > 0) & (zero_error < error)
    error = tl.where(is_zero | is_last, zero_error, error)
    index = tl.where(is_zero, ALL_ZERO_INDEX, tl.where(is_last, SATURATED_INDEX, RANK_ZERO_INDEX - chosen))
    byte = tl.load(bytes_of + tl.where(is_zero, 0, tl.where(is_last, CANDIDATES - 1, chosen)))
    return index, byte.to(tl.int32), tl.minimum(tl.min(least, axis=1), zero_error) < error


@triton.jit
def channels_kernel(
    packed, scale_bits, out, out_scales, outside, slot_of, mantissas, firsts, starts, offsets,
    eighths, factors, highest, errors, scale_bytes, codes, num_blocks, row_blocks, chunks, TILE: tl.constexpr,
):  # fmt: skip
    """Convert TILE blocks. int32 by slot: mantissas (ms - 128, negative for zero), firsts (the byte of grid index 0),
    starts (the first candidate), offsets. By column: eighths int32 (8 a), factors float64. By block of a row: highest
    int32 (8 times the largest exponent). `outside` int64 [1] gets the blocks that a scale outside
    the normal range would serve strictly better.
    """
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = block < num_blocks
    words = tl.load(packed + block, mask=valid, other=0)
    low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    slot = tl.load(slot_of + (tl.load(scale_bits + block // 2, mask=valid, other=0).to(tl.int32) & 0xFFFF))
    column = (block % row_blocks) * 16
    mantissa = tl.load(mantissas + slot)
    members = low * 0
    for e in tl.static_range(16):
        members |= _code_of(low, high, e)
    empty = (mantissa < 0) | (members == 0)
    mantissa = tl.maximum(mantissa, 0)
    table = mantissa * (MAGNITUDES * TABLE_SIZE) + TABLE_BELOW
    first = tl.load(starts + slot) - tl.load(highest + block % row_blocks)
    index = _search_columns(low, high, column, table, first, eighths, factors, errors, chunks)
    byte = tl.load(firsts + slot) + index
    is_outside = valid & (empty == 0) & ((byte < LOWEST_BYTE) | (byte > HIGHEST_BYTE))
    if tl.max(is_outside.to(tl.int32), axis=0) > 0:
        settled, settled_byte, better_outside = _settle_columns(
            low, high, column, table, tl.load(offsets + slot), eighths, factors, errors, scale_bytes
        )
        index = tl.where(is_outside, settled, index)
        byte = tl.where(is_outside, settled_byte, byte)
        tl.atomic_add(outside, tl.sum((is_outside & better_outside).to(tl.int64), axis=0), sem="relaxed")
    byte = tl.where(empty, ONE, byte)
    tl.store(out_scales + block, byte.to(tl.uint8), mask=valid)
    result = block.to(tl.int64) * 0
    for e in tl.static_range(16):
        q = _code_of(low, high, e)
        k = tl.maximum(q, -q)
        rank = tl.minimum(tl.maximum(RANKS - 2 - index - tl.load(eighths + column + e), 0), RANKS - 1)
        chosen = tl.load(codes + mantissa * RANKS + rank, mask=valid & (empty == 0) & (k > 0), other=0)
        code = (chosen >> (4 * tl.maximum(k - 1, 0))) & 7
        nibble = code | tl.where((q < 0) & (code > 0), 8, 0)
        result |= nibble.to(tl.int64) << (4 * e)
    tl.store(out + block, result, mask=valid)
