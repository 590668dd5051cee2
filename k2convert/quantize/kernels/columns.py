"""The CPU kernels for INT4 weights whose columns have an importance or exponents; `kernels.cpu` says what holds for
threads.

`weighted` and `optimal` look at 48 candidates of a block without exponents in 16-bit arithmetic with AVX2. Everything
else is exact in float64, by groups of columns with equal exponents (cpp/columns.hpp).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, GROUP_SIZE, Rule
from k2convert.quantize.formats.blocks import BLOCKS_PER_GROUP, BYTES_PER_BLOCK, sampled_blocks
from k2convert.quantize.formats.int4 import Int4Weight, check_int4_scales
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.cpu import KERNELS, allocate_nvfp4, flat
from k2convert.quantize.kernels.search_tables import search_tables
from k2convert.quantize.metrics.int4_error import PairFigures
from k2convert.quantize.metrics.pair_counts import PairCounts
from k2convert.quantize.metrics.sampled_error import SampledError
from k2convert.quantize.rules import check_rule_scale
from k2convert.quantize.rules.column_search import MAX_IMPORTANCE, check_importance
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.optimal import global_exponent
from k2convert.quantize.rules.plain import plain_global_scale

_ZERO_CODES: Final = 0x88
"""The byte of two INT4 codes of zero."""


def measure_columns(weight: Int4Weight, *, name: str) -> Magnitude:
    """Measure an INT4 weight with exponents as `magnitude.measure` does; FormatError if a scale is not usable."""
    check_int4_scales(weight.scale_bits, name=name)
    assert weight.column_exponents is not None
    scale_max, amax = _cpu.magnitude_of_columns(
        flat(weight.packed), flat(weight.scale_bits), flat(weight.column_exponents)
    )
    return Magnitude(scale_max=scale_max, amax=amax)


def convert_columns(
    weight: Int4Weight, *, rule: Rule, global_scale: float, importance: NDArray[np.uint8] | None
) -> tuple[Nvfp4Weight, PairCounts]:
    """Quantize an INT4 weight with exponents, an importance uint8 [K], or both, and count its pairs."""
    check_rule_scale(rule, global_scale)
    if importance is not None:
        check_importance(importance, weight.shape[1])
    result = allocate_nvfp4(*weight.shape, global_scale=global_scale)
    is_plain, exponents = KERNELS[rule].is_plain, weight.column_exponents
    if exponents is None and importance is None:
        exponents = np.zeros(weight.shape[1], dtype=np.int8)
    keys, num_blocks, counts, equal_blocks, outside_normal, sums = _cpu.convert_columns(
        flat(weight.packed),
        flat(weight.scale_bits),
        flat(exponents) if exponents is not None else None,
        None if importance is None else flat(importance),
        is_plain,
        0 if is_plain else global_exponent(global_scale),
        global_scale,
        search_tables(),
        flat(result.packed),
        flat(result.block_scales),
    )
    importance_sums = None if importance is None else sums
    return result, PairCounts(keys, num_blocks, counts, equal_blocks, outside_normal, importance_sums)


def figures_of_columns(counts: PairCounts, *, rule: Rule, global_scale: float) -> PairFigures:
    """Evaluate a table of pairs with an importance, as `int4_error.pair_figures` does."""
    is_plain = KERNELS[rule].is_plain
    figures = PairFigures(*_cpu.figures_of_pairs(counts.keys, flat(counts.magnitude_counts), is_plain, global_scale))
    if counts.importance_sums is None:
        return figures
    energy, error, *_ = _cpu.figures_of_pairs(counts.keys, flat(counts.importance_sums), is_plain, global_scale)
    return replace(figures, weighted_energy=energy / MAX_IMPORTANCE, weighted_error=error / MAX_IMPORTANCE)


def sample_columns(
    source: Int4Weight,
    result: Nvfp4Weight,
    *,
    rule: Rule,
    magnitude: Magnitude,
    sample_seed: int,
    importance: NDArray[np.uint8] | None = None,
) -> SampledError:
    """Compare with plain and with the bound on sampled blocks, as `sampled_error.sample_error` does.

    The sampled blocks become a weight of one row, each with a block of zeros behind it, because a scale belongs to two
    blocks. Converted again, it gives the pairs of the sampled blocks.
    """
    assert source.column_exponents is not None
    chosen = sampled_blocks(result.block_scales.size, sample_seed=sample_seed)
    if not chosen.size:
        return SampledError(0, 0.0, 0.0, 0.0)
    columns = chosen % (source.shape[1] // BLOCK_SIZE)
    packed = np.full((chosen.size, GROUP_SIZE // 2), _ZERO_CODES, dtype=np.uint8)
    packed[:, :BYTES_PER_BLOCK] = source.packed.reshape(-1, BYTES_PER_BLOCK)[chosen]
    bits = source.scale_bits.reshape(1, -1)[:, chosen // BLOCKS_PER_GROUP]
    exponents = np.zeros((chosen.size, BLOCKS_PER_GROUP, BLOCK_SIZE), dtype=np.int8)
    exponents[:, 0] = source.column_exponents.reshape(-1, BLOCK_SIZE)[columns]
    weight = Int4Weight(packed.reshape(1, -1), bits, exponents.reshape(-1))
    weights = None
    if importance is not None:
        weights = np.ones(exponents.shape, dtype=np.uint8)
        weights[:, 0] = importance.reshape(-1, BLOCK_SIZE)[columns]
        weights = weights.reshape(-1)
    plain_scale = plain_global_scale(magnitude)
    bounds = np.empty(chosen.size)
    _cpu.bounds_of_columns(flat(packed[:, :BYTES_PER_BLOCK]), flat(weight.scales), flat(exponents[:, 0]), bounds)
    return SampledError(
        num_blocks=chosen.size,
        achieved=_squared_error(weight, rule, result.global_scale, weights),
        plain=_squared_error(weight, "plain", plain_scale, None),
        bound=math.fsum(bounds.tolist()),
    )


def _squared_error(weight: Int4Weight, rule: Rule, global_scale: float, importance: NDArray[np.uint8] | None) -> float:
    _, counts = convert_columns(weight, rule=rule, global_scale=global_scale, importance=importance)
    flat_counts = flat(counts.magnitude_counts)
    return _cpu.figures_of_pairs(counts.keys, flat_counts, KERNELS[rule].is_plain, global_scale)[1]
