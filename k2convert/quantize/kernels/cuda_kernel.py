"""INT4 -> NVFP4 on a CUDA device in one pass, written in triton; `kernels.cuda` launches it.

One lane is one block: 8 source bytes in two 32-bit words, 8 result bytes out. A word holds 8 codes, and the kernel
handles them in parallel: bit planes with a bit for each nibble tell which of them have |q| = k. These bits are added up
for the histogram, and multiplied by the code of k for the result. The kernel never rounds a floating-point number.

`plain` finds its block scale, codes and exactness in a table of (source scale, largest |q|), filled by rules/plain.py.
`optimal` multiplies the histogram of |q| with error tables as the CPU kernel does, in sums below 2**24. Every block
adds its histogram to the counters of its (source scale, block scale) pair, three 64-bit words of three fields.
"""

# triton's language has no types, and its functions are compiled from this source.
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportMissingTypeArgument=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

COUNTER_BITS = tl.constexpr(21)
COUNTER_WORDS = tl.constexpr(3)
LANES = tl.constexpr(16)
WINDOWS = tl.constexpr(9)
RANKS = tl.constexpr(82)
ONE = tl.constexpr(0x38)
LOWEST_BYTE = tl.constexpr(0x08)
HIGHEST_BYTE = tl.constexpr(0x7E)
LOW_BITS = tl.constexpr(0x11111111)
"""The lowest bit of each nibble."""
SIGN_BITS = tl.constexpr(0x88888888 - (1 << 32))
"""The highest bit of each nibble, as a signed integer."""


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
    lanes = tl.arange(0, 16)
    sums = tl.zeros((small.shape[0], 16), tl.float32)
    for k in tl.static_range(1, 9):
        count = _count_of(small, large, k).to(tl.float32)
        sums += count[:, None] * tl.load(errors + tables[:, None] + (lanes + (k - 1) * LANES)[None, :])
    return tl.min((sums.to(tl.int32) << 4) | (lanes ^ (LANES - 1))[None, :], axis=1)


@triton.jit
def _search(mantissas, small, large, members, errors, windows, starts):
    """Return (position of the best candidate of all, whether its error is zero) for blocks under any ms - 128."""
    window = tl.load(windows + 2 * members).to(tl.int32)
    second = tl.load(windows + 2 * members + 1).to(tl.int32)
    base = mantissas * (WINDOWS * 8 * LANES)
    keys = _window_keys(errors, base + window * (8 * LANES), small, large)
    if tl.max((second != window).to(tl.int32), axis=0) > 0:
        others = _window_keys(errors, base + second * (8 * LANES), small, large)
        better = (second != window) & ((others >> 4) <= (keys >> 4))
        keys = tl.where(better, others, keys)
        window = tl.where(better, second, window)
    return tl.load(starts + window) + LANES - 1 - (keys & (LANES - 1)), keys < LANES


@triton.jit
def _settle(mantissas, offsets, small, large, full_errors, scale_bytes):
    """Search all candidates that exist, as the definition does; return (rank, error is zero, better outside)."""
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
    return rank, best == 0.0, least < best


@triton.jit
def _count(counters, pairs, small, large, valid):
    """Add histograms to the counters of their pairs: |q| = 1, 2, 3; 4, 5, 6; 7, 8 and the number of blocks."""
    for word in tl.static_range(3):
        packed = _count_of(small, large, 3 * word + 1).to(tl.int64)
        packed |= _count_of(small, large, 3 * word + 2).to(tl.int64) << COUNTER_BITS
        if word < 2:
            packed |= _count_of(small, large, 3 * word + 3).to(tl.int64) << (2 * COUNTER_BITS)
        else:
            packed |= tl.full(packed.shape, 1, tl.int64) << (2 * COUNTER_BITS)
        tl.atomic_add(counters + pairs * COUNTER_WORDS + word, packed, mask=valid, sem="relaxed")


