"""FP4 activations as the W4A4 kernels compute them, simulated in FP32.

For every 16 neighboring input channels of a token (vLLM's `cvt_warp_fp16_to_fp4`, the same in SGLang and
TensorRT-LLM; input_scale is a constant of the checkpoint):

    scale = e4m3((amax * fp32(1/6)) * fp32(1/input_scale))     round to nearest even, saturating at 448
    step  = scale * input_scale
    code  = e2m1(x / step)                                     round to nearest even, saturating at 6

A block whose scale rounds to zero becomes zero. Two things differ from the kernels, which take BF16 activations and
approximate the two reciprocals. Here x is FP32, so the only difference from the reference is the four bits.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from k2convert.choices import BLOCK_SIZE

E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0


def quantize_activations(x_TK: Tensor, input_scale: float) -> Tensor:
    """Round FP32 activations [.., K] (K a multiple of 16) to the values that FP4 can hold, f32 [.., K]."""
    blocks = x_TK.reshape(*x_TK.shape[:-1], -1, BLOCK_SIZE)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    global_scale = torch.tensor(input_scale, dtype=torch.float32)
    relative = (amax * torch.tensor(1 / E2M1_MAX, dtype=torch.float32)) * (1.0 / global_scale)
    steps = relative.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * global_scale
    divisors = torch.where(steps > 0, steps, torch.inf)  # a block whose scale is flushed becomes zero
    return (round_to_e2m1(blocks / divisors) * steps).reshape(x_TK.shape)


def round_to_e2m1(x: Tensor) -> Tensor:
    """Round FP32 values to E2M1 (0, .5, 1, 1.5, 2, 3, 4, 6 and negatives): nearest, ties to the even code."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    # The grid has spacing 1/2 below 2, 1 below 4, 2 above; torch.round rounds ties to even, which is the even code.
    spacing = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / spacing) * spacing, x)
