"""Measuring quantized weights against their source: one way for every rule, element by element (cpp/measure.hpp).

Nothing is known of the rule: the error is that of the written values v * b * g against the exact source, q * s or the
BF16 value. Rows are added up in C++, and over rows with math.fsum, so the figures depend on no thread. The comparison
with `max` and with the bound costs more than the conversion, so it is made on a sample of the blocks.

A conversion of INT4 weights whose columns have no factors counts on the way what the figures follow from
(cpp/tally.hpp): the same counts, and the same sums but for their order.
Without them, `run` would need a fifth more CPU time.
"""

from __future__ import annotations

import math
import zlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.errors import FormatError
from k2convert.quantize.formats.int4 import Bf16Weight, Int4Weight, SourceWeight
from k2convert.quantize.formats.nvfp4 import MAX_BYTE, Nvfp4Weight, decode_e4m3, sampled_range
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.cpu import Converted, Sums, flat
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules.max import Magnitude, max_global_scale
from k2convert.quantize.rules.mse import MAX_IMPORTANCE, check_importance

MAX_SCALE_SPREAD: Final = 2.0**13


def measure_quantized(
    source: SourceWeight,
    result: Nvfp4Weight,
    *,
    name: str,
    magnitude: Magnitude,
    importance: NDArray[np.uint8] | None = None,
    converted: Converted | None = None,
) -> WeightMetrics:
    """Measure any NVFP4 weight [N, K] against its source; FormatError, naming it, if shape or scales do not fit.

    `magnitude` is that of all tensors that share the global scale. `importance` uint8 [K] adds the weighted sums.
    `converted` is what the conversion found. The name decides which blocks are sampled.
    """
    if result.shape != source.shape:
        raise FormatError(f"{name}: an NVFP4 weight {list(result.shape)} for a source {list(source.shape)}")
    if result.block_scales.size and result.block_scales.max() > MAX_BYTE:
        raise FormatError(f"{name}: an NVFP4 block scale is negative or NaN")
    if importance is not None:
        check_importance(importance, source.shape[1])
    outside, found = (None, None) if converted is None else (converted.outside_normal, converted.sums)
    if found is None:
        found = add_up(source, result.packed, result.block_scales, _E4M3 * result.global_scale, importance)
    is_int4 = isinstance(source, Int4Weight)
    histogram = np.zeros(256, dtype=np.int64)
    _cpu.count_bytes(flat(result.block_scales), histogram)
    used = {byte: int(count) for byte, count in enumerate(histogram) if count}
    sampled, achieved, plain, bound = _sample(source, result, magnitude, zlib.crc32(name.encode()))
    return WeightMetrics(
        num_weights=2 * result.packed.size,
        num_blocks=result.block_scales.size,
        energy=found.energy,
        squared_error=found.squared_error,
        num_nonzero=found.num_nonzero,
        equal_nonzero=found.equal_nonzero,
        equal_blocks=found.equal_blocks,
        num_codes=2 * result.packed.size if is_int4 else None,
        max_error_steps=found.max_error_steps if is_int4 else None,
        recoverable_codes=found.recoverable_codes if is_int4 else None,
        num_five_or_seven=found.num_five_or_seven if is_int4 else None,
        num_minus_eight=found.num_minus_eight if is_int4 else None,
        blocks_outside_normal=outside,
        scale_spread_exceeded=int(magnitude.scale_max / found.least_scale > MAX_SCALE_SPREAD) if is_int4 else None,
        min_scale_byte=min(used, default=None),
        max_scale_byte=max(used, default=None),
        scale_histogram=used,
        sampled_blocks=sampled,
        sampled_error_achieved=achieved,
        sampled_error_max=plain,
        sampled_error_bound=bound,
        weighted_energy=None if importance is None else found.weighted_energy / MAX_IMPORTANCE,
        weighted_error=None if importance is None else found.weighted_error / MAX_IMPORTANCE,
    )


_E4M3: Final = np.concatenate([decode_e4m3(np.arange(MAX_BYTE + 1, dtype=np.uint8)), np.zeros(255 - MAX_BYTE)])
"""The number of every byte, float64 [256]; zero for those that are no block scale."""


def add_up(
    source: SourceWeight,
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    block_values: NDArray[np.float64],
    importance: NDArray[np.uint8] | None,
) -> Sums:
    """Compare every weight with its written value; `block_values` is b * g for each of the 256 bytes of a scale."""
    rows, columns = source.shape
    sums_N4 = np.zeros((rows, 4))
    factors = None if importance is None else importance.astype(np.float64)
    written = flat(packed), flat(block_scales), block_values, columns
    if isinstance(source, Bf16Weight):
        counts = _cpu.measure_bf16(flat(source.bits), *written, factors, sums_N4.reshape(-1))
    else:
        exponents = source.channel_exponents
        powers = None if exponents is None else np.ldexp(1.0, -exponents.astype(np.int32))
        inverses = None if powers is None else 1 / powers
        codes = flat(source.packed), flat(source.scale_bits)
        counts = _cpu.measure_int4(*codes, *written, powers, inverses, factors, sums_N4.reshape(-1))
    energy, error, weighted_energy, weighted_error = map(_sum, sums_N4.T)
    return Sums(energy, error, weighted_energy, weighted_error, *counts)


def _sum(values: NDArray[np.float64]) -> float:
    # fsum refuses infinity minus infinity, which damaged scales can give.
    return math.fsum(values.tolist()) if np.isfinite(values).all() else math.nan


def _sample(
    source: SourceWeight, result: Nvfp4Weight, magnitude: Magnitude, seed: int
) -> tuple[int, float, float, float]:
    """Return how many blocks are sampled, and on them the error, that of `max` at its own scale, and the bound."""
    chosen = sampled_range(result.block_scales.size, sample_seed=seed)
    if not chosen:
        return 0, 0.0, 0.0, 0.0
    written = flat(result.packed), flat(result.block_scales), _E4M3 * result.global_scale
    sample = chosen.start, chosen.step, max_global_scale(magnitude)
    if isinstance(source, Bf16Weight):
        return len(chosen), *_cpu.sample_bf16(flat(source.bits), *written, *sample)
    codes = flat(source.packed), flat(source.scale_bits), source.channel_exponents
    return len(chosen), *_cpu.sample_int4(*codes, *written, *sample)
