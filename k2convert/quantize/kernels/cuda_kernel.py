"""INT4 -> NVFP4 on a CUDA device in one pass, written in triton; `kernels.cuda` launches it.

One lane is one block: 8 source bytes in two 32-bit words, 8 result bytes out. A word holds 8 codes, and the kernel
handles them in parallel: bit planes with a bit for each nibble tell which of them have |q| = k. These bits are added up
for the histogram, and multiplied by the code of k for the result. The kernel never rounds a floating-point number.

`max` finds its block scale and codes in a table of (source scale, largest |q|), filled by rules/max.py. `mse`
multiplies the histogram of |q| with error tables as the CPU kernel does, in sums below 2**24.

In channels_kernel the error of a block under a candidate is a sum over its 16 elements: the factor of the channel,
importance * 4**(4 - a), times the error of |q| from one table. An element with the exponent a sees the candidate that
is 8 a grid indices further up (cpp/channels.hpp says why and which candidates can win). Sums are integers below 2**53
times a power of two, exact in float64.
"""

# triton's language has no types, and its functions are compiled from this source.
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportMissingTypeArgument=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

IN_FLIGHT = tl.constexpr(4)
"""Candidates of a block that are computed together: with more of them, registers limit how many blocks are at work."""
LANES = tl.constexpr(16)
"""Candidates of a window."""
WINDOWS = tl.constexpr(9)
RANKS = tl.constexpr(82)
ONE = tl.constexpr(0x38)
LOWEST_BYTE = tl.constexpr(0x08)
HIGHEST_BYTE = tl.constexpr(0x7E)
LOW_BITS = tl.constexpr(0x11111111)
"""The lowest bit of each nibble."""
SIGN_BITS = tl.constexpr(0x88888888 - (1 << 32))
"""The highest bit of each nibble, as a signed integer."""

TABLE_BELOW = tl.constexpr(64)
"""The table of errors begins at this grid index below zero."""
TABLE_SIZE = tl.constexpr(224)
MAGNITUDES = tl.constexpr(9)
CANDIDATES = tl.constexpr(146)
"""All candidates of rules/mse.py: rank r has the grid index RANK_ZERO_INDEX - r, but for the first and last,
under which every code is zero or saturated; both count as zero codes."""
RANK_ZERO_INDEX = tl.constexpr(112)
LOWEST_INDEX = tl.constexpr(-32)
"""The grid index of the last candidate but one."""
ALL_ZERO_INDEX = tl.constexpr(512)
SATURATED_INDEX = tl.constexpr(-512)


@triton.jit
def _magnitude_planes(word):
    """Return the four bit planes of |q|, each in the lowest bits of the word's nibbles."""
    one, two, four = word & LOW_BITS, (word >> 1) & LOW_BITS, (word >> 2) & LOW_BITS
    negative = ((word >> 3) & LOW_BITS) ^ LOW_BITS
    # Nibble u is q + 8: from 8 on its low bits are q, below they are -|q| in two's complement.
    eight = negative & ((one | two | four) ^ LOW_BITS)
    return one, two ^ (one & negative), four ^ ((one | two) & negative), eight


@triton.jit
def _matches(one, two, four, eight, k: tl.constexpr):
    """Bit plane of the nibbles with |q| = k."""
    if k == 8:
        return eight
    return (one ^ (0 if k & 1 else LOW_BITS)) & (two ^ (0 if k & 2 else LOW_BITS)) & (four ^ (0 if k & 4 else LOW_BITS))


