"""Rule gptq computed directly in float64: the oracle of quantize/gptq."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.quantize.formats.nvfp4 import E2M1_VALUES, Nvfp4Weight, decode_e4m3, dequantize_nvfp4
from k2convert.quantize.gptq.moments import STRENGTHS

Array = NDArray[np.float64]
NORMAL = np.arange(0x08, 0x7F)


@dataclass(frozen=True)
class Tokens:
    """Inputs [t, K], what they lack [t, N], weights [t] and halves [t] of some tokens."""

    inputs: Array
    residual: Array
    weights: Array
    halves: NDArray[np.int64]

    def half(self, half: int) -> "Tokens":
        chosen = self.halves == half
        return Tokens(self.inputs[chosen], self.residual[chosen], self.weights[chosen], self.halves[chosen])

    @property
    def hessian(self) -> Array:
        return (self.inputs * self.weights[:, None]).T @ self.inputs / self.weights.sum()

    @property
    def cross(self) -> Array:
        return (self.residual * self.weights[:, None]).T @ self.inputs / self.weights.sum()

    def mean_square(self, rows_tN: Array) -> float:
        """The mean of w |r|^2."""
        return float((self.weights[:, None] * rows_tN**2).sum() / self.weights.sum())


def ridge(tokens: Tokens, cross: Array, strength: float) -> Array:
    """D (H + lambda P)^-1 with the H of all tokens."""
    hessian = tokens.hessian
    penalty = np.diag((np.diag(hessian) + np.diag(hessian).mean()) / 2)
    return np.linalg.solve((hessian + strength * penalty).T, cross.T).T


def ridge_target(tokens: Tokens) -> tuple[Array, float | None]:
    """The correction and its strength, from what is left of `residual` on the tokens of the other half."""

    def removed(strength: float) -> float:
        total = 0.0
        for a in (0, 1):
            other = tokens.half(1 - a)
            correction = ridge(tokens, tokens.half(a).cross, strength)
            left = other.residual - other.inputs @ correction.T
            total += other.mean_square(other.residual) - other.mean_square(left)
        return total

    best = max(STRENGTHS, key=removed)
    if removed(best) <= 0:
        return np.zeros_like(tokens.cross), None
    return ridge(tokens, tokens.cross, best / 2), best


def compensated(row: Array, values: Array, hessian: Array) -> Array:
    """The best weights of the columns from len(values) on, if those before have these values."""
    done = len(values)
    answer = np.linalg.solve(hessian[done:, done:], hessian[done:, :done] @ (row[:done] - values))
    return row[done:] + answer


def nearest(scaled: float) -> float:
    """E2M1's nearest value, ties to the even code."""
    size = abs(scaled)
    code = min(range(8), key=lambda code: (abs(size - E2M1_VALUES[code]), code % 2))
    return float(np.copysign(E2M1_VALUES[code], scaled))


def round_block(block: Array, hessian: Array, byte: int, unit: float) -> tuple[Array, float]:
    """Values of a block under a scale, each column answering those before, and the loss if all behind could answer too.

    `hessian` is that of the block and of the columns behind it.
    """
    step = float(decode_e4m3(np.array(byte, dtype=np.uint8))) * unit
    row = np.concatenate([block, np.zeros(hessian.shape[0] - len(block))])
    values = np.empty(len(block))
    for j in range(len(block)):
        current = compensated(row, values[:j], hessian)[0]
        values[j] = nearest(current / step) * step
    behind = compensated(row, values, hessian)
    error = row - np.concatenate([values, behind])
    return values, float(error @ hessian @ error)


def losses(target_NK: Tensor, codes: Nvfp4Weight, hessian_KK: Tensor) -> Array:
    """(w - q) H (w - q)^T of each row."""
    error = target_NK.double().numpy() - dequantize_nvfp4(codes)
    return ((error @ hessian_KK.double().numpy()) * error).sum(axis=1)


def correlated(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs f32 [t, K] with strong correlations and columns of different size."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * torch.rand(columns, generator=generator)
    noise = torch.randn(tokens, columns, generator=generator)
    return noise @ mixing / columns**0.5 + torch.randn(tokens, 1, generator=generator)


def form_of(inputs_tK: Tensor) -> Tensor:
    return inputs_tK.T @ inputs_tK / inputs_tK.shape[0]


def weights(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Weights f32 [N, K]."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
