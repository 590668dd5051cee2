"""The comparison with `plain` and with the bound, on a sample of blocks because it costs more than the conversion.

For INT4 blocks all three figures follow from histograms and pair counts. For BF16 blocks see bf16_error.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.quantize.formats.bf16 import bf16_values, round_to_bf16
from k2convert.quantize.formats.blocks import BLOCKS_PER_GROUP, BYTES_PER_BLOCK, sampled_blocks
from k2convert.quantize.formats.histograms import block_histograms, unpack_histograms
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight, unpack_int4
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.metrics.block_bound import BOUND_BLOCKS, bf16_block_bounds, int4_block_bounds
from k2convert.quantize.metrics.pair_counts import count_blocks, count_elements, pair_keys, sum_squared_error
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
    if source.column_exponents is not None:
        return _sample_columns(source, result, chosen, rule=rule, magnitude=magnitude)
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


def _sample_columns(
    source: Int4Weight, result: Nvfp4Weight, chosen: NDArray[np.int64], *, rule: Rule, magnitude: Magnitude
) -> SampledError:
    """The same for a weight with column exponents, element by element; the bound is that of bf16_error.py."""
    assert source.column_exponents is not None
    codes_ME = unpack_int4(source.packed.reshape(-1, BYTES_PER_BLOCK)[chosen])
    scales_M = source.scales.reshape(-1)[chosen // BLOCKS_PER_GROUP]
    steps_BE = source.column_exponents.reshape(-1, BLOCK_SIZE).astype(np.int32)
    scales_ME = np.ldexp(scales_M[:, None], -steps_BE[chosen % steps_BE.shape[0]])
    bits_ME = (scales_ME.view(np.uint32) >> 16).astype(np.uint16)
    magnitudes_ME = np.abs(codes_ME)
    weights_ME = magnitudes_ME * np.abs(scales_ME)
    plain_scale = plain_global_scale(magnitude)

    def squared_error(bytes_M: NDArray[np.uint8], by: Rule, global_scale: float) -> float:
        keys_ME = pair_keys(bits_ME, bytes_M[:, None])
        counts = count_elements(magnitudes_ME, keys_ME, rule=by, global_scale=global_scale)
        return sum_squared_error(counts, rule=by, global_scale=global_scale)

    bounds = [
        bf16_block_bounds(weights_ME[start : start + BOUND_BLOCKS]) for start in range(0, chosen.size, BOUND_BLOCKS)
    ]
    return SampledError(
        num_blocks=chosen.size,
        achieved=squared_error(result.block_scales.reshape(-1)[chosen], rule, result.global_scale),
        plain=squared_error(
            plain_block_scales(round_to_bf16(weights_ME).max(axis=1), plain_scale), "plain", plain_scale
        ),
        bound=math.fsum(chain.from_iterable(bounds)),
    )
