"""INT4 -> NVFP4 under `optimal` on the CPU: one pass over packed bytes, in three phases of short dependency chains.

    count     16 bytes -> two histograms of |q|, the slot of the scale
    search    histogram x error table [8, 16] -> the best of 16 candidates (see search_tables.py)
    encode    byte shuffle by the candidate's map, block scale, tally

Blocks that the search cannot settle (all zero, a zero scale, a best scale outside the normal range) are settled one
by one with the full table, exactly as formats.optimal defines it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from k2convert.formats.e4m3 import MAX_BYTE, MIN_NORMAL_BYTE, ONE_BYTE
from k2convert.formats.scale_tables import HIGHEST_OFFSET, LOWEST_OFFSET, NUM_CANDIDATES
from k2convert.kernels.search_tables import (
    LANES,
    LAST_GRID_RANK,
    LOWEST_STEP,
    NUM_COUNTED,
    NUM_WINDOWS,
)
from k2convert.kernels.simd import (
    LANE_BITS,
    add_counts,
    compiled,
    count_magnitudes,
    encode_group,
    least_of_sixteen,
    least_of_sixteen_without_eight,
    store_floats,
)
from k2convert.kernels.tally import (
    BATCH_GROUPS,
    BLOCKS_LANE,
    EQUAL_BLOCKS,
    MAX_NEW_ODD,
    MAX_SLOTS,
    NUM_ODD,
    NUM_SLOTS,
    ODD_CAPACITY,
    OUTSIDE_NORMAL,
    ROW_LANES,
    ROWS_PER_SLOT,
)

WINDOW_SIZE: Final = NUM_COUNTED * LANES
EXACT_BIT: Final = 8
"""A pick is a position, and this bit where the error is zero."""
NO_BYTE: Final = -(1 << 20)
"""Stands for the E4M3 byte of position 0 under a zero scale: no position gives a valid byte."""

_u64 = np.uint64


@compiled
def split_scale(bits: int) -> Any:
    """Split BF16 bits into (ms, es) with s = ms * 2**es and ms in 128..255; (0, 0) for zero."""
    mantissa = bits & 0x7F
    exponent = (bits >> 7) & 0xFF
    if exponent > 0:
        return mantissa + 128, exponent - 134
    if mantissa == 0:
        return 0, 0
    exponent = -133
    while mantissa < 128:
        mantissa <<= 1
        exponent -= 1
    return mantissa, exponent


@compiled
def search_blocks(num_groups: Any, masks: Any, tables_at: Any, floats: Any, tables: Any, picks: Any) -> None:
    """Find the best candidate of the first blocks of a batch: its position, and EXACT_BIT where the error is zero."""
    windows, more, starts, errors = tables.windows, tables.more, tables.starts, tables.errors
    for i in range(_u64(2) * num_groups):
        present = (_u64(masks[i >> _u64(1)]) >> (_u64(8) * (i & _u64(1)))) & _u64(0xFF)
        window, second = _u64(windows[present]), _u64(more[present])
        table = _u64(tables_at[i >> _u64(1)])
        # Whether -8 occurs is the same for all blocks of a checkpoint, or nearly: the branch costs nothing.
        if present < _u64(0x80):
            key = least_of_sixteen_without_eight(errors, table + window * _u64(WINDOW_SIZE), floats, i * _u64(8))
        else:
            key = least_of_sixteen(errors, table + window * _u64(WINDOW_SIZE), floats, i * _u64(8))
        if second != window:
            other = least_of_sixteen(errors, table + second * _u64(WINDOW_SIZE), floats, i * _u64(8))
            if other >> _u64(LANE_BITS) <= key >> _u64(LANE_BITS):
                key, window = other, second
        position = _u64(starts[window]) + _u64(LANES - 1) - (key & _u64(LANES - 1))
        picks[i] = position | (_u64(key < _u64(LANES)) << _u64(EXACT_BIT))


@compiled
def _open_slot(bits: int, exponent: int, tally: Any) -> Any:
    slot = tally.totals[NUM_SLOTS]
    tally.totals[NUM_SLOTS] = slot + 1
    tally.slot_of[bits] = slot
    tally.slot_bits[slot] = bits
    mantissa, scale_exponent = split_scale(bits)
    tally.slot_table[slot] = mantissa - 128
    first = 8 * (10 - (exponent - scale_exponent)) + 32 + (mantissa + 15) // 16 - 8 - LOWEST_STEP
    tally.slot_first[slot] = first if mantissa > 0 else NO_BYTE
    grid_index = 32 + (mantissa + 15) // 16 - 8 - LOWEST_STEP
    tally.slot_rank[slot] = (mantissa - 128) * NUM_CANDIDATES + LAST_GRID_RANK - grid_index
    start = slot * ROWS_PER_SLOT * ROW_LANES
    for lane in range(start, start + ROWS_PER_SLOT * ROW_LANES):
        tally.rows[lane] = 0
    return slot


@compiled
def count_odd(key: int, word: Any, tally: Any) -> None:
    """Count one block in the hash table."""
    place = (key * 40503) & (ODD_CAPACITY - 1)
    while tally.odd_keys[place] != key:
        if tally.odd_keys[place] < 0:
            tally.odd_keys[place] = key
            for lane in range(place * ROW_LANES, (place + 1) * ROW_LANES):
                tally.odd_rows[lane] = 0
            tally.totals[NUM_ODD] += 1
            break
        place = (place + 1) & (ODD_CAPACITY - 1)
    add_counts(tally.odd_rows, _u64(place * ROW_LANES), word)
    tally.odd_rows[place * ROW_LANES + BLOCKS_LANE] += np.uint32(1)


@compiled
def settle_exactly(bits: int, word: Any, exponent: int, tables: Any, totals: Any) -> Any:
    """Return (E4M3 byte, map id) of one block by the definition, and add to the totals."""
    mantissa, scale_exponent = split_scale(bits)
    if mantissa == 0 or word == _u64(0):
        totals[EQUAL_BLOCKS] += 1
        return ONE_BYTE, np.int64(tables.map_ids[0])
    offset = min(max(exponent - scale_exponent, LOWEST_OFFSET), HIGHEST_OFFSET) - LOWEST_OFFSET
    table = (mantissa - 128) * 9 * NUM_CANDIDATES
    best, best_rank, least = np.inf, 0, np.inf
    for rank in range(NUM_CANDIDATES):
        error = 0.0
        for k in range(1, 9):
            count = (word >> _u64(8 * (k - 1))) & _u64(0xFF)
            error += np.float64(count) * tables.full_errors[table + k * NUM_CANDIDATES + rank]
        least = min(least, error)
        if error < best and tables.scale_bytes[offset * NUM_CANDIDATES + rank] > 0:
            best, best_rank = error, rank
    if least < best:
        totals[OUTSIDE_NORMAL] += 1
    if best == 0.0:
        totals[EQUAL_BLOCKS] += 1
    scale_byte = np.int64(tables.scale_bytes[offset * NUM_CANDIDATES + best_rank])
    return scale_byte, np.int64(tables.map_ids[(mantissa - 128) * NUM_CANDIDATES + best_rank])


@compiled
def _settle_block(bits: int, word: Any, exponent: int, tables: Any, tally: Any) -> Any:
    """Settle and tally one block that the search cannot; return E4M3 byte << 8 | map id."""
    scale_byte, map_id = settle_exactly(bits, word, exponent, tables, tally.totals)
    count_odd((bits & 0x7FFF) << 8 | scale_byte, word, tally)
    return scale_byte << 8 | map_id


@compiled
def _count_batch(packed: Any, scale_bits: Any, first: Any, size: Any, exponent: int, tally: Any) -> None:
    """Count the magnitudes of a batch of groups and find the slots of their scales."""
    slot_of, slots, slot_table, tables_at = tally.slot_of, tally.slots, tally.slot_table, tally.tables_at
    words, masks, floats = tally.words, tally.masks, tally.floats
    for i in range(size):
        bits = _u64(scale_bits[first + i])
        slot = np.int64(slot_of[bits])
        if slot < 0:
            slot = _open_slot(np.int64(bits), exponent, tally)
        slots[i] = slot
        tables_at[i] = max(slot_table[_u64(slot)], 0) * (NUM_WINDOWS * WINDOW_SIZE)
        one, two, mask = count_magnitudes(packed, (first + i) * _u64(16))
        words[_u64(2) * i], words[_u64(2) * i + _u64(1)] = one, two
        masks[i] = mask
        store_floats(floats, i * _u64(16), one)
        store_floats(floats, i * _u64(16) + _u64(8), two)


@compiled
def _encode_batch(
    packed: Any, first: Any, size: Any, exponent: int, out: Any, scale_bytes: Any, tables: Any, tally: Any
) -> None:
    """Write codes and block scales of a batch, and tally its blocks."""
    slots, slot_first, slot_rank = tally.slots, tally.slot_first, tally.slot_rank
    words, picks, rows, block_maps = tally.words, tally.picks, tally.rows, tally.block_maps
    map_ids, maps = tables.map_ids, tables.maps
    equal = _u64(0)
    for i in range(_u64(2) * size):
        slot = _u64(slots[i >> _u64(1)])
        word, pick = words[i], _u64(picks[i])
        position = pick & _u64(0xFF)
        scale_byte = np.int64(slot_first[slot]) + np.int64(position)
        if word == _u64(0) or scale_byte < MIN_NORMAL_BYTE or scale_byte > MAX_BYTE:
            settled = _settle_block(np.int64(tally.slot_bits[slot]), word, exponent, tables, tally)
            scale_bytes[_u64(2) * first + i] = settled >> 8
            block_maps[i] = settled & 0xFF
        else:
            row = (slot * _u64(ROWS_PER_SLOT) + position) * _u64(ROW_LANES)
            add_counts(rows, row, word)
            rows[row + _u64(BLOCKS_LANE)] += np.uint32(1)
            equal += pick >> _u64(EXACT_BIT)
            scale_bytes[_u64(2) * first + i] = scale_byte
            block_maps[i] = map_ids[_u64(slot_rank[slot]) - position]
    tally.totals[EQUAL_BLOCKS] += np.int64(equal)
    for i in range(size):
        one = _u64(block_maps[_u64(2) * i]) * _u64(16)
        two = _u64(block_maps[_u64(2) * i + _u64(1)]) * _u64(16)
        encode_group(packed, (first + i) * _u64(16), maps, one, two, out)


@compiled
def convert_groups(
    packed: Any, scale_bits: Any, start: int, exponent: int, out: Any, scale_bytes: Any, tables: Any, tally: Any
) -> Any:
    """Convert groups from `start` on; return the first that was not, because the tally is full, or their number.

    packed, out uint8 [groups * 16]; scale_bits uint16 [groups]; scale_bytes uint8 [groups * 2]; g = 2**exponent.
    """
    num_groups = _u64(scale_bits.size)
    first = _u64(start)
    totals = tally.totals
    while first < num_groups and totals[NUM_SLOTS] <= MAX_SLOTS - BATCH_GROUPS and totals[NUM_ODD] <= MAX_NEW_ODD:
        size = min(_u64(BATCH_GROUPS), num_groups - first)
        _count_batch(packed, scale_bits, first, size, exponent, tally)
        search_blocks(size, tally.masks, tally.tables_at, tally.floats, tables, tally.picks)
        _encode_batch(packed, first, size, exponent, out, scale_bytes, tables, tally)
        first += size
    return np.int64(first)
