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
CHUNK_GROUPS: Final = 256
"""Groups of which only the largest scale is looked at first."""


@compiled
def measure_groups(packed: Any, scale_bits: Any, largest_of: Any) -> Any:
    """Return (largest scale as BF16 bits, largest |bf16(q * s)| as float32, whether every scale is usable)."""
    num_groups = _u64(scale_bits.size)
    largest_bits = np.uint16(0)
    amax = _f32(0.0)
    first = _u64(0)
    while first < num_groups:
        stop = min(first + _u64(CHUNK_GROUPS), num_groups)
        chunk_bits = np.uint16(0)
        for group in range(first, stop):
            bits = scale_bits[group]
            chunk_bits = max(chunk_bits, bits if bits != np.uint16(MINUS_ZERO_BITS) else np.uint16(0))
        largest_bits = max(largest_bits, chunk_bits)
        if largest_bits >= np.uint16(FIRST_UNUSABLE_BITS):
            return np.int64(largest_bits), _f32(0.0), False
        if _f32(8.0) * bf16_value(np.int64(chunk_bits)) > amax:
            for group in range(first, stop):
                scale = bf16_value(np.int64(scale_bits[group]) & 0x7FFF)
                if _f32(8.0) * scale > amax:
                    _, _, masks = count_magnitudes(packed, group * _u64(16))
                    largest = largest_of[(masks | (masks >> _u64(8))) & _u64(0xFF)]
                    amax = max(amax, round_to_bf16(_f32(largest) * scale))
        first = stop
    return np.int64(largest_bits), amax, True


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
    """Write the bound of the sampled blocks (see formats.block_bound) to float64 bounds.

    assignments float64 [8, 12]: for each |q| = 1..8 the products k * v of six assignments, then their v * v.
    """
    for place in range(_u64(words.size)):
        word = words[place]
        scale = np.float64(bf16_value(keys[place] >> 8))
        energy = 0.0
        i0, i1, i2, i3, i4, i5 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        n0, n1, n2, n3, n4, n5 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for k in range(_u64(8)):
            count = np.float64((word >> (_u64(8) * k)) & _u64(0xFF))
            energy += count * np.float64((k + _u64(1)) * (k + _u64(1)))
            i0 += count * assignments[k, 0]
            i1 += count * assignments[k, 1]
            i2 += count * assignments[k, 2]
            i3 += count * assignments[k, 3]
            i4 += count * assignments[k, 4]
            i5 += count * assignments[k, 5]
            n0 += count * assignments[k, 6]
            n1 += count * assignments[k, 7]
            n2 += count * assignments[k, 8]
            n3 += count * assignments[k, 9]
            n4 += count * assignments[k, 10]
            n5 += count * assignments[k, 11]
        explained = max(i0 * i0 / max(n0, 1.0), max(i1 * i1 / max(n1, 1.0), i2 * i2 / max(n2, 1.0)))
        explained = max(explained, max(i3 * i3 / max(n3, 1.0), i4 * i4 / max(n4, 1.0)))
        explained = max(explained, i5 * i5 / max(n5, 1.0))
        bounds[place] = (energy - explained) * (scale * scale)


@compiled
def figures_of_pairs(keys: Any, counts: Any, is_plain: bool, global_scale: float, energies: Any, errors: Any) -> Any:
    """Write sum w**2 and sum (w - w')**2 of each pair, float64 [P]; keys int64 [P], counts int64 [P, 9].

    Returns (non-zero weights, those unchanged, recoverable codes, largest error in steps of s).
    """
    plain_g = _f32(global_scale)
    nonzero, equal, recoverable, most = 0, 0, 0, 0.0
    for pair in range(keys.size):
        scale = bf16_value(keys[pair] >> 8)
        exact_scale = np.float64(scale)
        block_scale = e4m3_value(keys[pair] & 0xFF)
        step = np.float64(block_scale) * global_scale
        plain_step = block_scale * plain_g
        energy, error = 0.0, 0.0
        for k in range(9):
            count = counts[pair, k]
            wanted = np.float64(k) * exact_scale
            if is_plain:
                code = nearest_e2m1(round_to_bf16(_f32(k) * scale) / plain_step)
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
                equal += count if difference == 0.0 else 0
                if count > 0:
                    most = max(most, abs(difference) / exact_scale)
            if np.rint(written / exact_scale if exact_scale > 0.0 else 0.0) == k:
                recoverable += count
        energies[pair] = energy
        errors[pair] = error
    return nonzero, equal, recoverable, most


@compiled
def add_exactly(values: Any, low: Any, high: Any) -> None:
    """Add non-negative float64 values to exact sums by exponent: low and high int64 [2047], all zero before."""
    for place in range(_u64(values.size)):
        bits = np.float64(values[place]).view(np.uint64)
        exponent = bits >> _u64(52)
        mantissa = bits & _u64((1 << 52) - 1)
        if exponent > _u64(0):
            mantissa |= _u64(1 << 52)
        else:
            exponent = _u64(1)
        low[exponent] += np.int64(mantissa & _u64((1 << 26) - 1))
        high[exponent] += np.int64(mantissa >> _u64(26))
