"""The one loop over the layers of a model, one layer at a time, some windows of a text at a time.

    embedding -> layer 0 -> hidden states -> layer 1 -> ...
                    |                           |
                 observer                    observer

The caller gets each layer, runs its chunks under an observer of its own (decoder.BlockObserver), and declares it done.
A layer may have several streams of hidden states: those of the source's model, and of one that is made on the way. The
streams are the only state between layers. With attention residuals (residual.py), a layer also reads the states of its
stream before the layers that began a block. They are on disk (work.py), so that a layer pass can be interrupted and
resumed.

Several models can be compared in one layer pass. Each layer is then yielded once for each model, one after the other,
so that only one of them is in memory.

Memory: the hidden states of one chunk of windows, one expert, and what the observer keeps. A dense MLP is as wide as
all experts of a token together, so on the CPU its layer computes fewer windows at a time. A window with a value that is
not finite in the first model is dropped: nothing of it is counted in the layer where that happens, nor in later ones.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.errors import CalibrationError, CheckpointError
from k2convert.forward.decoder import BlockObserver, DecoderLayer, embed
from k2convert.forward.layer_pass import LayerPass, PassModel
from k2convert.forward.moe import MlpTokens, Routing
from k2convert.forward.weights import WeightReader
from k2convert.forward.work import HiddenStates, ReadStates, WriteStates
from k2convert.records.events import Events

MAX_DROPPED: Final = 0.1
"""The share of dropped windows above which a layer pass stops."""


def each_layer(layer_pass: LayerPass) -> Generator[Layer]:
    """Yield the layers that are not done, in order; the caller runs each and declares it done in the work folder.

    Its body needs torch.no_grad(). Raises what reading and writing raise.
    """
    work = layer_pass.work
    torch.set_num_threads(1)  # the workers are the threads: sums do not depend on how many there are
    first = work.num_finished()
    work.delete_before(first)
    for number in range(first, layer_pass.num_layers):
        for checkpoint, models in groupby(layer_pass.models, key=lambda model: model.checkpoint):
            step = number * layer_pass.num_checkpoints + checkpoint
            with layer_pass.shards.part(step) as source, closing(WeightReader(source)) as reader:
                for model in models:
                    layer = Layer(layer_pass, reader, number, model)
                    with layer.opened:
                        yield layer
                    del layer.decoder
                    gc.collect()  # its parts refer to each other: at the width of K2 the peak is 0.7 GB less with this
        work.delete_before(number + 1)


class Layer:
    """One layer of one model of a layer pass. Its decoder is gone when the next one is yielded."""

    def __init__(self, layer_pass: LayerPass, reader: WeightReader, number: int, model: PassModel) -> None:
        self.layer_pass = layer_pass
        self.reader = reader
        self.number = number
        self.model = model
        self.decoder = DecoderLayer(
            reader,
            number,
            layer_pass.text.devices,
            layer_pass.text.threads,
            fp4_inputs=model.fp4_activations,
            fp8_cache=model.fp8_cache,
        )
        self.progress = Progress(layer_pass.shards.events)
        self.opened = ExitStack()  # the files that its chunks are read from, closed with the layer if not before
        self.dropped = 0
        self._blocks: list[ReadStates] = []

    @property
    def is_last(self) -> bool:
        """Return whether no layer reads what this one gives."""
        return self.number + 1 == self.layer_pass.num_layers

    @contextmanager
    def reading(self, stream: str) -> Generator[ReadStates]:
        """Yield a function that reads windows [first, stop) of a stream; the first layer reads the embedding."""
        if self.number == 0:
            ids = self.layer_pass.ids
            yield lambda first, stop: embed(self.reader, torch.as_tensor(ids[first:stop])).numpy()
            return
        with self.layer_pass.work.reading(stream, self.number, self.layer_pass.shape) as read:
            yield read

    @contextmanager
    def writing(self, stream: str | None = None) -> Generator[WriteStates]:
        """Yield a function that keeps what the layer gives: of its model, or of another stream.

        What the last layer gives is not kept, unless the pass goes on to the heads.
        """
        if self.is_last and self.layer_pass.num_steps == self.layer_pass.num_layers:
            yield lambda _: None
            return
        with self.layer_pass.work.writing(stream or self.model.stream, self.number + 1, self.layer_pass.shape) as write:
            yield write

    def chunks(self, streams: tuple[str, ...] = (), *, apart: int = 0) -> Iterator[tuple[int, list[HiddenStates]]]:
        """Yield the number of each chunk's first window, and what the layer reads of the model's or of several streams.

        No chunk has windows of both kinds: the last `apart` ones, and the others.
        """
        num_windows = self.layer_pass.shape[0]
        border = num_windows - apart
        step = self.layer_pass.text.windows_at_once(dense=self.decoder.is_dense)
        with self.opened as opened:
            reads = [opened.enter_context(self.reading(stream)) for stream in streams or (self.model.stream,)]
            self._blocks = [*map(opened.enter_context, self.layer_pass.reading_blocks(self.model, self.number))]
            keep: WriteStates | None = None
            if self.number == 0 and self.layer_pass.work.residual_block:
                writing = self.layer_pass.work.writing(self.model.stream, 0, self.layer_pass.shape)
                keep = opened.enter_context(writing)
            for first in (*range(0, border, step), *range(border, num_windows, step)):
                stop = min(first + step, border if first < border else num_windows)
                states = [read(first, stop) for read in reads]
                if keep is not None:
                    keep(states[0])
                yield first, states

    def run(self, first: int, states: HiddenStates, observer: BlockObserver) -> None:
        """Replace the hidden states of a chunk by those after the layer; `first` is the number of its first window.

        Dropped windows become NaN. If a window turns out to be not finite, the others are computed again without it.
        Raises CalibrationError if more than a tenth of all windows has to be dropped, and CheckpointError if a window
        of another model than the first is not finite.
        """
        begin = first * self.layer_pass.shape[1]
        retained = finite_windows(states)
        blocks = [read(first, first + states.shape[0]) for read in self._blocks]
        while retained.any():
            inputs = torch.as_tensor(states if retained.all() else states[retained])
            watched = _Watched(observer, self.progress, begin, states.shape[1], inputs.shape[0])
            try:
                befores = [torch.as_tensor(block if retained.all() else block[retained]) for block in blocks]
                result = self.decoder.run(inputs, watched, befores)
            except _NotFiniteError as error:
                if self.model.name:
                    raise CheckpointError(
                        f"{self.model.name}: layer {self.number}: the hidden states are not finite where those of the "
                        "reference are. The weights of this layer or an earlier one are damaged, or its activations do "
                        "not fit its input scales. Leave this checkpoint out, or repair it."
                    ) from None
                retained[np.flatnonzero(retained)[error.windows]] = False
            else:
                states[retained] = result.cpu().numpy()
                break
        states[~retained] = np.nan
        self.dropped += int(np.count_nonzero(~retained))
        if self.dropped > MAX_DROPPED * self.layer_pass.shape[0]:
            raise CalibrationError(
                f"layer {self.number}: the hidden states of {self.dropped:,} of {self.layer_pass.shape[0]:,} windows "
                "are not finite. The weights of this layer or an earlier one are damaged. Download the source again."
            )


def finite_windows(states: HiddenStates) -> NDArray[np.bool_]:
    """Return which windows of hidden states are finite, bool [windows]."""
    return np.asarray(np.isfinite(states).all(axis=(1, 2)))


class _NotFiniteError(Exception):
    """Some windows are not finite after the layer: their places among those computed, int64."""

    def __init__(self, windows: NDArray[np.int64]) -> None:
        super().__init__()
        self.windows = windows


@dataclass(slots=True)
class Progress:
    """Reports the tokens of a layer as they are computed. A chunk that is computed again reports nothing twice.

    The last ones are reported when the layer is done. `share` is how much one token counts.
    """

    events: Events
    share: float = 1.0
    reported: int = 0

    def reach(self, tokens: int) -> None:
        """Report that this many tokens are computed."""
        tokens = int(tokens * self.share)
        if tokens > self.reported:
            self.events.tokens_computed(tokens - self.reported)
            self.reported = tokens


@dataclass(slots=True)
class _Watched:
    """Passes a layer's reports to the observer, unless a window is not finite; reports progress."""

    observer: BlockObserver
    progress: Progress
    begin: int
    window: int
    num_windows: int
    num_experts: int = 1

    def block(self, x_TK: Tensor, routing: Routing | None) -> None:
        self.num_experts = 1 if routing is None else routing.scores.shape[1]
        self.observer.block(x_TK, routing)

    def expert(self, mlp: MlpTokens) -> None:
        self.observer.expert(mlp)
        if mlp.expert is not None:
            tokens = self.num_windows * self.window * (mlp.expert + 1) // (self.num_experts + 1)
            self.progress.reach(self.begin + tokens)

    def output(self, h_TK: Tensor) -> None:
        windows = h_TK.view(self.num_windows, -1)
        is_finite = np.array([bool(windows[number].isfinite().all()) for number in range(self.num_windows)])
        if not is_finite.all():
            raise _NotFiniteError(np.flatnonzero(~is_finite))
        self.observer.output(h_TK)
