"""The BF16 kernels of the CPU as functions over arrays; `kernels.cpu` says what holds for threads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.blocks import sampled_blocks
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.cpu import KERNELS, allocate_nvfp4, flat
from k2convert.quantize.metrics.bf16_error import finish_bf16_metrics
from k2convert.quantize.metrics.sampled_error import SampledError
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules import RULES, check_rule_scale
from k2convert.quantize.rules.column_search import check_importance
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.plain import plain_global_scale
from k2convert.quantize.rules.weighted_bf16 import importance_factors


def quantize_bf16(
    weight: Bf16Weight, *, rule: Rule, global_scale: float, importance: NDArray[np.uint8] | None = None
) -> Nvfp4Weight:
    """Quantize a BF16 weight by a rule of `cpu.KERNELS`; `importance` uint8 [K] is for a rule that uses it."""
    check_rule_scale(rule, global_scale)
    kernels, by_importance = KERNELS[rule], RULES[rule].quantize_weighted
    if importance is not None and by_importance is not None:
        if global_scale > kernels.largest_scale or not weight.bits.size:
            return by_importance(weight, global_scale, importance)
        check_importance(importance, weight.shape[1])
        result = allocate_nvfp4(*weight.shape, global_scale=global_scale)
        factors, targets = importance_factors(importance), (flat(result.packed), flat(result.block_scales))
        _cpu.quantize_weighted_bf16(flat(weight.bits), global_scale, factors, *targets)
        return result
    if global_scale > kernels.largest_scale:
        return RULES[rule].quantize_bf16(weight, global_scale)
    result = allocate_nvfp4(*weight.shape, global_scale=global_scale)
    kernels.quantize_bf16(flat(weight.bits), global_scale, flat(result.packed), flat(result.block_scales))
    return result


def measure_bf16_error(
    source: Bf16Weight,
    result: Nvfp4Weight,
    *,
    magnitude: Magnitude,
    sample_seed: int,
    importance: NDArray[np.uint8] | None = None,
) -> WeightMetrics:
    """Measure `result` against its source as `metrics.bf16_error` does, for any rule."""
    rows, _ = result.shape
    bits, packed, scale_bytes = flat(source.bits), flat(result.packed), flat(result.block_scales)
    energies, errors = np.zeros(rows), np.zeros(rows)
    num_nonzero, equal_nonzero, equal_blocks = _cpu.measure_rows_bf16(
        bits, packed, scale_bytes, result.global_scale, energies, errors
    )
    weighted: tuple[list[float], list[float]] | None = None
    if importance is not None:
        weighted_energies, weighted_errors = np.zeros(rows), np.zeros(rows)
        _cpu.weigh_rows_bf16(
            bits, packed, scale_bytes, result.global_scale, flat(importance), weighted_energies, weighted_errors
        )
        weighted = weighted_energies.tolist(), weighted_errors.tolist()
    return finish_bf16_metrics(
        energies=energies.tolist(),
        errors=errors.tolist(),
        num_nonzero=num_nonzero,
        equal_nonzero=equal_nonzero,
        equal_blocks=equal_blocks,
        scale_bytes=scale_bytes,
        sampled=_sample_error(bits, packed, scale_bytes, result.global_scale, magnitude, sample_seed),
        weighted_energies=weighted and weighted[0],
        weighted_errors=weighted and weighted[1],
    )


def _sample_error(
    source: NDArray[Any],
    packed: NDArray[Any],
    scale_bytes: NDArray[Any],
    global_scale: float,
    magnitude: Magnitude,
    sample_seed: int,
) -> SampledError:
    chosen = sampled_blocks(scale_bytes.size, sample_seed=sample_seed)
    blocks = source.reshape(-1, BLOCK_SIZE)[chosen].reshape(-1)
    codes = packed.reshape(-1, BLOCK_SIZE // 2)[chosen].reshape(-1)
    plain_scale = plain_global_scale(magnitude)
    plain_codes, plain_bytes = np.empty_like(codes), np.empty(chosen.size, dtype=np.uint8)
    _cpu.quantize_plain_bf16(blocks, plain_scale, plain_codes, plain_bytes)
    bounds = np.empty(chosen.size)
    _cpu.block_bounds_bf16(blocks, bounds)
    return SampledError(
        num_blocks=chosen.size,
        achieved=_squared_error(blocks, codes, scale_bytes[chosen], global_scale),
        plain=_squared_error(blocks, plain_codes, plain_bytes, plain_scale),
        bound=math.fsum(bounds.tolist()),
    )


def _squared_error(source: NDArray[Any], packed: NDArray[Any], scale_bytes: NDArray[Any], global_scale: float) -> float:
    errors = np.empty(scale_bytes.size)
    _cpu.block_errors_bf16(source, packed, scale_bytes, global_scale, errors)
    return math.fsum(errors.tolist())
