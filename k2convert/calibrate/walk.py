"""The pass: one decoder layer at a time over the hidden states of all windows, some windows at a time.

    embedding -> layer 0 -> hidden states on disk -> layer 1 -> ...
                    |                                  |
              statistics on disk                 statistics on disk

Memory: the hidden states of one chunk of windows, one expert, and what the accumulator keeps. A dense MLP is as wide as
all experts of a token together, so on the CPU its layer takes fewer windows at one time. A window with a value
that is not finite is dropped: nothing of it is counted in the layer where that happens, nor in later ones.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.calibrate.accumulate import LayerAccumulator
from k2convert.calibrate.statistics import LayerStatistics
from k2convert.calibrate.work import HiddenStates, WorkFolder
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import CalibrationError
from k2convert.forward.decoder import BlockObserver, DecoderLayer, embed
from k2convert.forward.router import Routing
from k2convert.forward.weights import WeightReader
from k2convert.records.events import Events

MAX_DROPPED: Final = 0.1
"""The share of dropped windows above which a pass stops."""

MIN_KINDS: Final = 32
"""Different token ids that a text must have for anything to be fitted to it."""

DENSE_TOKENS: Final = 2048
"""Tokens of a dense layer that a CPU computes at one time. It reads their weights once however few they are."""


@dataclass(frozen=True, slots=True)
class Walk:
    """What a pass walks over.

    `ids` are the tokens, int64 [windows, tokens]. `chunk` windows are computed at one time. `around` makes the context
    in which a layer can be read, and gives the checkpoint to read it from.
    """

    ids: NDArray[np.int64]
    num_layers: int
    hidden_size: int
    seed: int
    chunk: int
    devices: tuple[str, ...]
    workers: int
    around: Callable[[int], AbstractContextManager[Checkpoint]]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the hidden states: windows, tokens, hidden."""
        return (self.ids.shape[0], self.ids.shape[1], self.hidden_size)

    @property
    def is_varied(self) -> bool:
        """Whether the tokens are of enough kinds. A few kinds over and over say nothing about other tokens."""
        return np.unique(self.ids).size >= min(MIN_KINDS, self.ids.size) > 1

    def windows_at_once(self, *, dense: bool) -> int:
        """Return how many windows of a layer are computed at one time."""
        is_narrow = dense and self.devices[0] == "cpu"
        return min(self.chunk, max(1, DENSE_TOKENS // self.ids.shape[1])) if is_narrow else self.chunk


Save = Callable[[LayerStatistics, int], None]
"""Records a layer as done: gets its statistics and how many windows are dropped so far."""


@torch.no_grad()
def walk_layers(walk: Walk, work: WorkFolder, *, save: Save, events: Events) -> None:
    """Compute the layers that are not done, in order; `save` must write what `work.num_finished` counts.

    Raises CalibrationError if more than a tenth of the windows has to be dropped, and what reading and writing raise.
    """
    torch.set_num_threads(1)  # the workers are the threads: sums do not depend on how many there are
    first = work.num_finished()
    work.sweep(first)
    for layer in range(first, walk.num_layers):
        with walk.around(layer) as source, closing(WeightReader(source)) as reader:
            statistics, dropped = _walk_layer(walk, work, reader, layer, events)
        save(statistics, dropped)
        work.sweep(layer + 1)
        gc.collect()  # a layer refers to itself: at the width of K2 the peak is 2.9 GB without this, and 2.2 GB with it


def _walk_layer(
    walk: Walk, work: WorkFolder, reader: WeightReader, layer: int, events: Events
) -> tuple[LayerStatistics, int]:
    """Compute one layer and write the hidden states that the next one takes; returns statistics and dropped windows."""
    decoder = DecoderLayer(reader, layer, walk.devices, walk.workers)
    accumulator = LayerAccumulator(reader, layer, seed=walk.seed, fits_norms=walk.is_varied)
    progress = Progress(events)
    num_windows, dropped = walk.shape[0], 0
    step = walk.windows_at_once(dense=decoder.is_dense)
    with reading_inputs(walk, work, reader, layer) as read, writing_outputs(walk, work, layer) as write:
        for first in range(0, num_windows, step):
            states = read(first, min(first + step, num_windows))
            dropped += advance(states, decoder, accumulator, progress, first * walk.shape[1])
            check_dropped(dropped, num_windows, layer=layer)
            write(states)
    statistics = accumulator.finish()
    progress.reach(walk.ids.size)
    return statistics, dropped


def check_dropped(dropped: int, num_windows: int, *, layer: int) -> None:
    """Stop a pass that had to drop more than MAX_DROPPED of its windows; raises CalibrationError."""
    if dropped > MAX_DROPPED * num_windows:
        raise CalibrationError(
            f"layer {layer}: the hidden states of {dropped:,} of {num_windows:,} windows are not finite. "
            "The weights of this layer or an earlier one are damaged. Download the source again."
        )


@contextmanager
def reading_inputs(
    walk: Walk, work: WorkFolder, reader: WeightReader, layer: int
) -> Generator[Callable[[int, int], HiddenStates]]:
    """Yield a function that returns windows [first, stop) of what a layer takes; the first takes the embedding."""
    if layer == 0:
        yield lambda first, stop: embed(reader, torch.as_tensor(walk.ids[first:stop])).numpy()
        return
    with work.reading_hidden(layer, walk.shape) as read:
        yield read


@contextmanager
def writing_outputs(walk: Walk, work: WorkFolder, layer: int) -> Generator[Callable[[HiddenStates], None]]:
    """Yield a function that keeps what a layer gives. Nothing takes what the last layer gives."""
    if layer + 1 == walk.num_layers:
        yield lambda _: None
        return
    with work.writing_hidden(layer + 1, walk.shape) as write:
        yield write


def advance(
    states: HiddenStates, decoder: DecoderLayer, observer: BlockObserver, progress: Progress, begin: int
) -> int:
    """Replace the hidden states of a chunk by what the layer makes of them; returns how many windows are dropped.

    Dropped windows become NaN. If a window turns out to be not finite, the others are computed again without it.
    `begin` tokens of the layer were computed before.
    """
    kept = np.asarray(np.isfinite(states).all(axis=(1, 2)))
    while kept.any():
        inputs = torch.as_tensor(states if kept.all() else states[kept])
        try:
            result = decoder.run(inputs, _Watched(observer, progress, begin, states.shape[1], inputs.shape[0]))
        except _NotFiniteError as error:
            kept[np.flatnonzero(kept)[error.windows]] = False
        else:
            states[kept] = result.cpu().numpy()
            break
    states[~kept] = np.nan
    return int(np.count_nonzero(~kept))


class _NotFiniteError(Exception):
    """Some windows are not finite after the layer: their places among those computed, int64."""

    def __init__(self, windows: NDArray[np.int64]) -> None:
        super().__init__()
        self.windows = windows


@dataclass(slots=True)
class Progress:
    """Reports the tokens of a layer as they are computed. A chunk that is computed again reports nothing twice.

    The last ones are reported when the statistics are made, which takes its time. `share` is what a token counts.
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
    """Passes what a layer reports on to the observer, unless a window is not finite; reports progress."""

    observer: BlockObserver
    progress: Progress
    begin: int
    window: int
    num_windows: int
    num_experts: int = 1

    def block(self, x_TK: Tensor, routing: Routing | None) -> None:
        """Take the input of the MLP."""
        self.num_experts = 1 if routing is None else routing.scores.shape[1]
        self.observer.block(x_TK, routing)

    def expert(
        self, expert: int | None, tokens_t: Tensor, weights_t: Tensor | None, inner_tI: Tensor, output_tK: Tensor
    ) -> None:
        """Take what one MLP did."""
        self.observer.expert(expert, tokens_t, weights_t, inner_tI, output_tK)
        if expert is not None:
            tokens = self.num_windows * self.window * (expert + 1) // (self.num_experts + 1)
            self.progress.reach(self.begin + tokens)

    def output(self, h_TK: Tensor) -> None:
        """Take the hidden states after the layer; raises _NotFiniteError."""
        windows = h_TK.view(self.num_windows, -1)
        is_finite = np.array([bool(windows[number].isfinite().all()) for number in range(self.num_windows)])
        if not is_finite.all():
            raise _NotFiniteError(np.flatnonzero(~is_finite))
        self.observer.output(h_TK)