@triton.jit
def _histogram(low, high):
    """Count |q| = 1..4 and |q| = 5..8 of sixteen codes, a byte each."""
    low_one, low_two, low_four, low_eight = _magnitude_planes(low)
    high_one, high_two, high_four, high_eight = _magnitude_planes(high)
    small, large = low * 0, low * 0
    for k in tl.static_range(1, 9):
        both = _matches(low_one, low_two, low_four, low_eight, k)
        both += _matches(high_one, high_two, high_four, high_eight, k)
        count = (((both + (both >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
        if k <= 4:
            small |= count << (8 * (k - 1))
        else:
            large |= count << (8 * (k - 5))
    return small, large


@triton.jit
def _count_of(small, large, k: tl.constexpr):
    if k <= 4:
        return (small >> (8 * (k - 1))) & 0xFF
    return (large >> (8 * (k - 5))) & 0xFF


@triton.jit
def _members(small, large):
    """Set bit k - 1 if some |q| = k occurs."""
    # 0x7F + n has its highest bit set if n is 1..16; the product moves these four bits next to each other.
    first = ((((small + 0x7F7F7F7F) >> 7) & 0x01010101) * 0x01020408) >> 24
    second = ((((large + 0x7F7F7F7F) >> 7) & 0x01010101) * 0x01020408) >> 24
    return (first & 15) | ((second & 15) << 4)


@triton.jit
def _encode(word, codes, SIGNED_ZERO: tl.constexpr):
    """Return the result nibbles of eight codes; bits 4k - 4 .. 4k - 2 of `codes` are the E2M1 code of |q| = k.

    With SIGNED_ZERO a negative that becomes zero keeps its sign, unless the highest bit of `codes` is set.
    """
    one, two, four, eight = _magnitude_planes(word)
    result = word * 0
    for k in tl.static_range(1, 9):
        result += _matches(one, two, four, eight, k) * ((codes >> (4 * (k - 1))) & 7)
    negative = (word & SIGN_BITS) ^ SIGN_BITS
    if SIGNED_ZERO:
        negative &= (codes >> 31) ^ -1
    else:
        negative &= ((result | (result >> 1) | (result >> 2)) & LOW_BITS) << 3
    return result | negative


@triton.jit
def _store_codes(out, block, low, high, codes, valid, SIGNED_ZERO: tl.constexpr):
    first = _encode(low, codes, SIGNED_ZERO).to(tl.int64) & 0xFFFFFFFF
    second = _encode(high, codes, SIGNED_ZERO).to(tl.int64) << 32
    tl.store(out + block, first | second, mask=valid)


@triton.jit
def _window_keys(errors, tables, small, large):
    """Return (least error) << 4 | (15 - lane) of one window for every block; int32."""
    keys = tl.full(small.shape, 0x7FFFFFFF, tl.int32)
    for chunk in range(LANES // IN_FLIGHT):
        lanes = chunk * IN_FLIGHT + tl.arange(0, IN_FLIGHT)[None, :]
        sums = tl.zeros((small.shape[0], IN_FLIGHT), tl.float32)
        for k in tl.static_range(1, 9):
            count = _count_of(small, large, k).to(tl.float32)
            sums += count[:, None] * tl.load(errors + tables[:, None] + (lanes + (k - 1) * LANES))
        keys = tl.minimum(keys, tl.min((sums.to(tl.int32) << 4) | (lanes ^ (LANES - 1)), axis=1))
    return keys


@triton.jit
def _search(mantissas, small, large, members, errors, windows, starts):
    """Return the position of the best candidate of all for blocks under any ms - 128."""
    window = tl.load(windows + 2 * members).to(tl.int32)
    second = tl.load(windows + 2 * members + 1).to(tl.int32)
    base = mantissas * (WINDOWS * 8 * LANES)
    keys = _window_keys(errors, base + window * (8 * LANES), small, large)
    if tl.max((second != window).to(tl.int32), axis=0) > 0:
        others = _window_keys(errors, base + second * (8 * LANES), small, large)
        better = (second != window) & ((others >> 4) <= (keys >> 4))
        keys = tl.where(better, others, keys)
        window = tl.where(better, second, window)
    return tl.load(starts + window) + LANES - 1 - (keys & (LANES - 1))


@triton.jit
def _settle(mantissas, offsets, small, large, full_errors, scale_bytes):
    """Search all candidates that exist, as the definition does; return (rank, better outside)."""
    best = tl.full(small.shape, float("inf"), tl.float64)
    least = tl.full(small.shape, float("inf"), tl.float64)
    rank = mantissas * 0
    for candidate in range(RANKS):
        error = tl.zeros(small.shape, tl.float64)
        for k in tl.static_range(1, 9):
            count = _count_of(small, large, k).to(tl.float64)
            error += count * tl.load(full_errors + (mantissas * 9 + k) * RANKS + candidate)
        exists = tl.load(scale_bytes + offsets * RANKS + candidate) > 0
        better = exists & (error < best)
        rank = tl.where(better, candidate, rank)
        best = tl.where(better, error, best)
        least = tl.minimum(least, error)
    return rank, least < best


@triton.jit
def load_blocks(packed, scale_bits, slot_of, block, valid):
    """Return the two 32-bit words of every block, and the slot of its source scale."""
    words = tl.load(packed + block, mask=valid, other=0)
    bits = tl.load(scale_bits + block // 2, mask=valid, other=0).to(tl.int32) & 0xFFFF
    return words.to(tl.int32), (words >> 32).to(tl.int32), tl.load(slot_of + bits)


@triton.jit(do_not_specialize=["num_blocks"])
def max_kernel(
    packed, scale_bits, out, out_scales, outside, slot_of,  # noqa: ARG001 - the buffers of every kernel
    largest_of, bytes_, codes, num_blocks, TILE: tl.constexpr,
):  # fmt: skip
    """Convert TILE blocks; bytes_ and codes int32 [slots * 9]."""
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = block < num_blocks
    low, high, slot = load_blocks(packed, scale_bits, slot_of, block, valid)
    small, large = _histogram(low, high)
    row = slot * 9 + tl.load(largest_of + _members(small, large)).to(tl.int32)
    _store_codes(out, block, low, high, tl.load(codes + row), valid, True)
    tl.store(out_scales + block, tl.load(bytes_ + row).to(tl.uint8), mask=valid)


@triton.jit(do_not_specialize=["num_blocks"])
def mse_kernel(
    packed, scale_bits, out, out_scales, outside, slot_of, mantissas, firsts, first_ranks, offsets,
    errors, windows, starts, full_errors, scale_bytes, codes, num_blocks, TILE: tl.constexpr,
):  # fmt: skip
    """Convert TILE blocks; mantissas (ms - 128, negative for zero), firsts, first_ranks, offsets int32 [slots].

    `outside` int64 [1] gets the blocks that a scale outside the normal range would serve strictly better.
    """
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = block < num_blocks
    low, high, slot = load_blocks(packed, scale_bits, slot_of, block, valid)
    small, large = _histogram(low, high)
    members = _members(small, large)
    mantissa = tl.load(mantissas + slot)
    empty = (mantissa < 0) | (members == 0)
    mantissa = tl.maximum(mantissa, 0)
    position = _search(mantissa, small, large, members, errors, windows, starts)
    byte = tl.load(firsts + slot) + position
    rank = tl.load(first_ranks + slot) - position
    is_outside = valid & (empty == 0) & ((byte < LOWEST_BYTE) | (byte > HIGHEST_BYTE))
    if tl.max(is_outside.to(tl.int32), axis=0) > 0:
        offset = tl.load(offsets + slot)
        settled, better_outside = _settle(mantissa, offset, small, large, full_errors, scale_bytes)
        rank = tl.where(is_outside, settled, rank)
        byte = tl.where(is_outside, tl.load(scale_bytes + offset * RANKS + settled).to(tl.int32), byte)
        tl.atomic_add(outside, tl.sum((is_outside & better_outside).to(tl.int64), axis=0), sem="relaxed")
    byte = tl.where(empty, ONE, byte)
    # Rank 0 is the candidate under which every code is zero.
    chosen = tl.load(codes + mantissa * RANKS + tl.where(empty, 0, rank), mask=valid, other=0)
    _store_codes(out, block, low, high, chosen, valid, False)
    tl.store(out_scales + block, byte.to(tl.uint8), mask=valid)


@triton.jit
def _code_of(low, high, e):
    """Return q = -8..7 of the element e of every block."""
    return ((tl.where(e < 8, low, high) >> (4 * (e & 7))) & 15) - 8


@triton.jit
def _errors_at(low, high, column, table, eighths, factors, errors, quarters):
    """Return the errors of every block under IN_FLIGHT grid indices, those from `table` on; each float64 [blocks]."""
    first = tl.zeros(low.shape, tl.float64)
    second, third, fourth = first, first, first
    for quarter in range(quarters):
        for i in tl.static_range(4):
            e = 4 * quarter + i
            q = _code_of(low, high, e)
            row = errors + (table + tl.maximum(q, -q) * TABLE_SIZE + tl.load(eighths + column + e))
            factor = tl.load(factors + column + e)
            first += factor * tl.load(row)
            second += factor * tl.load(row + 1)
            third += factor * tl.load(row + 2)
            fourth += factor * tl.load(row + 3)
    return first, second, third, fourth


@triton.jit
def _take(error, index, is_candidate, least, best):
    """Return the least error and its grid index so far; the last one of equal errors."""
    is_better = is_candidate & (error <= least)
    return tl.where(is_better, error, least), tl.where(is_better, index, best)


@triton.jit
def _search_columns(low, high, column, table, first, eighths, factors, errors, chunks, quarters):
    """Return the grid index of the best candidate from `first` on."""
    least, best = tl.full(low.shape, float("inf"), tl.float64), first
    for index in range(0, chunks * IN_FLIGHT, IN_FLIGHT):
        a, b, c, d = _errors_at(low, high, column, table + first + index, eighths, factors, errors, quarters)
        least, best = _take(a, first + index, True, least, best)
        least, best = _take(b, first + index + 1, True, least, best)
        least, best = _take(c, first + index + 2, True, least, best)
        least, best = _take(d, first + index + 3, True, least, best)
    return best


@triton.jit
def _settle_columns(low, high, column, table, offsets, eighths, factors, errors, scale_bytes, quarters):
    """Search all candidates that exist, as the definition does; return (grid index, byte, better outside)."""
    bytes_of = scale_bytes + offsets * CANDIDATES
    least = tl.full(low.shape, float("inf"), tl.float64)
    error, chosen = least, low * 0
    for index in range(LOWEST_INDEX, RANK_ZERO_INDEX, IN_FLIGHT):
        a, b, c, d = _errors_at(low, high, column, table + index, eighths, factors, errors, quarters)
        ranked = bytes_of + (RANK_ZERO_INDEX - index)
        error, chosen = _take(a, index, tl.load(ranked) > 0, error, chosen)
        error, chosen = _take(b, index + 1, tl.load(ranked - 1) > 0, error, chosen)
        error, chosen = _take(c, index + 2, tl.load(ranked - 2) > 0, error, chosen)
        error, chosen = _take(d, index + 3, tl.load(ranked - 3) > 0, error, chosen)
        least = tl.minimum(least, tl.minimum(tl.minimum(a, b), tl.minimum(c, d)))
    # At this grid index every code is zero, whatever the exponent.
    zero_error, _, _, _ = _errors_at(low, high, column, table + RANK_ZERO_INDEX, eighths, factors, errors, quarters)
    is_zero = (tl.load(bytes_of) > 0) & (zero_error <= error)
    is_last = (tl.load(bytes_of + (CANDIDATES - 1)) > 0) & (zero_error < error)
    error = tl.where(is_zero | is_last, zero_error, error)
    index = tl.where(is_zero, ALL_ZERO_INDEX, tl.where(is_last, SATURATED_INDEX, chosen))
    byte = tl.load(bytes_of + tl.where(is_zero, 0, tl.where(is_last, CANDIDATES - 1, RANK_ZERO_INDEX - chosen)))
    return index, byte.to(tl.int32), tl.minimum(least, zero_error) < error


@triton.jit(do_not_specialize=["num_blocks", "row_blocks", "chunks", "quarters"])
def channels_kernel(
    packed, scale_bits, out, out_scales, outside, slot_of, mantissas, firsts, starts, offsets,
    eighths, factors, highest, errors, scale_bytes, codes, num_blocks, row_blocks, chunks, quarters,
    TILE: tl.constexpr,
):  # fmt: skip
    """Convert TILE blocks. int32 by slot: mantissas (ms - 128, negative for zero), firsts (the byte of grid index 0),
    starts (the first candidate), offsets. By column: eighths int32 (8 a), factors float64. By block of a row: highest
    int32 (8 times the largest exponent). `outside` as in mse_kernel. quarters is 4, for four elements each: a
    compiler that knew it would unroll the loops over a block, and keep the rows of all elements in registers.
    """
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = block < num_blocks
    low, high, slot = load_blocks(packed, scale_bits, slot_of, block, valid)
    column = (block % row_blocks) * 16
    mantissa = tl.load(mantissas + slot)
    members = low * 0
    for e in tl.static_range(16):
        members |= _code_of(low, high, e)
    empty = (mantissa < 0) | (members == 0)
    mantissa = tl.maximum(mantissa, 0)
    table = mantissa * (MAGNITUDES * TABLE_SIZE) + TABLE_BELOW
    first = tl.load(starts + slot) - tl.load(highest + block % row_blocks)
    index = _search_columns(low, high, column, table, first, eighths, factors, errors, chunks, quarters)
    byte = tl.load(firsts + slot) + index
    is_outside = valid & (empty == 0) & ((byte < LOWEST_BYTE) | (byte > HIGHEST_BYTE))
    if tl.max(is_outside.to(tl.int32), axis=0) > 0:
        offset = tl.load(offsets + slot)
        settled, settled_byte, better_outside = _settle_columns(
            low, high, column, table, offset, eighths, factors, errors, scale_bytes, quarters
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
