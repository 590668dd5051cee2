"""The `max` rule: bit for bit what the usual pipeline writes.

compressed-tensors dequantizes INT4 to BF16, then ModelOpt's max calibration quantizes the BF16 weight:

    g    = fp32(amax) / 2688                          amax over all tensors that share g
    s_j  = fp32(amax of the block) / fp32(6 * g)      0 -> 1.0
    b_j  = e4m3(clamp(s_j, 2**-9, 448))               round to nearest even
    x    = fp32(w) / (fp32(b_j) * g)
    code = nearest E2M1, ties to the even code;  sign bit = (x < 0)

A negative that rounds to zero keeps its sign: nibble 0x8. One case differs from ModelOpt (0.47.0), whose result is NaN
there: a set of tensors in which every weight is zero gets g = 1.0, block scales 1.0 and codes 0.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Magnitude, SourceWeight, bf16_values
from k2convert.quantize.formats.nvfp4 import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_SMALLEST,
    SIGN_BIT,
    Nvfp4Weight,
    decode_e4m3,
    encode_e4m3,
    nearest_code,
    quantize_rows,
)

AMAX_PER_GLOBAL_SCALE: Final = E2M1_MAX * E4M3_MAX


def max_global_scale(magnitude: Magnitude) -> float:
    """Return g = fp32(amax) / 2688 as one FP32 division; 1.0 if every weight is zero."""
    if magnitude.amax == 0.0:
        return 1.0
    global_scale = np.float32(magnitude.amax) / np.float32(AMAX_PER_GLOBAL_SCALE)
    if not (np.isfinite(global_scale) and global_scale > 0):
        raise FormatError(f"a largest weight of {magnitude.amax!r} gives no usable FP32 global scale")
    return float(global_scale)


def quantize_max(weight: SourceWeight, global_scale: float) -> Nvfp4Weight:
    """Quantize a weight with `max` arithmetic, in bounded memory."""

    def quantize(rows: slice) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        blocks_ME = bf16_values(weight.select(rows).bits).reshape(-1, BLOCK_SIZE)
        block_bytes = max_block_scales(np.abs(blocks_ME).max(axis=-1), global_scale)
        return max_nibbles(blocks_ME, max_steps(block_bytes, global_scale)[:, None]), block_bytes

    return quantize_rows(weight.shape, global_scale, quantize)


def max_block_scales(amax_M: NDArray[np.float32], global_scale: float) -> NDArray[np.uint8]:
    """Return E4M3 bytes (uint8, shape of `amax_M`) for block maxima in float32, rounding to FP32 after each step."""
    with np.errstate(over="ignore", under="ignore"):
        scales = amax_M / (np.float32(E2M1_MAX) * np.float32(global_scale))
    scales = np.where(scales == 0, np.float32(1), scales)
    return encode_e4m3(scales.clip(np.float32(E4M3_SMALLEST), np.float32(E4M3_MAX)))


def max_steps(block_bytes: NDArray[np.uint8], global_scale: float) -> NDArray[np.float32]:
    """Return the steps b * g, rounded to FP32."""
    with np.errstate(over="ignore", under="ignore"):
        return decode_e4m3(block_bytes).astype(np.float32) * np.float32(global_scale)


def max_nibbles(weights: NDArray[np.float32], steps: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return nibbles (uint8, shape of `weights`) of float32 weights for FP32 steps b * g that broadcast to them."""
    # Steps can underflow to zero or overflow: the quotient is then infinity, NaN (code 0) or zero.
    with np.errstate(all="ignore"):
        scaled = weights / steps
        return nearest_code(np.abs(scaled), np.float32(1)) | np.uint8(SIGN_BIT) * (scaled < 0)
