"""The product of activations and a weight in FP32: oneDNN's kernel on the CPU.

torch multiplies FP32 with MKL, which is slow on AMD. One core of Zen 5, 170 tokens by [2048, 7168], decoding included:
118 GFLOP/s with oneDNN, 58 with MKL. 2,048 tokens: 130 and 66. The operator is the one that torch's compiler emits.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

ROWS: Final = 16
"""oneDNN keeps 0.6 MB for every new shape. Rounding the number of tokens up to a multiple of this keeps them few."""


def multiply(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x W^T in f32 [T, N] for f32 [T, K] and f32 [N, K]."""
    tokens = x_TK.shape[0]
    if x_TK.device.type != "cpu" or tokens == 0 or not torch.backends.mkldnn.is_available():
        return torch.nn.functional.linear(x_TK, weight_NK)
    if missing := -tokens % ROWS:
        x_TK = torch.nn.functional.pad(x_TK, (0, 0, 0, missing))
    onednn: Any = torch.ops.mkldnn
    return onednn._linear_pointwise(x_TK, weight_NK, None, "none", [], "")[:tokens]
