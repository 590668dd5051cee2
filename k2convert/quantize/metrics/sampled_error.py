"""The comparison with `plain` and with the bound, on a sample of blocks because it costs more than the conversion.

For INT4 blocks all three figures follow from histograms and pair counts. For BF16 blocks see bf16_error.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from k2convert.choices import Rule
from k2convert.quantize.formats.bf16 import bf16_values, round_to_bf16
from k2convert.quantize.formats.blocks import BLOCKS_PER_GROUP, BYTES_PER_BLOCK, sampled_blocks
from k2convert.quantize.formats.histograms import block_histograms, unpack_histograms
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.metrics.block_bound import int4_block_bounds
from k2convert.quantize.metrics.pair_counts import count_blocks, pair_keys, sum_squared_error
from k2convert.quantize.rules.magnitude import Magnitude
from k2convert.quantize.rules.plain import plain_block_scales, plain_global_scale


@dataclass(frozen=True, slots=True)
class SampledError:
    """Squared error on the sampled blocks: the achieved one, that of `plain`, and the bound."""

    num_blocks: int
    achieved: float
    plain: float
    bound: float


def sample_error(
    source: Int4Weight, result: Nvfp4Weight, *, rule: Rule, magnitude: Magnitude, sample_seed: int
) -> SampledError:
    """Compare the achieved error with plain's, at plain's own global scale, and with the bound, on sampled blocks."""
    chosen = sampled_blocks(result.block_scales.size, sample_seed=sample_seed)
    words_M = block_histograms(source.packed.reshape(-1, BYTES_PER_BLOCK)[chosen])
    bits_M = source.scale_bits.reshape(-1)[chosen // BLOCKS_PER_GROUP]
    scales_M = bf16_values(bits_M)
    histograms_Mk = unpack_histograms(words_M)
    largest_M = ((histograms_Mk > 0) * np.arange(NUM_MAGNITUDES)).max(axis=-1, initial=0)
    plain_scale = plain_global_scale(magnitude)
    amax_M = round_to_bf16(largest_M.astype(np.float32) * scales_M)

    def squared_error(bytes_M: np.ndarray[tuple[int], np.dtype[np.uint8]], by: Rule, global_scale: float) -> float:
        keys_M = pair_keys(bits_M, bytes_M)
        counts = count_blocks(words_M, keys_M, rule=by, global_scale=global_scale, outside_normal=0)
        return sum_squared_error(counts, rule=by, global_scale=global_scale)

    bounds_M = int4_block_bounds(histograms_Mk) * scales_M.astype(np.float64) ** 2
    return SampledError(
        num_blocks=words_M.size,
        achieved=squared_error(result.block_scales.reshape(-1)[chosen], rule, result.global_scale),
        plain=squared_error(plain_block_scales(amax_M, plain_scale), "plain", plain_scale),
        bound=math.fsum(bounds_M.tolist()),
    )
