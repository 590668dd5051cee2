"""The compiled kernels as functions over weights, one thread a call; byte for byte what rules/ defines.

A call releases the interpreter's lock, and its only state is its thread's buffers. So callers may use any number of
threads, with a tensor or a range of rows each. Results do not depend on the split.

INT4 weights whose columns smoothing divided are converted as the BF16 weights that they round to. Rule `gptq`, the only
one with smoothing, has codes of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, FP8_BLOCK, Rule
from k2convert.machine import BUFFERS
from k2convert.quantize.formats.bf16 import Magnitude, SourceWeight, bf16_values
from k2convert.quantize.formats.fp8 import Fp8Weight
from k2convert.quantize.formats.int4 import MAX_MAGNITUDE, NUM_MAGNITUDES, Int4Weight, check_int4_scales
from k2convert.quantize.formats.mxfp4 import SCALE_BIAS, Mxfp4Weight, check_exponent, check_mxfp4_scales
from k2convert.quantize.formats.nvfp4 import (
    DOUBLED_VALUES,
    E2M1_VALUES,
    MAX_BYTE,
    MAX_EXPONENT,
    MIN_EXPONENT,
    SIGN_BIT,
    Nvfp4Weight,
    nearest_code,
)
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels._cpu import SearchTables
from k2convert.quantize.rules import RULES, check_rule_scale
from k2convert.quantize.rules.max import quantize_max
from k2convert.quantize.rules.mse import global_exponent, quantize_mse

LARGEST_BF16_SCALE: Final = 2.0**118
"""Above this global scale the steps exceed FP32, in which BF16 kernels divide. No weight leads to such a scale."""


def measure_magnitude(weight: SourceWeight, *, name: str) -> Magnitude:
    """Measure a weight as its `magnitude` does; FormatError, naming it, if a value is not usable."""
    return _MEASURES.get(type(weight), type(weight).magnitude)(weight, name=name)


def _measure_int4(weight: Int4Weight, *, name: str) -> Magnitude:
    if weight.channel_exponents is not None:
        return weight.magnitude(name=name)
    largest_bits, amax, usable = _cpu.measure(flat(weight.packed), flat(weight.scale_bits))
    if not usable:
        check_int4_scales(weight.scale_bits, name=name)
    scale_max = float(bf16_values(np.array(largest_bits, dtype=np.uint16)))
    return Magnitude(scale_max=scale_max, amax=float(amax), is_int4=True)


def _measure_mxfp4(weight: Mxfp4Weight, *, name: str) -> Magnitude:
    check_mxfp4_scales(weight.scale_bytes, name=name)
    counts = mxfp4_counts(weight)
    used = np.flatnonzero(counts[:, 0])
    amax = float(np.ldexp(np.array(E2M1_VALUES)[counts[used, 3]], used - SCALE_BIAS).max(initial=0.0))
    exponent = check_exponent(used[-1] if used.size else None, name=name)
    return Magnitude(scale_max=amax, amax=amax, is_int4=False, largest_exponent=exponent)


_MEASURES: Final[dict[type, Callable[..., Magnitude]]] = {Int4Weight: _measure_int4, Mxfp4Weight: _measure_mxfp4}
"""The formats that kernels measure."""


def mxfp4_counts(weight: Mxfp4Weight) -> NDArray[np.int64]:
    """Return exact counts by scale byte, int64 [256, 4]: groups that are not empty, codes that are not zero, the sum of
    their (2v)**2, and the largest code. They are kept with the weight."""
    if weight.counts is None:
        counts = np.zeros(4 * 256, dtype=np.int64)
        _cpu.count_mxfp4(flat(weight.packed), flat(weight.scale_bytes), counts)
        weight.counts = counts.reshape(256, 4)
    return weight.counts


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums and counts of one weight, as in WeightMetrics, in the order of the kernels.

    `least_scale` is the least s * 2**-a of a weight that is not zero, infinite without one. The last five are
    of INT4 weights only.
    """

    energy: float
    squared_error: float
    num_nonzero: int
    equal_nonzero: int
    equal_blocks: int
    recoverable_codes: int | None = None
    num_five_or_seven: int | None = None
    num_minus_eight: int | None = None
    max_error_steps: float | None = None
    least_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    """A quantized weight, and what its conversion found on the way: None if it did not look.

    `outside_normal` counts the blocks that a scale outside the normal range would serve strictly better.
    """

    weight: Nvfp4Weight
    outside_normal: int | None = None
    sums: Sums | None = None


