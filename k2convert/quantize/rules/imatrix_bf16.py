"""The `imatrix` rule for BF16 sources: rules/mse_bf16.py with each term times the importance of its column.

    E(c) = sum over e = 0..15 of (|W_e| - v_e * c)**2 * f_e       c = b * g,  f_e = w_e / (the block's largest w)

computed in float64: the difference, its square, the product with f_e, added in this order. With equal importance f_e is
1, so this is `mse`, byte for byte. The narrow window of `mse` does not hold, because the largest weight of a
block can be its least important one. So all normal scales are tried.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.e4m3 import MAX_BYTE, MIN_NORMAL_BYTE, ONE_BYTE, decode_e4m3
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.rules.mse_bf16 import quantize_bf16_blocks, search_scales


def quantize_imatrix_bf16(weight: Bf16Weight, global_scale: float, importance: NDArray[np.uint8]) -> Nvfp4Weight:
    """Quantize a BF16 weight for g = 2**k with the importance uint8 [K] of its columns, in bounded memory."""
    factors_BE = importance_factors(importance).reshape(-1, BLOCK_SIZE)
    all_bytes = np.arange(MIN_NORMAL_BYTE, MAX_BYTE + 1, dtype=np.uint8)
    steps = decode_e4m3(all_bytes) * global_scale

    def best_scale_bytes(blocks_ME: NDArray[np.float64]) -> NDArray[np.uint8]:
        weights_EM = np.ascontiguousarray(np.abs(blocks_ME).T)
        factors_EM = np.tile(factors_BE.T, blocks_ME.shape[0] // factors_BE.shape[0])
        first_M = np.zeros(weights_EM.shape[1], dtype=np.int64)
        best_M = search_scales(weights_EM, steps, first_M, steps.size, factors_EM)
        return np.where(weights_EM.max(axis=0) == 0, np.uint8(ONE_BYTE), all_bytes[best_M])

    return quantize_bf16_blocks(weight, global_scale, best_scale_bytes)


def importance_factors(importance: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return w_e / (the block's largest w), float64 [K]."""
    blocks_BE = importance.reshape(-1, BLOCK_SIZE).astype(np.float64)
    return (blocks_BE / blocks_BE.max(axis=1, keepdims=True)).reshape(-1)
