"""Real inputs of MoE blocks: the source's own layers, run on a text in FP32 up to the layers that are checked."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.checkpoint.index import Checkpoint
from k2convert.forward.router import Routing
from k2convert.forward.walk import Walk, walk_layers
from k2convert.forward.work import HiddenStates, ReadStates, WriteStates
from k2convert.models import read_architecture
from k2convert.records.events import Events


@torch.no_grad()
def states_of_text(
    source: Checkpoint, ids: NDArray[np.int64], layers: Collection[int], *, events: Events
) -> Iterator[tuple[int, Tensor]]:
    """Yield each of `layers`, in their order in the model, with the input f32 [tokens, hidden] of its MLP.

    `ids` i64 [windows, tokens] are the text. The layers below are computed too; CheckpointError if one cannot be.
    """
    walk = Walk(
        ids=ids,
        num_layers=max(layers) + 1,
        hidden_size=read_architecture(source).hidden_size,
        chunk=ids.shape[0],
        devices=("cpu",),
        workers=len(os.sched_getaffinity(0)),
        around=lambda _: nullcontext(source),
    )
    with closing(walk_layers(walk, _Memory(), events=events)) as walked:
        for layer in walked:
            observer = _Observer(layer.number, events)
            found: list[Tensor] = []
            with layer.writing() as write:
                for chunk in layer.chunks():
                    (states,) = chunk.streams
                    if layer.is_last:
                        found.append(layer.decoder.mlp_input(torch.as_tensor(states)))
                        continue
                    layer.run(chunk.first, states, observer)
                    found += [] if observer.states is None else [observer.states]
                    write(states)
            if layer.number in layers:
                yield layer.number, torch.cat(found)


@dataclass(slots=True)
class _Memory:
    """Hidden states in memory: one layer's at a time."""

    kept: dict[int, list[HiddenStates]] = field(default_factory=dict[int, list[HiddenStates]])

    def num_finished(self) -> int:
        return 0

    def sweep(self, first: int) -> None:
        self.kept.pop(first - 1, None)

    @contextmanager
    def reading(self, stream: str, layer: int, shape: tuple[int, int, int]) -> Generator[ReadStates]:  # noqa: ARG002
        states = np.concatenate(self.kept[layer])
        yield lambda first, stop: states[first:stop]

    @contextmanager
    def writing(self, stream: str, layer: int, shape: tuple[int, int, int]) -> Generator[WriteStates]:  # noqa: ARG002
        self.kept[layer] = []
        yield self.kept[layer].append


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
