"""BF16 -> NVFP4 on the CPU under both rules, and what it cost: the element-by-element code of `formats`, compiled.

Quotients may be FP32 where `formats` has float64: a BF16 weight over a step of four significant bits is never closer to
a midpoint than 2**-13 of it unless it is one, so rounding to E2M1 comes out the same. Errors are float64, with terms
and sums in the order `formats` gives them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from k2convert.formats.e4m3 import MAX_BYTE, MIN_NORMAL_BYTE, ONE_BYTE
from k2convert.formats.optimal_bf16 import NUM_WINDOW_SCALES
from k2convert.kernels.cpu_plain import bf16_value, e2m1_value, e4m3_value, nearest_e2m1, plain_scale_byte
from k2convert.kernels.simd import compiled

_u64 = np.uint64
_f32 = np.float32

BLOCK: Final = 16
NUM_SCALES: Final = MAX_BYTE - MIN_NORMAL_BYTE + 1
PADDED_WINDOW: Final = 28
"""The window of scales, a multiple of the lanes of a float64 vector."""
SCRATCH: Final = NUM_SCALES + PADDED_WINDOW
INFINITY: Final = np.inf


@compiled
def _add_errors(weights: Any, steps: Any, first: Any, count: Any, errors: Any) -> None:
    """Write the error of the block's 16 magnitudes (float32) under steps[first : first + count] (float64)."""
    for place in range(count):
        errors[place] = 0.0
    for element in range(_u64(BLOCK)):
        weight = weights[element]
        for place in range(count):
            step = steps[first + place]
            ratio = weight / _f32(step)
            # Half to even in units of 1/2, 1 or 2 is rounding to E2M1.
            scaled = ratio * (_f32(2.0) if ratio < _f32(2.0) else (_f32(1.0) if ratio < _f32(4.0) else _f32(0.5)))
            unit = _f32(0.5) if ratio < _f32(2.0) else (_f32(1.0) if ratio < _f32(4.0) else _f32(2.0))
            value = np.rint(scaled) * unit
            value = value if value < _f32(6.0) else _f32(6.0)
            difference = np.float64(weight) - np.float64(value) * step
            errors[place] += difference * difference


@compiled
def _last_least(errors: Any, count: int) -> Any:
    best = 0
    for place in range(1, count):
        if errors[place] <= errors[best]:
            best = place
    return best


@compiled
def _best_scale(weights: Any, amax: Any, steps: Any, errors: Any) -> Any:
    """Return the index of the best of the normal scales, as formats.optimal_bf16 finds it; amax is not zero."""
    low, high = 0, NUM_SCALES
    while low < high:
        middle = (low + high) >> 1
        if steps[middle] < amax / 14.0:
            low = middle + 1
        else:
            high = middle
    first = min(low, NUM_SCALES - 1)
    # Beyond the last scale the steps are infinite: their error is infinite or NaN, and never the least.
    count = min(NUM_WINDOW_SCALES, NUM_SCALES - first)
    _add_errors(weights, steps, _u64(first), _u64(PADDED_WINDOW), errors)
    best = first + _last_least(errors, count)
    in_last_octave = 2.0 * amax < 7.0 * steps[best]
    largest = steps[NUM_SCALES - 1]
    if in_last_octave or amax > 4.0 * largest or amax < 4.0 * steps[0]:
        _add_errors(weights, steps, _u64(0), _u64(NUM_SCALES), errors)
        best = _last_least(errors, NUM_SCALES)
    return best


@compiled
def _load_magnitudes(source: Any, start: Any, weights: Any) -> Any:
    """Write |w| of a block as float32; return the largest."""
    largest = np.uint32(0)
    for element in range(BLOCK):
        bits = np.uint32(source[start + _u64(element)]) & np.uint32(0x7FFF)
        largest = max(largest, bits)
        weights[element] = np.uint32(bits << np.uint32(16)).view(np.float32)
    return np.float64(np.uint32(largest << np.uint32(16)).view(np.float32))


@compiled
def optimal_blocks(source: Any, steps: Any, out: Any, scale_bytes: Any, weights: Any, errors: Any) -> None:
    """Quantise blocks under `optimal`: source uint16 [M * 16], out uint8 [M * 8], scale_bytes uint8 [M].

    steps float64 [119 + 28]: b * g of every normal scale, then infinity; weights float32 [16], errors float64 [147].
    """
    for block in range(_u64(scale_bytes.size)):
        start = block * _u64(BLOCK)
        amax = _load_magnitudes(source, start, weights)
        byte, step = ONE_BYTE, 1.0
        if amax > 0.0:
            best = _best_scale(weights, amax, steps, errors)
            byte, step = MIN_NORMAL_BYTE + best, steps[best]
        scale_bytes[block] = byte
        for pair in range(8):
            packed = 0
            for half in range(2):
                quadrupled = 4.0 * np.float64(weights[2 * pair + half])
                code = np.int64(quadrupled > step) + np.int64(quadrupled >= 3.0 * step)
                code += np.int64(quadrupled > 5.0 * step) + np.int64(quadrupled >= 7.0 * step)
                code += np.int64(quadrupled > 10.0 * step) + np.int64(quadrupled >= 14.0 * step)
                code += np.int64(quadrupled > 20.0 * step)
                negative = source[start + _u64(2 * pair + half)] >> 15
                packed |= (code | (8 if code > 0 and negative else 0)) << (4 * half)
            out[block * _u64(8) + _u64(pair)] = packed