def convert(weight: SourceWeight, *, rule: Rule, global_scale: float) -> Converted:
    """Quantize a weight by a rule; FormatError if the rule cannot use the global scale."""
    check_rule_scale(rule, global_scale)
    quantize = RULES[rule].quantize
    is_max = quantize is quantize_max
    if not is_max and quantize is not quantize_mse:
        return Converted(quantize(weight, global_scale))  # a rule without kernels
    if isinstance(weight, Int4Weight) and weight.channel_exponents is None:
        return _convert_int4(weight, is_max, global_scale)
    if not is_max and (isinstance(weight, Mxfp4Weight) or global_scale > LARGEST_BF16_SCALE):
        return Converted(quantize(weight, global_scale))  # a cast by a table of 256 bytes is as fast
    return Converted(_convert_bf16(weight, is_max, global_scale))


def _convert_int4(weight: Int4Weight, is_max: bool, global_scale: float) -> Converted:
    result = allocate_nvfp4(*weight.shape, global_scale=global_scale)
    arrays = flat(weight.packed), flat(weight.scale_bits)
    targets = flat(result.packed), flat(result.block_scales)
    if is_max:
        energy, error, counts, _ = _cpu.convert_max(*arrays, global_scale, *targets)
        return Converted(result, None, Sums(energy, error, *counts))
    energy, error, counts, outside = _cpu.convert_mse(*arrays, global_exponent(global_scale), search_tables(), *targets)
    return Converted(result, outside, Sums(energy, error, *counts))


def _convert_bf16(weight: SourceWeight, is_max: bool, global_scale: float) -> Nvfp4Weight:
    result = allocate_nvfp4(*weight.shape, global_scale=global_scale)
    quantize = _cpu.quantize_max_bf16 if is_max else _cpu.quantize_mse_bf16
    quantize(flat(weight.bits), global_scale, flat(result.packed), flat(result.block_scales))
    return result


def allocate_nvfp4(rows: int, columns: int, *, global_scale: float) -> Nvfp4Weight:
    """Return an NVFP4 weight [rows, columns] with arbitrary bytes; large ones come from the buffer pool."""
    sizes = columns // 2, columns // BLOCK_SIZE
    packed, scales = (BUFFERS.empty(rows * size).reshape(rows, size) for size in sizes)
    return Nvfp4Weight(packed, scales, global_scale)


