"""What the tokens of a layer bring to its conversion, gathered chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from k2convert.calibrate.accumulate import LayerAccumulator
from k2convert.calibrate.feedback_layer import LayerInputs
from k2convert.forward.router import Routing
from k2convert.quantize.feedback.moments import Moments


@dataclass(slots=True)
class Tee:
    """Passes reports of a layer on to the accumulator, if any; keeps the MLP's input `x` and the output `hidden`.

    Both are f32 [T, K].
    """

    accumulator: LayerAccumulator | None
    x: Tensor = field(default_factory=lambda: torch.empty(0))
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))

    def block(self, x_TK: Tensor, routing: Routing | None) -> None:
        """Take the input of the MLP."""
        self.x = x_TK
        if self.accumulator is not None:
            self.accumulator.block(x_TK, routing)

    def expert(
        self, expert: int | None, tokens_t: Tensor, weights_t: Tensor | None, inner_tI: Tensor, output_tK: Tensor
    ) -> None:
        """Take what one MLP did."""
        if self.accumulator is not None:
            self.accumulator.expert(expert, tokens_t, weights_t, inner_tI, output_tK)

    def output(self, h_TK: Tensor) -> None:
        """Take the hidden states after the layer."""
        self.hidden = h_TK
        if self.accumulator is not None:
            self.accumulator.output(h_TK)


class CollectedTokens:
    """What all chunks of a layer bring, on one device. It has room for `tokens` of them."""

    def __init__(self, tokens: int, hidden_size: int, device: str) -> None:
        self._x = torch.empty(tokens, hidden_size, device=device)
        self._residual = torch.empty_like(self._x)
        self._routings: list[Routing] = []
        self._weights: list[Tensor] = []
        self._halves: list[Tensor] = []
        self._moments = Moments.start(hidden_size, hidden_size, device=device)
        self._count = 0

    def add(
        self,
        x_TK: Tensor,
        missing_TK: Tensor,
        residual_TK: Tensor,
        routing: Routing,
        weights: Tensor,
        halves: Tensor | None,
    ) -> None:
        """Add the tokens of one chunk; those that nothing is fitted to come last, and have no halves."""
        places = slice(self._count, self._count + x_TK.shape[0])
        self._x[places], self._residual[places] = x_TK, residual_TK
        self._count = places.stop
        self._routings.append(routing)
        self._weights.append(weights)
        if halves is not None:
            halves = halves.to(x_TK.device)
            self._moments.add(x_TK, missing_TK, weights, halves)
            self._halves.append(halves)

    def finish(self) -> LayerInputs:
        """Return everything, and keep nothing of it."""
        moments = self._moments
        del self._moments
        return LayerInputs(
            x=self._x[: self._count],
            residual=self._residual[: self._count],
            routing=Routing.concatenate(self._routings),
            token_weights=torch.cat(self._weights),
            halves=torch.cat(self._halves),
            gate_up=moments,
        )
