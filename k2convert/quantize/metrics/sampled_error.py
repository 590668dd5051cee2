"""The comparison with `plain` and with the bound, made on a sample of blocks: it costs more than the conversion.

For INT4 blocks all three figures follow from histograms and pair counts; BF16 blocks are in weight_error_bf16.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k2convert.choices import Rule
from k2convert.quantize.formats.blocks import (
    BLOCKS_PER_GROUP,
    BYTES_PER_BLOCK,
    block_histograms,
    sampled_blocks,
    unpack_histograms,
)
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight
from k2convert.quantize.formats.lazy_torch import torch
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.metrics.block_bound import int4_block_bounds
from k2convert.quantize.metrics.pair_counts import count_blocks, sum_squared_error
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.plain import plain_block_scales, plain_global_scale

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampledError:
    """Squared error on the sampled blocks: what was achieved, what `plain` has there, and the bound."""

    num_blocks: int
    achieved: float
    plain: float
    bound: float


def sample_error(
    source: Int4Weight, result: Nvfp4Weight, *, rule: Rule, magnitude: Magnitude, sample_seed: int
) -> SampledError:
    """Compare the achieved error with plain's, at plain's own global scale, and with the bound, on sampled blocks."""
    chosen = sampled_blocks(result.block_scales.numel(), sample_seed=sample_seed, device=source.packed.device)
    words_M = block_histograms(source.packed.reshape(-1, BYTES_PER_BLOCK)[chosen]).cpu()
    scales_M = source.scales.flatten()[chosen // BLOCKS_PER_GROUP].cpu()
    bytes_M = result.block_scales.flatten()[chosen].cpu()
    histograms_Mk = unpack_histograms(words_M)
    largest_M = ((histograms_Mk > 0) * torch.arange(NUM_MAGNITUDES)).amax(dim=-1)
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


def _error_of(words_M: Tensor, scales_M: Tensor, bytes_M: Tensor, *, rule: Rule, global_scale: float) -> float:
    keys_M = (scales_M.view(torch.int16).to(torch.int64) & 0x7FFF) << 8 | bytes_M
    counts = count_blocks(words_M, keys_M, rule=rule, global_scale=global_scale, outside_normal=0)
    return sum_squared_error(counts, rule=rule, global_scale=global_scale)
