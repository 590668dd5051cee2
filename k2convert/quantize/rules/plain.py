"""The `plain` rule: bit for bit what the usual pipeline writes.

compressed-tensors dequantises INT4 to BF16, then ModelOpt's max calibration quantises the BF16 weight:

    g    = fp32(amax) / 2688                          amax over all tensors that share g
    s_j  = fp32(amax of the block) / fp32(6 * g)      0 -> 1.0
    b_j  = e4m3(clamp(s_j, 2**-9, 448))               round to nearest even
    x    = fp32(w) / (fp32(b_j) * g)
    code = nearest E2M1, ties to the even code;  sign bit = (x < 0)

The sign of a negative that rounds to zero stays: nibble 0x8. One thing differs from ModelOpt (0.47.0), whose result
is NaN there: a set without any non-zero weight gets g = 1.0, block scales 1.0 and codes 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.blocks import row_chunks
from k2convert.quantize.formats.e2m1 import E2M1_MAX, SIGN_BIT, nearest_code, pack_nibbles
from k2convert.quantize.formats.e4m3 import E4M3_MAX, E4M3_SMALLEST, encode_e4m3
from k2convert.quantize.formats.int4 import Int4Weight, dequantize_int4
from k2convert.quantize.formats.lazy_torch import torch
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.rules.magnitude import Magnitude

if TYPE_CHECKING:
    from torch import Tensor

AMAX_PER_GLOBAL_SCALE: Final = E2M1_MAX * E4M3_MAX


def plain_global_scale(magnitude: Magnitude) -> float:
    """Return g = fp32(amax) / 2688 as one FP32 division; 1.0 where every weight is zero."""
    if magnitude.amax == 0.0:
        return 1.0
    global_scale = np.float32(magnitude.amax) / np.float32(AMAX_PER_GLOBAL_SCALE)
    if not (np.isfinite(global_scale) and global_scale > 0):
        raise FormatError(f"a largest weight of {magnitude.amax!r} gives no usable FP32 global scale")
    return float(global_scale)


def quantize_plain(weight: Int4Weight | Tensor, global_scale: float) -> Nvfp4Weight:
    """Quantise an INT4 weight or a bf16 [N, K] tensor with `plain` arithmetic, in bounded memory."""
    rows, columns = weight.shape
    device = weight.packed.device if isinstance(weight, Int4Weight) else weight.device
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(rows, columns // BLOCK_SIZE, dtype=torch.uint8, device=device)
    for start, stop in row_chunks(rows, columns):
        chunk = dequantize_int4(weight.rows(start, stop)) if isinstance(weight, Int4Weight) else weight[start:stop]
        nibbles, block_bytes = quantize_plain_blocks(chunk.reshape(-1, BLOCK_SIZE), global_scale)
        packed[start:stop] = pack_nibbles(nibbles.view(stop - start, columns))
        scales[start:stop] = block_bytes.view(stop - start, -1)
    return Nvfp4Weight(packed=packed, block_scales=scales, global_scale=global_scale)


def quantize_plain_blocks(blocks_ME: Tensor, global_scale: float) -> tuple[Tensor, Tensor]:
    """Quantise bf16 [M, 16] blocks; returns nibbles uint8 [M, 16] and E4M3 bytes uint8 [M]."""
    # A 0-dimensional FP32 tensor, so that every product and quotient below is rounded to FP32 as ModelOpt's are.
    g = torch.tensor(global_scale, dtype=torch.float32, device=blocks_ME.device)
    block_bytes = plain_block_scales(blocks_ME.abs().amax(dim=-1), g)
    steps = block_bytes.view(torch.float8_e4m3fn).to(torch.float32) * g
    return plain_nibbles(blocks_ME, steps.unsqueeze(-1)), block_bytes


def plain_block_scales(amax_M: Tensor, global_scale: Tensor) -> Tensor:
    """Return E4M3 bytes uint8 [M] for bf16 block maxima [M] and an FP32 global scale []."""
    scales = amax_M.to(torch.float32) / (E2M1_MAX * global_scale)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return encode_e4m3(scales.clamp(min=E4M3_SMALLEST, max=E4M3_MAX))


def plain_nibbles(weights: Tensor, steps: Tensor) -> Tensor:
    """Return nibbles (uint8, shape of `weights`) of bf16 weights for FP32 steps b * g that broadcast to them."""
    scaled = weights.to(torch.float32) / steps
    code = nearest_code(scaled.abs(), torch.ones((), dtype=torch.float32, device=scaled.device))
    return code + SIGN_BIT * (scaled < 0).to(torch.uint8)