@compiled
def plain_blocks(source: Any, global_scale: Any, out: Any, scale_bytes: Any, weights: Any) -> None:
    """Quantise blocks under `plain`; global_scale float32, weights float32 [16], the rest as in `optimal_blocks`."""
    for block in range(_u64(scale_bytes.size)):
        start = block * _u64(BLOCK)
        amax = _load_magnitudes(source, start, weights)
        byte = plain_scale_byte(_f32(amax), global_scale)
        step = e4m3_value(byte) * global_scale
        scale_bytes[block] = byte
        for pair in range(8):
            packed = 0
            for half in range(2):
                scaled = weights[2 * pair + half] / step
                code = nearest_e2m1(scaled)
                negative = source[start + _u64(2 * pair + half)] >> 15
                packed |= (code | (8 if scaled > _f32(0.0) and negative else 0)) << (4 * half)
            out[block * _u64(8) + _u64(pair)] = packed


@compiled
def measure_rows(
    source: Any, packed: Any, scale_bytes: Any, global_scale: float, energies: Any, errors: Any, totals: Any
) -> None:
    """Write sum w**2 and sum (w - w')**2 of each row, float64 [N]; all arrays are flat.

    Adds the non-zero weights, those unchanged and the blocks unchanged to totals, int64 [3].
    """
    blocks_per_row = _u64(scale_bytes.size // energies.size)
    for row in range(_u64(energies.size)):
        row_energy, row_error = 0.0, 0.0
        for block in range(row * blocks_per_row, (row + _u64(1)) * blocks_per_row):
            step = np.float64(e4m3_value(np.int64(scale_bytes[block]))) * global_scale
            energy, error, equal = 0.0, 0.0, 0
            for element in range(BLOCK):
                nibble = (packed[block * _u64(8) + _u64(element >> 1)] >> (4 * (element & 1))) & 15
                weight = np.float64(bf16_value(np.int64(source[block * _u64(BLOCK) + _u64(element)])))
                value = e2m1_value(np.int64(nibble & 7)) * step
                difference = weight - (-value if nibble & 8 else value)
                energy += weight * weight
                error += difference * difference
                equal += difference == 0.0
                if weight != 0.0:
                    totals[0] += 1
                    totals[1] += difference == 0.0
            totals[2] += equal == BLOCK
            row_energy += energy
            row_error += error
        energies[row] = row_energy
        errors[row] = row_error


@compiled
def block_errors(source: Any, nibbles: Any, scale_bytes: Any, global_scale: float, errors: Any) -> None:
    """Write the squared error of blocks, float64 [M]; source uint16 [M * 16], nibbles in bytes uint8 [M * 8]."""
    for block in range(_u64(errors.size)):
        step = np.float64(e4m3_value(np.int64(scale_bytes[block]))) * global_scale
        error = 0.0
        for element in range(BLOCK):
            nibble = (nibbles[block * _u64(8) + _u64(element >> 1)] >> (4 * (element & 1))) & 15
            weight = np.float64(bf16_value(np.int64(source[block * _u64(BLOCK) + _u64(element)])))
            value = e2m1_value(np.int64(nibble & 7)) * step
            difference = weight - (-value if nibble & 8 else value)
            error += difference * difference
        errors[block] = error


@compiled
def block_bounds(source: Any, weights: Any, breakpoints: Any, bounds: Any) -> None:
    """Write the bound of blocks, float64 [M] (see formats.weight_error_bf16); scratch breakpoints float64 [112]."""
    for block in range(_u64(bounds.size)):
        _load_magnitudes(source, block * _u64(BLOCK), weights)
        size = 0
        for midpoint in (1.0, 3.0, 5.0, 7.0, 10.0, 14.0, 20.0):
            for element in range(BLOCK):
                value = np.float64(weights[element]) / (midpoint / 4.0)
                place = size
                while place > 0 and breakpoints[place - 1] > value:
                    breakpoints[place] = breakpoints[place - 1]
                    place -= 1
                breakpoints[place] = value
                size += 1
        energy = 0.0
        for element in range(BLOCK):
            energy += np.float64(weights[element]) * np.float64(weights[element])
        explained = 0.0
        for number in range(size):
            step = breakpoints[0] / 2.0 if number == 0 else (breakpoints[number] + breakpoints[number - 1]) / 2.0
            explained = max(explained, _explained(weights, step if step > 0.0 else 1.0))
        bounds[block] = max(energy - explained, 0.0)


@compiled
def _explained(weights: Any, step: float) -> Any:
    """Return (sum w v)**2 / sum v**2 for the codes that this step gives, with v doubled."""
    inner, norm = 0.0, 0.0
    for element in range(BLOCK):
        quadrupled = 4.0 * np.float64(weights[element])
        # The doubled values 0, 1, 2, 3, 4, 6, 8, 12 as a sum over the midpoints passed.
        value = np.float64(quadrupled > step) + np.float64(quadrupled >= 3.0 * step)
        value += np.float64(quadrupled > 5.0 * step) + np.float64(quadrupled >= 7.0 * step)
        value += 2.0 * (np.float64(quadrupled > 10.0 * step) + np.float64(quadrupled >= 14.0 * step))
        value += 4.0 * np.float64(quadrupled > 20.0 * step)
        inner += np.float64(weights[element]) * value
        norm += value * value
    return inner * inner / max(norm, 1.0)
