"""Measuring NVFP4 codes that no rule gives, which a walk through the layers made; `kernels.cpu` says what holds for
threads.

The metrics of other rules follow from counts of pairs, because source scale and block scale decide each code. Here they
do not, so every weight is compared with its code (cpp/codes.hpp). The figures have the same meaning.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.blocks import BLOCKS_PER_GROUP, BYTES_PER_BLOCK, sampled_blocks
from k2convert.quantize.formats.e4m3 import MAX_BYTE, decode_e4m3
from k2convert.quantize.formats.int4 import Int4Weight, SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.kernels import _cpu, bf16, columns, cpu
from k2convert.quantize.metrics.int4_error import MAX_SCALE_SPREAD
from k2convert.quantize.metrics.sampled_error import SampledError
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules.column_search import MAX_IMPORTANCE, check_importance
from k2convert.quantize.rules.magnitude import Magnitude

_F64 = NDArray[np.float64]


def measure_codes(
    source: SourceWeight,
    codes: Nvfp4Weight,
    *,
    name: str,
    magnitude: Magnitude,
    importance: NDArray[np.uint8] | None = None,
) -> WeightMetrics:
    """Measure any NVFP4 codes of a weight [N, K]; FormatError, naming it, if shape or block scales do not fit.

    `magnitude` is that of all tensors that share the global scale. `importance` uint8 [K] adds the weighted sums.
    `blocks_outside_normal` is None.
    """
    if codes.shape != source.shape:
        raise FormatError(f"{name}: NVFP4 codes {list(codes.shape)} for a weight {list(source.shape)}")
    if codes.block_scales.size and codes.block_scales.max() > MAX_BYTE:
        raise FormatError(f"{name}: an NVFP4 block scale is negative or NaN")
    if importance is not None:
        check_importance(importance, source.shape[1])
    seed = zlib.crc32(name.encode())
    if isinstance(source, Bf16Weight):
        return bf16.measure_bf16_error(source, codes, magnitude=magnitude, sample_seed=seed, importance=importance)
    return _measure_int4(source, codes, magnitude, seed, importance)


def _measure_int4(
    source: Int4Weight,
    codes: Nvfp4Weight,
    magnitude: Magnitude,
    seed: int,
    importance: NDArray[np.uint8] | None,
) -> WeightMetrics:
    sums_N4 = np.zeros((source.shape[0], 4))
    found = _compare(
        cpu.flat(source.packed),
        cpu.flat(source.scales).astype(np.float64),
        cpu.flat(codes.packed),
        cpu.flat(codes.block_scales),
        codes.global_scale,
        source.column_exponents,
        importance,
        sums_N4,
    )
    histogram = np.bincount(cpu.flat(codes.block_scales), minlength=1)
    used = tuple((byte, int(count)) for byte, count in enumerate(histogram) if count)
    sampled = _sample(source, codes, magnitude, seed)
    energy, error, weighted_energy, weighted_error = (math.fsum(column) for column in sums_N4.T.tolist())
    return WeightMetrics(
        num_weights=2 * source.packed.size,
        num_blocks=codes.block_scales.size,
        energy=energy,
        squared_error=error,
        num_nonzero=found.num_nonzero,
        equal_nonzero=found.equal_nonzero,
        equal_blocks=found.equal_blocks,
        num_codes=2 * source.packed.size,
        max_error_steps=found.max_error_steps,
        recoverable_codes=found.recoverable_codes,
        num_five_or_seven=found.num_five_or_seven,
        num_minus_eight=found.num_minus_eight,
        blocks_outside_normal=None,
        scale_spread_exceeded=int(magnitude.scale_max / found.least_scale > MAX_SCALE_SPREAD),
        min_scale_byte=used[0][0] if used else None,
        max_scale_byte=used[-1][0] if used else None,
        scale_histogram=used,
        sampled_blocks=sampled.num_blocks,
        sampled_error_achieved=sampled.achieved,
        sampled_error_plain=sampled.plain,
        sampled_error_bound=sampled.bound,
        weighted_energy=None if importance is None else weighted_energy / MAX_IMPORTANCE,
        weighted_error=None if importance is None else weighted_error / MAX_IMPORTANCE,
    )


@dataclass(frozen=True, slots=True)
class _Figures:
    """What `_cpu.measure_codes` returns, in its order."""

    num_nonzero: int
    equal_nonzero: int
    equal_blocks: int
    recoverable_codes: int
    num_five_or_seven: int
    num_minus_eight: int
    max_error_steps: float
    least_scale: float


def _compare(
    source: NDArray[np.uint8],
    scales: _F64,
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    global_scale: float,
    exponents: NDArray[np.int8] | None,
    importance: NDArray[np.uint8] | None,
    sums_N4: _F64,
) -> _Figures:
    powers = None if exponents is None else np.ldexp(1.0, -exponents.astype(np.int32))
    return _Figures(
        *_cpu.measure_codes(
            source,
            scales,
            packed,
            block_scales,
            _block_values(global_scale),
            powers,
            None if powers is None else 1 / powers,
            None if importance is None else importance.astype(np.float64),
            sums_N4.reshape(-1),
        )
    )


def _block_values(global_scale: float) -> _F64:
    """Return b * g for every byte, float64 [256]; zero for those that are no block scale."""
    values = np.zeros(256)
    values[: MAX_BYTE + 1] = decode_e4m3(np.arange(MAX_BYTE + 1, dtype=np.uint8)) * global_scale
    return values


def _sample(source: Int4Weight, codes: Nvfp4Weight, magnitude: Magnitude, seed: int) -> SampledError:
    """Compare with plain and with the bound on sampled blocks, which are those of every rule. The achieved error is
    that of the codes.
    """
    chosen = sampled_blocks(codes.block_scales.size, sample_seed=seed)
    if not chosen.size:
        return SampledError(0, 0.0, 0.0, 0.0)
    sums = np.zeros((1, 4))
    exponents = source.column_exponents
    if exponents is not None:
        exponents = _blocks(exponents, BLOCK_SIZE)[chosen % (exponents.size // BLOCK_SIZE)].reshape(-1)
    _compare(
        _blocks(source.packed, BYTES_PER_BLOCK)[chosen].reshape(-1),
        cpu.flat(source.scales)[chosen // BLOCKS_PER_GROUP].astype(np.float64),
        _blocks(codes.packed, BYTES_PER_BLOCK)[chosen].reshape(-1),
        cpu.flat(codes.block_scales)[chosen],
        codes.global_scale,
        exponents,
        None,
        sums,
    )
    sample = cpu.sample_int4_error if exponents is None else columns.sample_columns
    of_rule = sample(source, codes, rule="optimal", magnitude=magnitude, sample_seed=seed)
    return replace(of_rule, achieved=float(sums[0, 1]))


def _blocks(array: NDArray[Any], size: int) -> NDArray[Any]:
    return np.ascontiguousarray(array).reshape(-1, size)
