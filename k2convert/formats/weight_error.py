"""Measuring a converted INT4 weight: metrics from the pair table, and the sampled comparison with plain and the bound.

Everything is a function of integer tables, evaluated in float64 in ascending key order and added with math.fsum, so
equal tables give equal metrics to the last bit, on every backend and at any number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.formats.block_bound import int4_block_bounds
from k2convert.formats.blocks import BLOCKS_PER_GROUP, BYTES_PER_BLOCK, block_histograms, unpack_histograms
from k2convert.formats.int4 import NUM_MAGNITUDES, Int4Weight
from k2convert.formats.magnitude import Magnitude
from k2convert.formats.metrics import WeightMetrics
from k2convert.formats.nvfp4 import Nvfp4Weight
from k2convert.formats.pair_counts import PairCounts, count_blocks, count_pairs, pair_values
from k2convert.formats.plain import plain_block_scales, plain_global_scale
from k2convert.formats.rule import Rule

MAX_SCALE_SPREAD: Final = 2.0**13
SAMPLE_STRIDE: Final = 64
MIN_SAMPLED_BLOCKS: Final = 4096


@dataclass(frozen=True, slots=True)
class SampledError:
    """Squared error on the sampled blocks: what was achieved, what `plain` has there, and the bound."""

    num_blocks: int
    achieved: float
    plain: float
    bound: float


def measure_error(
    source: Int4Weight, result: Nvfp4Weight, *, rule: Rule, magnitude: Magnitude, sample_seed: int
) -> WeightMetrics:
    """Measure `result`, which must be what `rule` makes of `source`, against the exact q * s.

    `magnitude` is that of all tensors that share the global scale; `sample_seed` is the CRC-32 of the tensor's name.
    """
    counts = count_pairs(source, result, rule=rule)
    sampled = sample_error(source, result, rule=rule, magnitude=magnitude, sample_seed=sample_seed)
    return finish_metrics(counts, rule=rule, global_scale=result.global_scale, magnitude=magnitude, sampled=sampled)


def finish_metrics(
    counts: PairCounts, *, rule: Rule, global_scale: float, magnitude: Magnitude, sampled: SampledError
) -> WeightMetrics:
    """Compute the metrics of a weight from its pair counts: the one place where they are computed."""
    wanted_Pk, written_Pk = pair_values(counts.keys, rule=rule, global_scale=global_scale)
    n_Pk = counts.magnitude_counts
    scales_P = counts.scales
    k = np.arange(NUM_MAGNITUDES)
    with np.errstate(invalid="ignore", divide="ignore"):
        steps_Pk = np.where(scales_P[:, None] > 0, written_Pk / scales_P[:, None], 0.0)
        error_steps_Pk = np.where(scales_P[:, None] > 0, np.abs(wanted_Pk - written_Pk) / scales_P[:, None], 0.0)
    nonzero_Pk = wanted_Pk != 0
    histogram = np.bincount(counts.scale_bytes, weights=counts.num_blocks, minlength=1).astype(np.int64)
    used_bytes = [int(byte) for byte in np.flatnonzero(histogram)]
    live_P = (n_Pk[:, 1:].sum(axis=1) > 0) & (scales_P > 0)
    least_scale = float(scales_P[live_P].min()) if live_P.any() else math.inf
    return WeightMetrics(
        num_weights=int(n_Pk.sum()),
        num_blocks=int(counts.num_blocks.sum()),
        energy=_sum_pairs(n_Pk * (wanted_Pk * wanted_Pk)),
        squared_error=_sum_pairs(n_Pk * (wanted_Pk - written_Pk) ** 2),
        num_nonzero=int(n_Pk[nonzero_Pk].sum()),
        equal_nonzero=int(n_Pk[nonzero_Pk & (wanted_Pk == written_Pk)].sum()),
        equal_blocks=counts.equal_blocks,
        num_codes=int(n_Pk.sum()),
        max_error_steps=float(error_steps_Pk[n_Pk > 0].max(initial=0.0)),
        recoverable_codes=int(n_Pk[np.rint(steps_Pk) == k].sum()),
        num_five_or_seven=int(n_Pk[:, 5].sum() + n_Pk[:, 7].sum()),
        num_minus_eight=int(n_Pk[:, 8].sum()),
        blocks_outside_normal=counts.outside_normal if rule == "optimal" else None,
        scale_spread_exceeded=int(magnitude.scale_max / least_scale > MAX_SCALE_SPREAD),
        min_scale_byte=used_bytes[0],
        max_scale_byte=used_bytes[-1],
        scale_histogram=tuple((byte, int(histogram[byte])) for byte in used_bytes),
        sampled_blocks=sampled.num_blocks,
        sampled_error_achieved=sampled.achieved,
        sampled_error_plain=sampled.plain,
        sampled_error_bound=sampled.bound,
    )


def sample_error(
    source: Int4Weight, result: Nvfp4Weight, *, rule: Rule, magnitude: Magnitude, sample_seed: int
) -> SampledError:
    """Compare the achieved error with plain's, at plain's own global scale, and with the bound, on sampled blocks."""
    chosen = sampled_blocks(result.block_scales.numel(), sample_seed=sample_seed, device=source.packed.device)
    words_M = block_histograms(source.packed.reshape(-1, BYTES_PER_BLOCK)[chosen]).cpu()
    scales_M = source.scales.flatten()[chosen // BLOCKS_PER_GROUP].cpu()
    bytes_M = result.block_scales.flatten()[chosen].cpu()
    histograms_Mk = unpack_histograms(words_M)
    largest_M = _largest_magnitudes(histograms_Mk)
    plain_scale = plain_global_scale(magnitude)
    plain_bytes_M = plain_block_scales(
        largest_M.to(torch.bfloat16) * scales_M, torch.tensor(plain_scale, dtype=torch.float32)
    )
    scales = scales_M.to(torch.float64).numpy()
    bounds = int4_block_bounds(histograms_Mk.numpy()) * (scales * scales)
    return SampledError(
        num_blocks=int(words_M.numel()),
        achieved=_error_of(words_M, scales_M, bytes_M, rule=rule, global_scale=result.global_scale),
        plain=_error_of(words_M, scales_M, plain_bytes_M, rule="plain", global_scale=plain_scale),
        bound=math.fsum(bounds.tolist()),
    )


def sampled_blocks(num_blocks: int, *, sample_seed: int, device: torch.device) -> Tensor:
    """Return the row-major indices of the sampled blocks, int64: one in 64, or about 4,096 of a smaller tensor."""
    stride = min(SAMPLE_STRIDE, max(1, num_blocks // MIN_SAMPLED_BLOCKS))
    return torch.arange(sample_seed % stride, num_blocks, stride, device=device)


def _error_of(words_M: Tensor, scales_M: Tensor, bytes_M: Tensor, *, rule: Rule, global_scale: float) -> float:
    keys_M = (scales_M.view(torch.int16).to(torch.int64) & 0x7FFF) << 8 | bytes_M
    counts = count_blocks(words_M, keys_M, rule=rule, global_scale=global_scale, outside_normal=0)
    wanted_Pk, written_Pk = pair_values(counts.keys, rule=rule, global_scale=global_scale)
    return _sum_pairs(counts.magnitude_counts * (wanted_Pk - written_Pk) ** 2)


def _largest_magnitudes(histograms_Mk: Tensor) -> Tensor:
    return ((histograms_Mk > 0) * torch.arange(NUM_MAGNITUDES)).amax(dim=-1)


def _sum_pairs(terms_Pk: NDArray[np.float64]) -> float:
    sums_P = terms_Pk[:, 0].copy()
    for k in range(1, NUM_MAGNITUDES):
        sums_P += terms_Pk[:, k]
    return math.fsum(sums_P.tolist())
