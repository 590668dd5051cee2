"""The compiled kernels as functions over weights, one thread a call; byte for byte what rules/ defines.

A call releases the interpreter's lock, and its only state is its thread's buffers. So callers may use any number of
threads, with a tensor or a range of rows each. Results do not depend on the split.

INT4 weights whose columns have no factors take the fastest way. With an importance or exponents, rules with a power of
two as global scale look at 24 candidates of a block in 16-bit arithmetic with AVX2 and prove that no other wins
(cpp/channels_avx2.cpp). Without AVX2, and for the blocks that this leaves open, everything is exact in float64, by
groups of columns with equal exponents (cpp/channels.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.machine import BUFFERS
from k2convert.quantize.formats.int4 import Bf16Weight, SourceWeight, bf16_values, check_int4_scales
from k2convert.quantize.formats.mxfp4 import SCALE_BIAS, Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import E2M1_VALUES, Nvfp4Weight
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.search_tables import search_tables
from k2convert.quantize.rules import RULES, check_rule_scale
from k2convert.quantize.rules.cast import check_exponent, check_mxfp4_scales
from k2convert.quantize.rules.imatrix import importance_factors
from k2convert.quantize.rules.max import Magnitude, measure
from k2convert.quantize.rules.mse import check_importance, global_exponent

RULES_WITH_KERNEL: Final[frozenset[Rule]] = frozenset({"max", "mse", "imatrix", "gptq"})

LARGEST_BF16_SCALE: Final = 2.0**118
"""Above this global scale the steps exceed FP32, in which BF16 kernels divide. No weight leads to such a scale."""


def measure_magnitude(weight: SourceWeight, *, name: str) -> Magnitude:
    """Measure a weight as `rules.max.measure` does; FormatError, naming it, if a value is not usable."""
    if isinstance(weight, Mxfp4Weight):
        return _measure_mxfp4(weight, name=name)
    if isinstance(weight, Bf16Weight):
        return measure(weight, name=name)
    codes = flat(weight.packed), flat(weight.scale_bits)
    if weight.channel_exponents is not None:
        check_int4_scales(weight.scale_bits, name=name)
        scale_max, amax = _cpu.magnitude_of_columns(*codes, flat(weight.channel_exponents))
        return Magnitude(scale_max=scale_max, amax=amax)
    largest_bits, amax, usable = _cpu.measure(*codes)
    if not usable:
        check_int4_scales(weight.scale_bits, name=name)
    return Magnitude(scale_max=float(bf16_values(np.array(largest_bits, dtype=np.uint16))), amax=float(amax))


def _measure_mxfp4(weight: Mxfp4Weight, *, name: str) -> Magnitude:
    check_mxfp4_scales(weight.scale_bytes, name=name)
    tally = tally_mxfp4(weight)
    used = np.flatnonzero(tally[:, 0])
    amax = float(np.ldexp(np.array(E2M1_VALUES)[tally[used, 3]], used - SCALE_BIAS).max(initial=0.0))
    return Magnitude(amax, amax, largest_exponent=check_exponent(used[-1] if used.size else None, name=name))


def tally_mxfp4(weight: Mxfp4Weight) -> NDArray[np.int64]:
    """Return exact counts by scale byte, int64 [256, 4]: groups that are not empty, codes that are not zero, the sum of
    their (2v)**2, and the largest code. They are kept with the weight."""
    if weight.tally is None:
        tallies = np.zeros(4 * 256, dtype=np.int64)
        _cpu.tally_mxfp4(flat(weight.packed), flat(weight.scale_bytes), tallies)
        weight.tally = tallies.reshape(256, 4)
    return weight.tally


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums and counts of one weight, as in WeightMetrics, in the order of the kernels.

    `least_scale` is the least s * 2**-a of a weight that is not zero, infinite without one. The last five have no
    meaning for BF16 weights. Weighted sums are not yet divided by 255.
    """

    energy: float
    squared_error: float
    weighted_energy: float
    weighted_error: float
    num_nonzero: int
    equal_nonzero: int
    equal_blocks: int
    recoverable_codes: int
    num_five_or_seven: int
    num_minus_eight: int
    max_error_steps: float
    least_scale: float