def encode_fp8(bits: NDArray[np.uint16], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return what formats.fp8.encode_fp8 does."""
    codes = np.empty(bits.shape, dtype=np.uint8)
    if codes.size:
        _cpu.encode_fp8(flat(bits), *_fp8_scales(scales, *bits.shape), flat(codes))
    return codes


Fp8Sums = tuple[NDArray[np.float64], NDArray[np.float64], int, int]
"""w**2 and the squared error of an FP8 weight added up by row, float64 [N], and the counts of a Sums."""


def fp8_sums(bits: NDArray[np.uint16], weight: Fp8Weight) -> Fp8Sums:
    """Compare an FP8 weight [N, K] with its BF16 bits uint16 [N, K]."""
    energies, errors = np.zeros(len(bits)), np.zeros(len(bits))
    if not bits.size:
        return energies, errors, 0, 0
    scales = _fp8_scales(weight.scales, *bits.shape)
    return energies, errors, *_cpu.measure_fp8(flat(bits), flat(weight.codes), *scales, energies, errors)


def _fp8_scales(scales: NDArray[np.float32], rows: int, columns: int) -> tuple[NDArray[np.float32], int, int]:
    """Return a scale for each group of columns of each row, the columns of a row, and those of a group."""
    if scales.shape == (rows, 1):
        return flat(scales), columns, columns
    return flat(np.repeat(scales, FP8_BLOCK, axis=0)[:rows]), columns, FP8_BLOCK


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as a flat one, over the same memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1)


# ---- The tables of the search of `mse`: what a kernel needs to find a block's best scale in one look ----------------
#
# Write a source scale as s = ms * 2**es with ms in 128..255, a block scale as b = mb * 2**eb with mb in 8..15, and
# g = 2**kg. The FP4 step measured in INT4 steps is then
#
#     t = b * g / s = mb * 2**j / ms        j = eb + (kg - es)
#
# and the error of |q| = k, in units of (s / 2ms)**2, is an integer: the least (2k * ms - 2v * mb * 2**j)**2 over v.
#
# Ten shifts j = 0..9 are enough, for any g and s:
#
#   * j >= 10: t >= 8 * 1024 / 255 > 32, so even k = 8 is below t/4 and every code is zero. All such scales have the
#     same error, and any scale with a non-zero code has strictly less. They are one candidate, first in rank.
#   * j < 0: t <= 15/2 / 128 < 1/12, so every k >= 1 saturates at 6t <= 1/2 and the error falls as t grows: any larger
#     scale with t <= 1/6 is strictly better. If even the largest scale, 448, has j < 0, it is therefore the best, with
#     every non-zero code saturated. That is one candidate, last in rank.
#
# Candidates are ranked from the larger scale to the smaller, because ties go to the larger. That makes 82. Which of
# them can win depends on which magnitudes occur in the block: t = 4 is never best for a block with 1, 2, 3, 5 and 7
# in it. So the 255 sets of magnitudes fall into `NUM_WINDOWS` windows of 16 neighboring candidates that hold every
# winner, for every mantissa of s. 31 rare sets, with few and even magnitudes, need two windows. Nothing is lost:
# tests/quantize/kernels/test_windows.py compares all 735,470 histograms under all 128 mantissas with the full search.
#
# A position p counts candidates upwards (larger scale, larger t): position 6 is the first with t >= 1. Errors are
# integers in units of (s / ms)**2, capped at 2**16 - 1; minus 2**15 they are 16-bit numbers. A sum without a capped
# error is exact, and the others are at most too small. So the candidate with the least sum is the winner if its sum
# has no capped error. Otherwise, which is rare, the kernel searches again among all candidates.

MIN_MANTISSA: Final = 128
NUM_MANTISSAS: Final = 128
NUM_SHIFTS: Final = 10

LOWEST_OFFSET: Final = -MAX_EXPONENT - 1
HIGHEST_OFFSET: Final = NUM_SHIFTS - MIN_EXPONENT
"""kg - es is clamped to this range. Outside it only one candidate exists, the saturated or the zero one."""

_ALL_ZERO_STEP: Final = 2.0**60
_SATURATED_STEP: Final = 2.0**-60
"""Steps that give the two candidates that are not on the grid their codes."""

ZERO_CANDIDATE: Final = 0
"""A scale so large that every code is zero (j >= 10); the largest of them is 448."""
FIRST_CANDIDATE: Final = 1
SATURATED_CANDIDATE: Final = FIRST_CANDIDATE + 8 * NUM_SHIFTS
"""448, if even that is far too small (j < 0): every non-zero code saturates."""

LANES: Final = 16
WINDOW_STARTS: Final = (0, 7, 11, 13, 15, 16, 19, 21, 23)
NUM_WINDOWS: Final = len(WINDOW_STARTS)
NUM_POSITIONS: Final = WINDOW_STARTS[-1] + LANES
WINDOW_OF_SET: Final = (
    "001030004010100061102910491019107010300011101000a110211011101110"
    "81919111419191112190211021901110a1919111319191112190211021901110"
    "8110210041101100411021004110110021102100111011002110211011101100"
    "a1919111419191114190211041901110a1919111319091102190211021901110"
)
"""The window of each set of magnitudes, one hexadecimal digit; bit k - 1 of the index says that |q| = k occurs. 9 and a
mean two adjoining windows: the first and the sixth (positions 0 to 31), the second and the last (7 to 38). Each is the
first window, else the first pair, that holds the best positions of all histograms of the set under every ms."""

ERROR_CAP: Final = (1 << 16) - 1
ERROR_SHIFT: Final = 1 << 15
LARGEST_KEY: Final = 255
"""A key is error << 8 | LARGEST_KEY - position: the least key has the least error, and on ties the larger scale."""
LOWEST_STEP: Final = 6
"""Positions below the first candidate with t >= 1."""
SHIFT_OF_ONE: Final = 4
"""mb * 2**4 reaches every ms: the first candidate with t >= 1 has this shift, or mb = 8 and one more."""


@lru_cache(maxsize=1)
def search_tables() -> SearchTables:
    """Build the tables for the CPU kernels, exactly; cpp/groups.hpp describes each one.

    C = 82 candidates by rank, S = 128 source mantissas, P positions.
    """
    mantissas_S = np.arange(MIN_MANTISSA, MIN_MANTISSA + NUM_MANTISSAS)
    by_mantissa = [_codes_and_errors(mantissa) for mantissa in mantissas_S.tolist()]
    codes_SCk = np.stack([codes for codes, _ in by_mantissa]).swapaxes(1, 2)
    errors_SkC = np.stack([errors for _, errors in by_mantissa])  # in units of (s / 2ms)**2: integers below 2**25
    # Bits 4u .. 4u + 3 are the output nibble of the source nibble u = q + 8.
    maps_SC = np.zeros(codes_SCk.shape[:2], dtype=np.int64)
    for nibble in range(16):
        code = codes_SCk[..., abs(nibble - MAX_MAGNITUDE)].astype(np.int64)
        if nibble < MAX_MAGNITUDE:
            code = np.where(code > 0, code | SIGN_BIT, code)
        maps_SC |= code << (4 * nibble)
    maps, map_ids = np.unique(maps_SC, return_inverse=True)
    nibbles = (maps.view(np.uint64)[:, None] >> (4 * np.arange(16, dtype=np.uint64))) & np.uint64(15)
    # Bit k - 1 is set where the error of |q| = k is above the cap.
    bits_k1 = (1 << np.arange(8, dtype=np.uint16))[:, None]
    capped_SC = ((errors_SkC[:, 1:, :] / 4 > ERROR_CAP) * bits_k1).sum(axis=1).astype(np.uint16)
    # The rank of position 0 for each ms; position p has this rank less p.
    lowest_S = SATURATED_CANDIDATE - 1 - (8 * SHIFT_OF_ONE + (mantissas_S + 15) // 16 - 8 - LOWEST_STEP)
    ranks_SP = lowest_S[:, None] - np.arange(NUM_POSITIONS)
    assert ranks_SP.min() >= FIRST_CANDIDATE > ZERO_CANDIDATE
    by_position = np.take_along_axis(errors_SkC[:, 1:, :], ranks_SP[:, None, :], axis=2)
    # Every candidate here has a shift of at least one, so errors in units of (s / 2ms)**2 are multiples of four.
    shifted = (np.minimum(by_position / 4, ERROR_CAP) - ERROR_SHIFT).astype(np.int16)
    windows = np.stack([shifted[:, :, start : start + LANES] for start in WINDOW_STARTS], axis=1)
    pairs = windows.reshape(NUM_MANTISSAS, NUM_WINDOWS, -1, 2, LANES).swapaxes(-1, -2)
    positions = np.array(WINDOW_STARTS)[:, None] + np.arange(LANES)
    return SearchTables(
        windows=np.array([int(digit, 16) for digit in WINDOW_OF_SET], dtype=np.uint8),
        errors=np.ascontiguousarray(pairs).reshape(-1),
        keys=(LARGEST_KEY - positions).astype(np.int32).reshape(-1),
        choices=(map_ids.reshape(-1) | capped_SC.reshape(-1) << 8).astype(np.uint16),
        maps=nibbles.astype(np.uint8).reshape(-1),
        full_errors=errors_SkC.reshape(-1),
        scale_bytes=_scale_candidates()[1].reshape(-1),
    )


@lru_cache(maxsize=1)
def _scale_candidates() -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Return the steps mb * 2**j float64 [C], from large to small, and their E4M3 bytes uint8 [O, C].

    C = 82 candidates by rank, O = 26 offsets kg - es. A byte is 0 if the candidate does not exist at this offset. The
    first and the last candidate are not on the grid: every code is zero, or saturates if it is not zero.
    """
    grid = [(j, mantissa) for j in reversed(range(NUM_SHIFTS)) for mantissa in reversed(range(8, 16))]
    steps = np.array([_ALL_ZERO_STEP, *(float(mantissa << j) for j, mantissa in grid), _SATURATED_STEP])
    rows: list[list[int]] = []
    for offset in range(LOWEST_OFFSET, HIGHEST_OFFSET + 1):
        exponents = [(j - offset, mantissa) for j, mantissa in grid]
        scale_bytes = [
            e + 10 << 3 | mantissa - 8 if MIN_EXPONENT <= e <= MAX_EXPONENT else 0 for e, mantissa in exponents
        ]
        largest = offset + MAX_EXPONENT
        ends = [MAX_BYTE if is_there else 0 for is_there in (largest >= NUM_SHIFTS, largest < 0)]
        rows.append([ends[0], *(byte if byte <= MAX_BYTE else 0 for byte in scale_bytes), ends[1]])
    return steps, np.array(rows, dtype=np.uint8)


def _codes_and_errors(mantissa: int) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Return the code and the error of each |q| under each candidate, uint8 and float64 [9, 82], for one ms."""
    wanted_k1 = np.arange(NUM_MAGNITUDES)[:, None] * float(mantissa)
    steps_C = _scale_candidates()[0]
    codes_kC = nearest_code(wanted_k1, steps_C)
    # The two candidates off the grid count as zero codes.
    reached_kC = np.array(DOUBLED_VALUES)[codes_kC] * steps_C
    reached_kC[:, [0, -1]] = 0
    return codes_kC, (2 * wanted_k1 - reached_kC) ** 2