@triton.jit
def load_blocks(packed, scale_bits, slot_of, block, valid):
    """Return the two 32-bit words of every block, and the slot of its source scale."""
    words = tl.load(packed + block, mask=valid, other=0)
    bits = tl.load(scale_bits + block // 2, mask=valid, other=0).to(tl.int32) & 0xFFFF
    return words.to(tl.int32), (words >> 32).to(tl.int32), tl.load(slot_of + bits)


@triton.jit
def plain_kernel(
    packed, scale_bits, out, out_scales, counters, totals, slot_of, largest_of, bytes_, codes, inexact,
    num_blocks, num_slots, replicas, TILE: tl.constexpr,
):  # fmt: skip
    """Convert TILE blocks; bytes_, codes, inexact int32 [slots * 9]; counters int64 [replicas, slots, 128, 3]."""
    program = tl.program_id(0)
    block = program * TILE + tl.arange(0, TILE)
    valid = block < num_blocks
    low, high, slot = load_blocks(packed, scale_bits, slot_of, block, valid)
    small, large = _histogram(low, high)
    members = _members(small, large)
    row = slot * 9 + tl.load(largest_of + members).to(tl.int32)
    byte = tl.load(bytes_ + row)
    _store_codes(out, block, low, high, tl.load(codes + row), valid, True)
    tl.store(out_scales + block, byte.to(tl.uint8), mask=valid)
    equal = valid & ((tl.load(inexact + row) & members) == 0)
    tl.atomic_add(totals, tl.sum(equal.to(tl.int64), axis=0), sem="relaxed")
    pairs = ((program % replicas) * num_slots + slot).to(tl.int64) * 128 + byte
    _count(counters, pairs, small, large, valid)


@triton.jit
def optimal_kernel(
    packed, scale_bits, out, out_scales, counters, totals, slot_of, mantissas, firsts, first_ranks, offsets,
    errors, windows, starts, full_errors, scale_bytes, codes,
    num_blocks, num_slots, replicas, TILE: tl.constexpr,
):  # fmt: skip
    """Convert TILE blocks; mantissas (ms - 128, negative for zero), firsts, first_ranks, offsets int32 [slots]."""
    program = tl.program_id(0)
    block = program * TILE + tl.arange(0, TILE)
    valid = block < num_blocks
    low, high, slot = load_blocks(packed, scale_bits, slot_of, block, valid)
    small, large = _histogram(low, high)
    members = _members(small, large)
    mantissa = tl.load(mantissas + slot)
    empty = (mantissa < 0) | (members == 0)
    mantissa = tl.maximum(mantissa, 0)
    position, equal = _search(mantissa, small, large, members, errors, windows, starts)
    byte = tl.load(firsts + slot) + position
    rank = tl.load(first_ranks + slot) - position
    outside = valid & (empty == 0) & ((byte < LOWEST_BYTE) | (byte > HIGHEST_BYTE))
    if tl.max(outside.to(tl.int32), axis=0) > 0:
        offset = tl.load(offsets + slot)
        settled, settled_equal, better_outside = _settle(mantissa, offset, small, large, full_errors, scale_bytes)
        rank = tl.where(outside, settled, rank)
        equal = tl.where(outside, settled_equal, equal)
        byte = tl.where(outside, tl.load(scale_bytes + offset * RANKS + settled).to(tl.int32), byte)
        tl.atomic_add(totals + 1, tl.sum((outside & better_outside).to(tl.int64), axis=0), sem="relaxed")
    byte = tl.where(empty, ONE, byte)
    # Rank 0 is the candidate under which every code is zero.
    chosen = tl.load(codes + mantissa * RANKS + tl.where(empty, 0, rank), mask=valid, other=0)
    _store_codes(out, block, low, high, chosen, valid, False)
    tl.store(out_scales + block, byte.to(tl.uint8), mask=valid)
    tl.atomic_add(totals, tl.sum((valid & (equal | empty)).to(tl.int64), axis=0), sem="relaxed")
    pairs = ((program % replicas) * num_slots + slot).to(tl.int64) * 128 + byte
    _count(counters, pairs, small, large, valid)