@dataclass(frozen=True, slots=True)
class Converted:
    """A quantized weight, and what its conversion found on the way: None if it did not look.

    `outside_normal` counts the blocks that a scale outside the normal range would serve strictly better.
    """

    weight: Nvfp4Weight
    outside_normal: int | None = None
    sums: Sums | None = None


def convert(
    weight: SourceWeight, *, rule: Rule, global_scale: float, importance: NDArray[np.uint8] | None = None
) -> Converted:
    """Quantize a weight by a rule of RULES_WITH_KERNEL, with the importance uint8 [K] of its columns if any."""
    check_rule_scale(rule, global_scale)
    if importance is not None:
        check_importance(importance, weight.shape[1])
    if isinstance(weight, Mxfp4Weight) and not _is_max(rule):
        return Converted(RULES[rule].quantize(weight, global_scale, None))  # a table of 256 bytes is as fast
    if isinstance(weight, Bf16Weight):
        return Converted(_convert_bf16(weight, rule, global_scale, importance))
    result = allocate_nvfp4(*weight.shape, global_scale=global_scale)
    is_max = _is_max(rule)
    arrays = flat(weight.packed), flat(weight.scale_bits)
    targets = flat(result.packed), flat(result.block_scales)
    exponent = 0 if is_max else global_exponent(global_scale)
    if weight.packed.size and (weight.channel_exponents is not None or importance is not None):
        exponents = None if weight.channel_exponents is None else flat(weight.channel_exponents)
        weights = None if importance is None else flat(importance)
        outside = _cpu.convert_columns(
            *arrays, exponents, weights, is_max, exponent, global_scale, search_tables(), *targets
        )
        return Converted(result, None if is_max else outside)
    if is_max:
        energy, error, counts, _ = _cpu.convert_max(*arrays, global_scale, *targets)
        return Converted(result, None, Sums(energy, error, 0.0, 0.0, *counts))
    energy, error, counts, outside = _cpu.convert_mse(*arrays, exponent, search_tables(), *targets)
    return Converted(result, outside, Sums(energy, error, 0.0, 0.0, *counts))


def _convert_bf16(
    weight: Bf16Weight, rule: Rule, global_scale: float, importance: NDArray[np.uint8] | None
) -> Nvfp4Weight:
    result = allocate_nvfp4(*weight.shape, global_scale=global_scale)
    is_max = _is_max(rule)
    targets = flat(result.packed), flat(result.block_scales)
    if not is_max and global_scale > LARGEST_BF16_SCALE:
        return RULES[rule].quantize(weight, global_scale, importance)
    if is_max:
        _cpu.quantize_max_bf16(flat(weight.bits), global_scale, *targets)
    elif RULES[rule].uses_importance and importance is not None and weight.bits.size:
        _cpu.quantize_imatrix_bf16(flat(weight.bits), global_scale, importance_factors(importance), *targets)
    else:
        _cpu.quantize_mse_bf16(flat(weight.bits), global_scale, *targets)
    return result


def _is_max(rule: Rule) -> bool:
    return not RULES[rule].has_power_of_two_scale


def allocate_nvfp4(rows: int, columns: int, *, global_scale: float) -> Nvfp4Weight:
    """Return an NVFP4 weight [rows, columns] with arbitrary bytes; large ones come from the buffer pool."""
    sizes = columns // 2, columns // BLOCK_SIZE
    packed, scales = (BUFFERS.empty(rows * size).reshape(rows, size) for size in sizes)
    return Nvfp4Weight(packed, scales, global_scale)


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as a flat one, over the same memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1)
