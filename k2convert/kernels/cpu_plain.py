"""INT4 -> NVFP4 under `plain` on the CPU: one pass over packed bytes, everything else looked up.

In `plain` arithmetic the block scale depends on the source scale and the block's largest |q| alone (rounding to BF16
is monotone), and so does every code. Both are computed once for each pair met, exactly as formats.plain defines them:
FP32 products and quotients in the same order, never fused or reordered, because numba compiles without fast-math.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from k2convert.kernels.simd import add_counts, compiled, count_magnitudes, encode_group
from k2convert.kernels.tally import (
    BATCH_GROUPS,
    BLOCKS_LANE,
    EQUAL_BLOCKS,
    INEXACT_BYTE,
    MAP_BYTE,
    MAX_SLOTS,
    NUM_SLOTS,
    PLAIN_ROWS,
    ROW_BYTES,
    ROW_LANES,
    SCALE_BYTE,
)

_u64 = np.uint64
_f32 = np.float32

SMALLEST: Final = np.float32(2.0**-9)
LARGEST: Final = np.float32(448.0)


@compiled
def bf16_value(bits: int) -> Any:
    """Return the float32 value of BF16 bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled
def round_to_bf16(value: Any) -> Any:
    """Round a finite float32 to the nearest BF16, ties to even."""
    bits = _f32(value).view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(bits & np.uint32(0xFFFF0000)).view(np.float32)


@compiled
def e4m3_byte(value: Any) -> Any:
    """Round a float32 in 2**-9 .. 448 to an E4M3 byte, ties to even."""
    bits = _f32(value).view(np.uint32)
    if value < _f32(2.0**-6):
        return np.int64(np.rint(value * _f32(512.0)))
    rounded = bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))
    return np.int64(rounded >> np.uint32(20)) - (120 << 3)


@compiled
def e4m3_value(byte: int) -> Any:
    """Return the float32 value of a positive E4M3 byte."""
    if byte < 8:
        return _f32(byte) * SMALLEST
    return np.uint32(np.uint32(byte + (120 << 3)) << np.uint32(20)).view(np.float32)


@compiled
def plain_scale_byte(amax: Any, global_scale: Any) -> Any:
    """Return the E4M3 byte of a block with this largest |w|, both float32."""
    scale = amax / (_f32(6.0) * global_scale)
    if scale == _f32(0.0):
        scale = _f32(1.0)
    return e4m3_byte(min(max(scale, SMALLEST), LARGEST))


@compiled
def nearest_e2m1(scaled: Any) -> Any:
    """Return the code 0..7 nearest to a non-negative float32, ties to the even code."""
    quadrupled = _f32(4.0) * scaled
    code = np.int64(quadrupled > _f32(1.0)) + np.int64(quadrupled >= _f32(3.0)) + np.int64(quadrupled > _f32(5.0))
    code += np.int64(quadrupled >= _f32(7.0)) + np.int64(quadrupled > _f32(10.0))
    return code + np.int64(quadrupled >= _f32(14.0)) + np.int64(quadrupled > _f32(20.0))


@compiled
def e2m1_value(code: int) -> Any:
    """Return the value of a code 0..7 as float64."""
    if code < 4:
        return 0.5 * code
    return (2.0 + (code & 1)) * (1.0 if code < 6 else 2.0)


@compiled
def _open_slot(bits: int, global_scale: Any, tally: Any) -> Any:
    slot = tally.totals[NUM_SLOTS]
    tally.totals[NUM_SLOTS] = slot + 1
    tally.slot_of[bits] = slot
    tally.slot_bits[slot] = bits
    scale = bf16_value(bits & 0x7FFF)
    for largest in range(PLAIN_ROWS):
        row = slot * PLAIN_ROWS + largest
        for lane in range(row * ROW_LANES, (row + 1) * ROW_LANES):
            tally.rows[lane] = 0
        data = row * ROW_BYTES
        byte = plain_scale_byte(round_to_bf16(_f32(largest) * scale), global_scale)
        step = e4m3_value(byte) * global_scale
        inexact = 0
        for k in range(1, 9):
            scaled = round_to_bf16(_f32(k) * scale) / step
            code = nearest_e2m1(scaled)
            sign = 8 if scaled > _f32(0.0) else 0
            tally.row_data[data + MAP_BYTE + 8 - k] = code | sign
            if k < 8:
                tally.row_data[data + MAP_BYTE + 8 + k] = code
            written = e2m1_value(code) * (np.float64(e4m3_value(byte)) * np.float64(global_scale))
            if np.float64(k) * np.float64(scale) != written:
                inexact |= 1 << (k - 1)
        tally.row_data[data + SCALE_BYTE] = byte
        tally.row_data[data + INEXACT_BYTE] = inexact
    return slot


@compiled
def convert_groups(
    packed: Any, scale_bits: Any, start: int, global_scale: Any, out: Any, scale_bytes: Any, largest_of: Any, tally: Any
) -> Any:
    """Convert groups from `start` on; return the first that was not, because the tally is full, or their number.

    packed, out uint8 [groups * 16]; scale_bits uint16 [groups]; scale_bytes uint8 [groups * 2]; global_scale float32;
    largest_of uint8 [256]: the largest |q| of a set of magnitudes.
    """
    num_groups = _u64(scale_bits.size)
    slot_of, rows, row_data, totals = tally.slot_of, tally.rows, tally.row_data, tally.totals
    equal = _u64(0)
    first = _u64(start)
    while first < num_groups and totals[NUM_SLOTS] <= MAX_SLOTS - BATCH_GROUPS:
        stop = min(first + _u64(BATCH_GROUPS), num_groups)
        for group in range(first, stop):
            bits = _u64(scale_bits[group])
            slot = np.int64(slot_of[bits])
            if slot < 0:
                slot = _open_slot(np.int64(bits), global_scale, tally)
            one, two, masks = count_magnitudes(packed, group * _u64(16))
            first_set, second_set = masks & _u64(0xFF), masks >> _u64(8)
            first_row = _u64(slot) * _u64(PLAIN_ROWS) + _u64(largest_of[first_set])
            second_row = _u64(slot) * _u64(PLAIN_ROWS) + _u64(largest_of[second_set])
            first_data, second_data = first_row * _u64(ROW_BYTES), second_row * _u64(ROW_BYTES)
            first_map, second_map = first_data + _u64(MAP_BYTE), second_data + _u64(MAP_BYTE)
            encode_group(packed, group * _u64(16), row_data, first_map, second_map, out)
            scale_bytes[_u64(2) * group] = row_data[first_data + _u64(SCALE_BYTE)]
            scale_bytes[_u64(2) * group + _u64(1)] = row_data[second_data + _u64(SCALE_BYTE)]
            equal += _u64((_u64(row_data[first_data + _u64(INEXACT_BYTE)]) & first_set) == _u64(0))
            equal += _u64((_u64(row_data[second_data + _u64(INEXACT_BYTE)]) & second_set) == _u64(0))
            add_counts(rows, first_row * _u64(ROW_LANES), one)
            rows[first_row * _u64(ROW_LANES) + _u64(BLOCKS_LANE)] += np.uint32(1)
            add_counts(rows, second_row * _u64(ROW_LANES), two)
            rows[second_row * _u64(ROW_LANES) + _u64(BLOCKS_LANE)] += np.uint32(1)
        first = stop
    totals[EQUAL_BLOCKS] += np.int64(equal)
    return np.int64(first)
