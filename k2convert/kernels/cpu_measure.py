"""Measuring INT4 weights on the CPU: largest values, the sampled blocks, and sums over a table of pairs.

All three repeat `formats` operation by operation (float64, in the order given there), so that figures agree to the
last bit; they exist because a tensor's figures must cost less than its conversion.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from k2convert.kernels.cpu_optimal import count_odd
from k2convert.kernels.cpu_plain import (
    bf16_value,
    e2m1_value,
    e4m3_value,
    nearest_e2m1,
    plain_scale_byte,
    round_to_bf16,
)
from k2convert.kernels.simd import compiled, count_magnitudes
from k2convert.kernels.tally import MAX_NEW_ODD, NUM_ODD

_u64 = np.uint64
_f32 = np.float32

FIRST_UNUSABLE_BITS: Final = 0x7E00
"""BF16 bits of 2**125: eight times it overflows. Infinity, NaN and all negative numbers but -0.0 are above it too."""
MINUS_ZERO_BITS: Final = 0x8000


@compiled
def measure_groups(packed: Any, scale_bits: Any, largest_of: Any) -> Any:
    """Return (largest scale as BF16 bits, largest |bf16(q * s)| as float32, whether every scale is usable)."""
    num_groups = _u64(scale_bits.size)
    largest_bits = np.int64(0)
    usable = True
    for group in range(num_groups):
        bits = np.int64(scale_bits[group])
        if bits != MINUS_ZERO_BITS:
            largest_bits = max(largest_bits, bits)
    if largest_bits >= FIRST_UNUSABLE_BITS:
        return largest_bits, _f32(0.0), False
    amax = _f32(0.0)
    for group in range(num_groups):
        scale = bf16_value(np.int64(scale_bits[group]) & 0x7FFF)
        if _f32(8.0) * scale > amax:
            _, _, masks = count_magnitudes(packed, group * _u64(16))
            largest = largest_of[(masks | (masks >> _u64(8))) & _u64(0xFF)]
            amax = max(amax, round_to_bf16(_f32(largest) * scale))
    return largest_bits, amax, usable


@compiled
def sample_pairs(
    packed: Any,
    scale_bits: Any,
    scale_bytes: Any,
    chosen: Any,
    start: int,
    plain_scale: Any,
    use_plain: bool,
    largest_of: Any,
    tally: Any,
) -> Any:
    """Count the pairs of the blocks chosen[start:], int64; return the first place that was not counted.

    The block scale is the one in `scale_bytes`, or with `use_plain` the one that `plain` chooses for this global scale.
    """
    place = start
    while place < chosen.size and tally.totals[NUM_ODD] <= MAX_NEW_ODD:
        block = _u64(chosen[place])
        group = block >> _u64(1)
        one, two, masks = count_magnitudes(packed, group * _u64(16))
        second = (block & _u64(1)) == _u64(1)
        word = two if second else one
        bits = np.int64(scale_bits[group]) & 0x7FFF
        byte = np.int64(scale_bytes[block])
        if use_plain:
            members = masks >> _u64(8) if second else masks & _u64(0xFF)
            amax = round_to_bf16(_f32(largest_of[members]) * bf16_value(bits))
            byte = plain_scale_byte(amax, plain_scale)
        count_odd(bits << 8 | byte, word, tally)
        place += 1
    return place


@compiled
def sample_bounds(packed: Any, scale_bits: Any, chosen: Any, assignments: Any, bounds: Any) -> None:
    """Write the bound of the chosen blocks (see formats.block_bound) to float64 bounds; assignments float64 [6, 9]."""
    for place in range(chosen.size):
        block = _u64(chosen[place])
        one, two, _ = count_magnitudes(packed, (block >> _u64(1)) * _u64(16))
        word = two if (block & _u64(1)) == _u64(1) else one
        scale = np.float64(bf16_value(np.int64(scale_bits[block >> _u64(1)]) & 0x7FFF))
        energy = 0.0
        for k in range(1, 9):
            energy += np.float64((word >> _u64(8 * k - 8)) & _u64(0xFF)) * np.float64(k * k)
        explained = 0.0
        for row in range(assignments.shape[0]):
            inner, norm = 0.0, 0.0
            for k in range(1, 9):
                count = np.float64((word >> _u64(8 * k - 8)) & _u64(0xFF))
                inner += count * (np.float64(k) * assignments[row, k])
                norm += count * (assignments[row, k] * assignments[row, k])
            explained = max(explained, inner * inner / max(norm, 1.0))
        bounds[place] = (energy - explained) * (scale * scale)


@compiled
def sum_pairs(keys: Any, counts: Any, is_plain: bool, global_scale: float, energies: Any, errors: Any) -> Any:
    """Write sum w**2 and sum (w - w')**2 of each pair, both float64 [P]; keys int64 [P], counts int64 [P, 9].

    Returns (non-zero weights, those unchanged, recoverable codes, largest error in steps of s).
    """
    plain_g = _f32(global_scale)
    nonzero, equal, recoverable, most = 0, 0, 0, 0.0
    for pair in range(keys.size):
        scale = np.float64(bf16_value(keys[pair] >> 8))
        block_scale = e4m3_value(keys[pair] & 0xFF)
        step = np.float64(block_scale) * global_scale
        plain_step = block_scale * plain_g
        energy, error = 0.0, 0.0
        for k in range(9):
            count = counts[pair, k]
            wanted = np.float64(k) * scale
            if is_plain:
                code = nearest_e2m1(round_to_bf16(_f32(k) * bf16_value(keys[pair] >> 8)) / plain_step)
            else:
                quadrupled = 4.0 * wanted
                code = np.int64(quadrupled > step) + np.int64(quadrupled >= 3.0 * step)
                code += np.int64(quadrupled > 5.0 * step) + np.int64(quadrupled >= 7.0 * step)
                code += np.int64(quadrupled > 10.0 * step) + np.int64(quadrupled >= 14.0 * step)
                code += np.int64(quadrupled > 20.0 * step)
            written = e2m1_value(code) * step
            difference = wanted - written
            energy += np.float64(count) * (wanted * wanted)
            error += np.float64(count) * (difference * difference)
            if wanted != 0.0:
                nonzero += count
                if wanted == written:
                    equal += count
            if np.rint(written / scale if scale > 0.0 else 0.0) == k:
                recoverable += count
            if scale > 0.0 and count > 0:
                most = max(most, abs(difference) / scale)
        energies[pair] = energy
        errors[pair] = error
    return nonzero, equal, recoverable, most
