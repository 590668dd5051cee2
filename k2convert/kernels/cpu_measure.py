"""Measuring INT4 weights on the CPU: largest values, the sampled blocks, and the errors of a table of pairs.

All of it repeats `formats` operation by operation (float64, in the order given there), so that figures agree to the
last bit; it exists because a tensor's figures must cost less than its conversion.
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
def gather_sample(packed: Any, scale_bits: Any, scale_bytes: Any, chosen: Any, words: Any, keys: Any) -> None:
    """Write histogram words uint64 and keys int64 (as in PairCounts) of the chosen blocks, int64."""
    for place in range(chosen.size):
        block = _u64(chosen[place])
        group = block >> _u64(1)
        one, two, _ = count_magnitudes(packed, group * _u64(16))
        words[place] = two if (block & _u64(1)) == _u64(1) else one
        keys[place] = (np.int64(scale_bits[group]) & 0x7FFF) << 8 | np.int64(scale_bytes[block])


@compiled
def use_plain_scales(words: Any, keys: Any, plain_scale: Any) -> None:
    """Replace the block scales in the keys by those that `plain` chooses for this float32 global scale."""
    for place in range(words.size):
        largest = 0
        for k in range(1, 9):
            if (words[place] >> _u64(8 * k - 8)) & _u64(0xFF) != _u64(0):
                largest = k
        bits = keys[place] >> 8
        keys[place] = bits << 8 | plain_scale_byte(round_to_bf16(_f32(largest) * bf16_value(bits)), plain_scale)


@compiled
def count_sample(words: Any, keys: Any, start: int, tally: Any) -> Any:
    """Count the pairs of the sampled blocks from `start` on; return the first place that was not counted."""
    place = start
    while place < words.size and tally.totals[NUM_ODD] <= MAX_NEW_ODD:
        count_odd(keys[place], words[place], tally)
        place += 1
    return place


@compiled
def sample_bounds(words: Any, keys: Any, assignments: Any, bounds: Any) -> None:
    """Write the bound of the sampled blocks (see formats.block_bound) to float64 bounds; assignments float64 [6, 9]."""
    for place in range(words.size):
        scale = np.float64(bf16_value(keys[place] >> 8))
        energy = 0.0
        for k in range(1, 9):
            energy += np.float64((words[place] >> _u64(8 * k - 8)) & _u64(0xFF)) * np.float64(k * k)
        explained = 0.0
        for row in range(assignments.shape[0]):
            inner, norm = 0.0, 0.0
            for k in range(1, 9):
                count = np.float64((words[place] >> _u64(8 * k - 8)) & _u64(0xFF))
                inner += count * (np.float64(k) * assignments[row, k])
                norm += count * (assignments[row, k] * assignments[row, k])
            explained = max(explained, inner * inner / max(norm, 1.0))
        bounds[place] = (energy - explained) * (scale * scale)


@compiled
def pair_errors(keys: Any, counts: Any, is_plain: bool, global_scale: float, errors: Any) -> None:
    """Write sum (w - w')**2 of each pair to float64 errors [P]; keys int64 [P], counts int64 [P, 9]."""
    plain_g = _f32(global_scale)
    for pair in range(keys.size):
        scale = bf16_value(keys[pair] >> 8)
        block_scale = e4m3_value(keys[pair] & 0xFF)
        step = np.float64(block_scale) * global_scale
        plain_step = block_scale * plain_g
        error = 0.0
        for k in range(9):
            wanted = np.float64(k) * np.float64(scale)
            if is_plain:
                code = nearest_e2m1(round_to_bf16(_f32(k) * scale) / plain_step)
            else:
                quadrupled = 4.0 * wanted
                code = np.int64(quadrupled > step) + np.int64(quadrupled >= 3.0 * step)
                code += np.int64(quadrupled > 5.0 * step) + np.int64(quadrupled >= 7.0 * step)
                code += np.int64(quadrupled > 10.0 * step) + np.int64(quadrupled >= 14.0 * step)
                code += np.int64(quadrupled > 20.0 * step)
            difference = wanted - e2m1_value(code) * step
            error += np.float64(counts[pair, k]) * (difference * difference)
        errors[pair] = error
