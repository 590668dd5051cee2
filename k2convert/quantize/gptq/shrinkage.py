"""How far the curvature is trusted: its shrinkage towards the diagonal, by the number of tokens or by their halves.

With at least max(1024, 4 K) tokens it is .5. With fewer, 64 rows are really quantized with the curvature of one half of
the tokens and measured on the other half, with each shrinkage and without any curvature. If the last is best, or with
fewer than 64 tokens, there is no correction: 16 tokens per expert without this rule lost to codes made without data.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from k2convert.quantize.formats.nvfp4 import dequantize_nvfp4
from k2convert.quantize.gptq.factor import Curvature, even_curvature, make_curvature
from k2convert.quantize.gptq.moments import Moments
from k2convert.quantize.gptq.rounding import RoundingKernel, round_gptq

MIN_TOKENS: Final = 64
LEAST_FULL_TOKENS: Final = 1024
FULL_TOKENS_PER_COLUMN: Final = 4
FULL_SHRINKAGE: Final = 0.5
SHRINKAGES: Final = (0.1, 0.3, 0.6, 0.9)
NUM_ROWS: Final = 64
"""Rows that are quantized to choose."""


def choose_shrinkage(moments: Moments, weight_NK: Tensor, global_scale: float, kernel: RoundingKernel) -> float | None:
    """Return the shrinkage for a weight f32 [N, K] on the device of the moments; None for no error feedback."""
    rows, columns = weight_NK.shape
    if moments.tokens >= max(LEAST_FULL_TOKENS, FULL_TOKENS_PER_COLUMN * columns):
        return FULL_SHRINKAGE
    if moments.tokens < MIN_TOKENS or min(moments.weights) <= 0:
        return None
    sample_NK = weight_NK[:: max(1, rows // NUM_ROWS)][:NUM_ROWS].float()
    halves = moments.halves()

    def lost(curvature: Curvature, form_KK: Tensor) -> float:
        codes = round_gptq(sample_NK, global_scale, curvature, kernel, sweeps=0)
        error_NK = torch.as_tensor(dequantize_nvfp4(codes)).to(sample_NK) - sample_NK
        return float(((error_NK @ form_KK) * error_NK).sum(dtype=torch.float64))

    even = even_curvature(columns, device=str(weight_NK.device))
    least, best = lost(even, halves[0] + halves[1]), None
    for shrinkage in SHRINKAGES:
        loss = sum(lost(make_curvature(halves[a], shrinkage), halves[1 - a]) for a in (0, 1))
        if loss < least:
            least, best = loss, shrinkage
    return best
