"""Real inputs of MoE blocks: the source's own layers, run on a text in FP32 up to the layers that are checked."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.router import Routing
from k2convert.forward.weights import WeightReader
from k2convert.records.events import Events


def states_of_text(
    source: WeightReader, ids: NDArray[np.int64], layers: Collection[int], *, events: Events
) -> Iterator[tuple[int, Tensor]]:
    """Yield each of `layers`, in their order in the model, with the input f32 [tokens, hidden] of its MLP.

    `ids` i64 [windows, tokens] are the text. The layers below are computed too; CheckpointError if one cannot be.
    """
    hidden = embed(source, torch.as_tensor(ids))
    workers = len(os.sched_getaffinity(0))
    for number in range(max(layers) + 1):
        layer = DecoderLayer(source, number, workers=workers)
        if number == max(layers):
            yield number, layer.mlp_input(hidden)
            return
        observer = _Observer(number, events)
        hidden = layer.run(hidden, observer)
        if number in layers and observer.states is not None:
            yield number, observer.states


@dataclass(slots=True)
class _Observer:
    """Keeps the input of a layer's MLP, and reports the experts while they are computed.

    An expert that no token chose counts as computed.
    """

    layer: int
    events: Events
    states: Tensor | None = None
    done: int = 0
    total: int = 0

    def block(self, x_TK: Tensor, routing: Routing | None) -> None:
        self.states = x_TK
        self.total = 0 if routing is None else routing.scores.shape[1]

    def expert(
        self,
        expert: int | None,
        tokens_t: Tensor,  # noqa: ARG002
        weights_t: Tensor | None,  # noqa: ARG002
        inner_tI: Tensor,  # noqa: ARG002
        output_tK: Tensor,  # noqa: ARG002
    ) -> None:
        self._reach(self.done if expert is None else min(expert + 1, self.total))

    def output(self, h_TK: Tensor) -> None:  # noqa: ARG002
        self._reach(self.total)

    def _reach(self, done: int) -> None:
        while self.done < done:
            self.done += 1
            self.events.experts_computed(self.layer, self.done, self.total)
