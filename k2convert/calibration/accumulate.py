"""What the smoothing of a MoE layer is chosen by, summed while the layer runs. It is an observer of forward/decoder.py.

A token's weight is 1 / ||h||^2 of the layer's output h, which is known last, so the input of a chunk is kept until
then. Sums are FP64, added in the order of the tokens, and divided once at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.calibration.smoothing import SAMPLED_TOKENS, TokenSample, find_exponents
from k2convert.errors import CalibrationError
from k2convert.forward.moe import Routing
from k2convert.forward.weights import WeightReader

_CHUNK_ROWS: Final = 64  # in FP64 they fit into a core's cache
_CUDA_CHUNK_ROWS: Final = 1 << 15


class LayerAccumulator:
    """Counts the tokens of each routed expert of a layer, and sums its weighted input, over chunks in order.

    `seed` draws the tokens that smoothing is chosen by.
    """

    def __init__(self, layer: int, *, num_experts: int, seed: int) -> None:
        self.tokens_E = np.zeros(num_experts, dtype=np.int64)
        self._layer = layer
        self._seed = seed
        self._num_tokens = 0
        self._weight = 0.0
        self._squares_K: Tensor | None = None
        self._sample = TokenSample(f"tokens/{seed}/{layer}")

    def add(self, x_TK: Tensor, routing: Routing, weights_T: Tensor) -> None:
        """Add a chunk: the MLP's input f32 [T, K], its routing, and the weights f64 [T] of its tokens."""
        chosen = routing.experts.flatten().cpu().numpy()
        self.tokens_E += np.bincount(chosen, minlength=self.tokens_E.size)
        added_K = torch.zeros(x_TK.shape[1], dtype=torch.float64, device=x_TK.device)
        for rows in _chunks(x_TK):
            added_K += x_TK[rows].double().square_().mul_(weights_T[rows, None]).sum(dim=0)
        self._squares_K = added_K if self._squares_K is None else self._squares_K + added_K
        self._num_tokens += x_TK.shape[0]
        self._weight += float(weights_T.sum())
        self._sample.add(x_TK, weights_T)

    def find_exponents(self, reader: WeightReader) -> NDArray[np.int8] | None:
        """Return the smoothing exponents int8 [K]; None if no channel gains, or with fewer than SAMPLED_TOKENS tokens.

        Raises CalibrationError if there is nothing to divide by, and what reading the source raises.
        """
        if self._num_tokens < SAMPLED_TOKENS:  # 64 tokens made k2-tiny worse by 2 %
            return None
        if not self._weight > 0:
            raise CalibrationError(
                f"layer {self._layer}: no hidden state is finite and not zero. Check the source and the text."
            )
        assert self._squares_K is not None
        mean_weight = self._weight / self._num_tokens
        exponents = find_exponents(
            reader,
            self._layer,
            inputs=self._sample.weighted(mean_weight),
            mean_square=(self._squares_K / (mean_weight * self._num_tokens)).float().cpu().numpy(),
            seed=self._seed,
        )
        return exponents if exponents.any() else None


def token_weights(h_TK: Tensor) -> Tensor:
    """Return 1 / ||h||^2 of each token, f64 [T]; 0 for a hidden state of zeros."""
    squares_T = torch.empty(h_TK.shape[0], dtype=torch.float64, device=h_TK.device)
    for rows in _chunks(h_TK):
        squares_T[rows] = h_TK[rows].double().square_().sum(dim=1)
    return torch.where(squares_T > 0, 1 / squares_T, 0.0)


def _chunks(values: Tensor) -> Iterator[slice]:
    """Yield rows of f32 [t, I] that are summed in FP64 at once: few on a CPU, many on a GPU."""
    step = _CUDA_CHUNK_ROWS
    if values.device.type == "cpu":
        step = _CHUNK_ROWS
    for start in range(0, values.shape[0], step):
        yield slice(start, start + step)
