"""Measuring a weight converted from BF16: element by element, because BF16 has no small table of values.

Terms of a block are added one after the other, then the blocks of a row, then the rows with math.fsum. The order is
fixed, so the figures are the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.formats.bf16 import Bf16Weight, bf16_values
from k2convert.quantize.formats.blocks import row_chunks, sampled_blocks
from k2convert.quantize.formats.e2m1 import decode_e2m1, unpack_nibbles
from k2convert.quantize.formats.e4m3 import decode_e4m3
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.quantize.metrics.block_bound import BOUND_BLOCKS, bf16_block_bounds
from k2convert.quantize.metrics.sampled_error import SampledError
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules.column_search import MAX_IMPORTANCE
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.optimal_bf16 import sum_in_order
from k2convert.quantize.rules.plain import plain_global_scale, quantize_plain_blocks


def measure_bf16_error(
    source: Bf16Weight,
    result: Nvfp4Weight,
    *,
    magnitude: Magnitude,
    sample_seed: int,
    importance: NDArray[np.uint8] | None = None,
) -> WeightMetrics:
    """Measure `result` against the BF16 weight that it was converted from; figures about INT4 codes are None.

    Weighted terms are the square times the importance, added in the same order, and divided by 255 at the end.
    """
    rows, columns = result.shape
    energies: list[NDArray[np.float64]] = []
    errors: list[NDArray[np.float64]] = []
    weighted: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    num_nonzero = equal_nonzero = equal_blocks = 0
    for start, stop in row_chunks(rows, columns):
        wanted = _by_element(bf16_values(source.bits[start:stop]).astype(np.float64))
        difference = wanted - _by_element(dequantize_nvfp4(result.rows(start, stop)))
        energies.append(sum_in_order(sum_in_order(wanted * wanted)))
        errors.append(sum_in_order(sum_in_order(difference * difference)))
        if importance is not None:
            factors_EB1 = importance.reshape(-1, BLOCK_SIZE).T.astype(np.float64)[:, :, None]
            terms = (wanted * wanted * factors_EB1, difference * difference * factors_EB1)
            weighted.append((sum_in_order(sum_in_order(terms[0])), sum_in_order(sum_in_order(terms[1]))))
        num_nonzero += int(np.count_nonzero(wanted))
        equal_nonzero += int(((wanted != 0) & (difference == 0)).sum())
        equal_blocks += int((difference == 0).all(axis=0).sum())
    return finish_bf16_metrics(
        energies=chain.from_iterable(energies),
        errors=chain.from_iterable(errors),
        num_nonzero=num_nonzero,
        equal_nonzero=equal_nonzero,
        equal_blocks=equal_blocks,
        scale_bytes=result.block_scales.reshape(-1),
        sampled=sample_bf16_error(source, result, magnitude=magnitude, sample_seed=sample_seed),
        weighted_energies=None if importance is None else chain.from_iterable(energy for energy, _ in weighted),
        weighted_errors=None if importance is None else chain.from_iterable(error for _, error in weighted),
    )


def finish_bf16_metrics(
    *,
    energies: Iterable[float],
    errors: Iterable[float],
    num_nonzero: int,
    equal_nonzero: int,
    equal_blocks: int,
    scale_bytes: NDArray[np.uint8],
    sampled: SampledError,
    weighted_energies: Iterable[float] | None = None,
    weighted_errors: Iterable[float] | None = None,
) -> WeightMetrics:
    """Put a BF16 weight's figures together: sums of squares by row, counts of weights and blocks, all block scales.

    The weighted sums by row are not yet divided by 255.
    """
    histogram = np.bincount(scale_bytes, minlength=1)
    used = tuple((byte, int(count)) for byte, count in enumerate(histogram) if count)
    return WeightMetrics(
        num_weights=scale_bytes.size * BLOCK_SIZE,
        num_blocks=scale_bytes.size,
        energy=math.fsum(energies),
        squared_error=math.fsum(errors),
        num_nonzero=num_nonzero,
        equal_nonzero=equal_nonzero,
        equal_blocks=equal_blocks,
        num_codes=None,
        max_error_steps=None,
        recoverable_codes=None,
        num_five_or_seven=None,
        num_minus_eight=None,
        blocks_outside_normal=None,
        scale_spread_exceeded=None,
        min_scale_byte=used[0][0] if used else None,
        max_scale_byte=used[-1][0] if used else None,
        scale_histogram=used,
        sampled_blocks=sampled.num_blocks,
        sampled_error_achieved=sampled.achieved,
        sampled_error_plain=sampled.plain,
        sampled_error_bound=sampled.bound,
        weighted_energy=None if weighted_energies is None else math.fsum(weighted_energies) / MAX_IMPORTANCE,
        weighted_error=None if weighted_errors is None else math.fsum(weighted_errors) / MAX_IMPORTANCE,
    )


def sample_bf16_error(
    source: Bf16Weight, result: Nvfp4Weight, *, magnitude: Magnitude, sample_seed: int
) -> SampledError:
    """Compare the achieved error with plain's, at plain's own global scale, and with the bound, on sampled blocks."""
    chosen = sampled_blocks(result.block_scales.size, sample_seed=sample_seed)
    blocks_ME = bf16_values(source.bits.reshape(-1, BLOCK_SIZE)[chosen])
    nibbles_ME = unpack_nibbles(result.packed.reshape(-1, BLOCK_SIZE // 2)[chosen])
    bytes_M = result.block_scales.reshape(-1)[chosen]
    plain_scale = plain_global_scale(magnitude)
    plain_nibbles_ME, plain_bytes_M = quantize_plain_blocks(blocks_ME, plain_scale)
    bounds = [
        bf16_block_bounds(blocks_ME[start : start + BOUND_BLOCKS])
        for start in range(0, blocks_ME.shape[0], BOUND_BLOCKS)
    ]
    return SampledError(
        num_blocks=chosen.size,
        achieved=_squared_error(blocks_ME, nibbles_ME, bytes_M, result.global_scale),
        plain=_squared_error(blocks_ME, plain_nibbles_ME, plain_bytes_M, plain_scale),
        bound=math.fsum(chain.from_iterable(bounds)),
    )


def _squared_error(
    blocks_ME: NDArray[np.float32], nibbles_ME: NDArray[np.uint8], bytes_M: NDArray[np.uint8], global_scale: float
) -> float:
    written_ME = decode_e2m1(nibbles_ME) * (decode_e4m3(bytes_M) * global_scale)[:, None]
    difference_EM = (blocks_ME.astype(np.float64) - written_ME).T
    return math.fsum(sum_in_order(difference_EM * difference_EM).tolist())


def _by_element(weights_NK: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rearrange [N, K] into [16, K/16, N]: elements of a block first, then the blocks of a row."""
    return np.ascontiguousarray(weights_NK.reshape(weights_NK.shape[0], -1, BLOCK_SIZE).transpose(2, 1, 0))
