"""The BF16 kernels of the CPU as functions over arrays; see `kernels.cpu` for threads."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.quantize.formats.arrays import Bf16Array, Nvfp4Arrays, as_arrays
from k2convert.quantize.formats.blocks import sampled_range
from k2convert.quantize.formats.nvfp4 import check_global_scale
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.cpu import allocate_nvfp4, flat
from k2convert.quantize.metrics.bf16_error import finish_bf16_metrics
from k2convert.quantize.metrics.sampled_error import SampledError
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.optimal import global_exponent
from k2convert.quantize.rules.optimal_bf16 import quantize_optimal_bf16
from k2convert.quantize.rules.plain import plain_global_scale

LARGEST_SCALE: Final = 2.0**118
"""With a global scale above this, steps exceed FP32; no weight leads to one."""


def quantize_bf16(weight: Bf16Array, *, rule: Rule, global_scale: float) -> Nvfp4Arrays:
    """Quantise a BF16 weight; byte for byte what `formats` makes of it."""
    check_global_scale(global_scale)
    if rule == "optimal":
        global_exponent(global_scale)
        if global_scale > LARGEST_SCALE:
            return as_arrays(quantize_optimal_bf16(weight.to_torch(), global_scale))
    result = allocate_nvfp4(*weight.shape, global_scale=global_scale)
    packed, scale_bytes = result.packed.reshape(-1), result.block_scales.reshape(-1)
    _quantize(flat(weight.bits), packed, scale_bytes, rule=rule, global_scale=global_scale)
    return result


def measure_bf16_error(
    source: Bf16Array, result: Nvfp4Arrays, *, rule: Rule, magnitude: Magnitude, sample_seed: int
) -> WeightMetrics:
    """Measure `result` against its source as `formats.weight_error_bf16` does."""
    rows, _ = result.shape
    bits, packed, scale_bytes = flat(source.bits), flat(result.packed), flat(result.block_scales)
    energies, errors = np.zeros(rows), np.zeros(rows)
    num_nonzero, equal_nonzero, equal_blocks = _cpu.measure_rows_bf16(
        bits, packed, scale_bytes, result.global_scale, energies, errors
    )
    return finish_bf16_metrics(
        energies=energies.tolist(),
        errors=errors.tolist(),
        num_nonzero=num_nonzero,
        equal_nonzero=equal_nonzero,
        equal_blocks=equal_blocks,
        scale_bytes=scale_bytes,
        sampled=_sample_error(bits, packed, scale_bytes, result.global_scale, rule, magnitude, sample_seed),
    )


def _sample_error(
    source: NDArray[Any],
    packed: NDArray[Any],
    scale_bytes: NDArray[Any],
    global_scale: float,
    rule: Rule,
    magnitude: Magnitude,
    sample_seed: int,
) -> SampledError:
    sample = sampled_range(scale_bytes.size, sample_seed=sample_seed)
    chosen = np.arange(sample.start, sample.stop, sample.step)
    blocks = source.reshape(-1, BLOCK_SIZE)[chosen].reshape(-1)
    codes = packed.reshape(-1, BLOCK_SIZE // 2)[chosen].reshape(-1)
    achieved = _squared_error(blocks, codes, scale_bytes[chosen], global_scale)
    plain_scale = plain_global_scale(magnitude)
    plain = achieved
    if rule != "plain" or plain_scale != global_scale:
        plain_codes, plain_bytes = np.empty_like(codes), np.empty(chosen.size, dtype=np.uint8)
        _quantize(blocks, plain_codes, plain_bytes, rule="plain", global_scale=plain_scale)
        plain = _squared_error(blocks, plain_codes, plain_bytes, plain_scale)
    bounds = np.empty(chosen.size)
    _cpu.block_bounds_bf16(blocks, bounds)
    return SampledError(num_blocks=chosen.size, achieved=achieved, plain=plain, bound=math.fsum(bounds.tolist()))


def _quantize(
    source: NDArray[Any], packed: NDArray[Any], scale_bytes: NDArray[Any], *, rule: Rule, global_scale: float
) -> None:
    quantize = _cpu.quantize_plain_bf16 if rule == "plain" else _cpu.quantize_optimal_bf16
    quantize(source, global_scale, packed, scale_bytes)


def _squared_error(source: NDArray[Any], packed: NDArray[Any], scale_bytes: NDArray[Any], global_scale: float) -> float:
    errors = np.empty(scale_bytes.size)
    _cpu.block_errors_bf16(source, packed, scale_bytes, global_scale, errors)
    return math.fsum(errors.tolist())
