"""Tokens of a layer: some of them, drawn as they come, and their sums of squares."""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import torch
from torch import Tensor

SAMPLED_TOKENS: Final = 256
"""Tokens that a choice is made by."""

_CHUNK_ROWS: Final = 64  # in FP64 they fit into a core's cache


class TokenSample:
    """SAMPLED_TOKENS of the tokens that come: those with the smallest of random numbers, which `name` draws."""

    def __init__(self, name: str) -> None:
        self._generator = np.random.RandomState(zlib.crc32(name.encode()))
        self._numbers = np.empty(0)
        self._inputs = torch.empty(0)
        self._weights = torch.empty(0, dtype=torch.float64)

    def add(self, x_TK: Tensor, weights: Tensor) -> None:
        """Take from inputs f32 [T, K] with token weights f64 [T]."""
        before = self._numbers.size
        numbers = np.concatenate([self._numbers, self._generator.random_sample(x_TK.shape[0])])
        kept = np.sort(np.argsort(numbers, kind="stable")[:SAMPLED_TOKENS])
        old = torch.as_tensor(kept[kept < before])
        new = torch.as_tensor(kept[kept >= before] - before).to(x_TK.device)
        inputs = x_TK[new].cpu()
        self._numbers = numbers[kept]
        self._inputs = torch.cat([self._inputs[old], inputs]) if before else inputs
        self._weights = torch.cat([self._weights[old], weights[new].cpu()])

    def weighted(self, mean_weight: float) -> Tensor:
        """Return the inputs times the roots of their weights over `mean_weight`, f32 [n, K]."""
        return self._inputs * (self._weights / mean_weight).sqrt().float()[:, None]


def weighted_squares(values: Tensor, weights: Tensor) -> Tensor:
    """Return sum_t weights[t] * values[t]^2 as f64 [I], for f32 [t, I] and f64 [t]."""
    total = torch.zeros(values.shape[1], dtype=torch.float64, device=values.device)
    for start in range(0, values.shape[0], _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        total += values[rows].double().square_().mul_(weights[rows, None]).sum(dim=0)
    return total
