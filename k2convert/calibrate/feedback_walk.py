"""The walk of rule `feedback`: calibration and conversion in one, layer by layer.

    embedding ->  h of the INT4 model             -> layer -> ... -> statistics
              ->  hh of what is converted so far  -> layer -> ... -> codes

Every layer takes both streams. The INT4 stream is the pass of `calibrate` (walk.py), with the same statistics. In a MoE
layer the experts are then converted so that the other stream comes out as this one (feedback_layer.py). Attention,
router and shared experts are the source's in both streams, and no activation is quantized: one result serves W4A16 and
W4A4. The streams are the only state between layers. All tokens of a layer are on the first device at one time.

Some windows are kept out of everything that is fitted, the statistics too. They are the last ones of both streams, and
each layer's error is measured on them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.calibrate.accumulate import LayerAccumulator, token_weights
from k2convert.calibrate.feedback_layer import DOWN, GATE, UP, LayerConverter, LayerInputs
from k2convert.calibrate.feedback_tokens import CollectedTokens, Tee
from k2convert.calibrate.feedback_work import FeedbackWork
from k2convert.calibrate.layer_codes import writing_layer_codes
from k2convert.calibrate.statistics import LayerStatistics
from k2convert.calibrate.text import held_out
from k2convert.calibrate.walk import Progress, Save, Walk, advance, check_dropped, reading_inputs, writing_outputs
from k2convert.calibrate.work import HiddenStates
from k2convert.errors import CalibrationError
from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.weights import WeightReader
from k2convert.models import detect_family
from k2convert.records.events import Events

STREAMS_SHARE: Final = 0.3
"""The share of a MoE layer's progress that computing the streams is. The rest is converting."""


@dataclass(frozen=True, slots=True)
class FeedbackWalk:
    """A walk, whether norms are scaled, and `check_stop`, which is called often and raises if the walk has to stop."""

    walk: Walk
    norm_scaling: bool
    check_stop: Callable[[], None]


@torch.no_grad()
def walk_with_feedback(feedback: FeedbackWalk, work: FeedbackWork, *, save: Save, events: Events) -> None:
    """Convert the layers that are not done, in order; `save` must write what `work.num_finished` counts.

    Raises what `walk_layers` and `check_stop` raise.
    """
    torch.set_num_threads(1)  # the workers are the threads: sums do not depend on how many there are
    walk = feedback.walk
    order = np.argsort(held_out(walk.ids.shape[0]), kind="stable")
    feedback = replace(feedback, walk=(walk := replace(walk, ids=walk.ids[order])))
    first = work.num_finished()
    work.sweep(first)
    for layer in range(first, walk.num_layers):
        with walk.around(layer) as source, closing(WeightReader(source)) as reader:
            statistics, dropped = _Layer(feedback, work, reader, layer, events).run()
        save(statistics, dropped)
        work.sweep(layer + 1)
        gc.collect()  # a layer refers to itself: at the width of K2 the peak is 2.9 GB without this, and 2.2 GB with it


class _Layer:
    """One layer of the walk."""

    def __init__(
        self, feedback: FeedbackWalk, work: FeedbackWork, reader: WeightReader, layer: int, events: Events
    ) -> None:
        walk = feedback.walk
        self._feedback, self._walk, self._work, self._reader, self._layer = feedback, walk, work, reader, layer
        self._decoder = DecoderLayer(reader, layer, walk.devices, walk.workers)
        num_held_out = int(held_out(walk.ids.shape[0]).sum())
        self._fitted = replace(walk, ids=walk.ids[: walk.ids.shape[0] - num_held_out])
        self._accumulator = LayerAccumulator(reader, layer, seed=walk.seed, fits_norms=self._fitted.is_varied)
        self._progress, self._events = Progress(events), events
        self._is_last = layer + 1 == walk.num_layers

    def run(self) -> tuple[LayerStatistics, int]:
        """Do everything but save the statistics; returns them, and how many windows are dropped so far."""
        if self._decoder.is_dense:
            dropped = self._run_dense()
            return self._accumulator.finish(), dropped
        self._progress.share = STREAMS_SHARE
        kept = np.zeros(self._walk.shape[0], dtype=np.bool_)
        collected, dropped = self._collect(kept)
        statistics = self._accumulator.finish()
        residual_TK = self._convert(collected.finish(), statistics)
        if not self._is_last:
            self._write_converted(residual_TK, kept)
        return statistics, dropped

    def _chunks(self) -> Generator[tuple[int, HiddenStates, HiddenStates]]:
        """Yield the first window and both streams of every chunk. A window that is not finite is so in both.

        No chunk has windows of both kinds, those that are fitted to and those that are kept out.
        """
        walk, num_fitted = self._walk, self._fitted.shape[0]
        step = walk.windows_at_once(dense=self._decoder.is_dense)
        with (
            reading_inputs(walk, self._work, self._reader, self._layer) as read,
            self._reading_converted() as read_converted,
        ):
            for first in (*range(0, num_fitted, step), *range(num_fitted, walk.shape[0], step)):
                self._feedback.check_stop()
                stop = min(first + step, num_fitted if first < num_fitted else walk.shape[0])
                states, converted = (found(first, stop) for found in (read, read_converted))
                states[~np.isfinite(converted).all(axis=(1, 2))] = np.nan
                yield first, states, converted

    @contextmanager
    def _reading_converted(self) -> Generator[Callable[[int, int], HiddenStates]]:
        if self._layer == 0:
            ids = self._walk.ids
            yield lambda first, stop: embed(self._reader, torch.as_tensor(ids[first:stop])).numpy()
            return
        path = self._work.converted_path(self._layer)
        with self._work.reading_states(path, self._walk.shape) as read:
            yield read

    @contextmanager
    def _writing_converted(self) -> Generator[Callable[[HiddenStates], None]]:
        if self._is_last:
            yield lambda _: None
            return
        with self._work.writing_states(self._work.converted_path(self._layer + 1), self._walk.shape) as write:
            yield write

    def _run_dense(self) -> int:
        """Run both streams through a dense layer, which is not converted with feedback; returns the dropped windows."""
        dropped = 0
        with (
            writing_outputs(self._walk, self._work, self._layer) as write,
            self._writing_converted() as write_converted,
        ):
            for first, states, converted in self._chunks():
                dropped += self._advance(first, states, self._tee(first))
                kept = np.asarray(np.isfinite(states).all(axis=(1, 2)))
                if kept.any():
                    converted[kept] = self._decoder.run(torch.as_tensor(converted[kept])).cpu().numpy()
                converted[~kept] = np.nan
                write(states)
                write_converted(converted)
        self._progress.reach(self._walk.ids.size)
        return dropped

    def _advance(self, first: int, states: HiddenStates, observer: Tee) -> int:
        dropped = advance(states, self._decoder, observer, self._progress, first * self._walk.shape[1])
        check_dropped(dropped, self._walk.shape[0], layer=self._layer)
        return dropped

    def _collect(self, kept: NDArray[np.bool_]) -> tuple[CollectedTokens, int]:
        """Run the INT4 stream through the layer, the other one up to its experts; marks the windows that are kept."""
        walk, dropped = self._walk, 0
        collected = CollectedTokens(walk.ids.size, walk.hidden_size, walk.devices[0])
        with writing_outputs(walk, self._work, self._layer) as write:
            for first, states, converted in self._chunks():
                tee = self._tee(first)
                dropped += self._advance(first, states, tee)
                write(states)
                chunk = np.asarray(np.isfinite(states).all(axis=(1, 2)))
                kept[first : first + chunk.size] = chunk
                if not chunk.any():
                    continue
                after_TK, x_TK, routing = self._decoder.attend(torch.as_tensor(converted[chunk]))
                assert routing is not None
                residual_TK = tee.hidden - after_TK - self._decoder.shared_output(x_TK)
                if not (x_TK.isfinite().all() and residual_TK.isfinite().all()):
                    raise CalibrationError(
                        f"layer {self._layer}: the hidden states of the converted model are not finite, those of the "
                        "source are. Use a different text, or convert with --statistics."
                    )
                is_fitted = first < self._fitted.shape[0]
                halves = self._halves(first + np.flatnonzero(chunk)) if is_fitted else None
                collected.add(x_TK, tee.x - x_TK, residual_TK, routing, token_weights(tee.hidden), halves)
        return collected, dropped

    def _tee(self, first: int) -> Tee:
        """Return the observer of a chunk: windows that are kept out are not in the statistics."""
        return Tee(self._accumulator if first < self._fitted.shape[0] else None)

    def _halves(self, windows: NDArray[np.int64]) -> Tensor:
        """Deal the tokens of windows to two halves, uint8 [T]: windows in turn, or one window in the middle."""
        length = self._walk.shape[1]
        if self._fitted.shape[0] == 1:
            return (torch.arange(length) >= length // 2).to(torch.uint8)
        return torch.as_tensor(windows % 2).to(torch.uint8).repeat_interleave(length)

    def _convert(self, inputs: LayerInputs, statistics: LayerStatistics) -> Tensor:
        """Convert the experts and keep their codes and what was decided; returns the residual f32 [T, K]."""
        is_scaled = self._feedback.norm_scaling and statistics.norm_exponents.any()
        path, record = self._work.codes_path(self._layer), self._work.record
        with writing_layer_codes(path, self._shapes(), record=record) as write:
            converter = LayerConverter(
                reader=self._reader,
                mlp=self._mlp,
                exponents=statistics.norm_exponents if is_scaled else None,
                device=self._walk.devices[0],
                workers=self._walk.workers,
                is_varied=self._fitted.is_varied,
                write=write,
                advance=self._reach,
            )
            decided, residual_TK = converter.convert(inputs)
        self._work.write_feedback(self._layer, decided)
        if (found := decided.held_out) is not None and found.is_worse:
            self._events.note(
                f"warning: layer {self._layer}: on the windows that were kept out of the fit, the squared error of the "
                f"outputs is {found.feedback_error:.5f}; by rule optimal it would be {found.optimal_error:.5f}"
            )
        return residual_TK

    def _reach(self, share: float) -> None:
        """Report the share of the experts that is converted."""
        self._feedback.check_stop()
        self._progress.share = 1.0
        self._progress.reach(int(self._walk.ids.size * (STREAMS_SHARE + (1 - STREAMS_SHARE) * share)))

    @property
    def _mlp(self) -> str:
        family = detect_family(self._reader.checkpoint)
        return f"{family.layer.format(layer=self._layer)}.mlp"

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes [N, K] of the experts' projections in the order in which they are converted."""
        checkpoint = self._reader.checkpoint
        architecture = detect_family(checkpoint).read_architecture(checkpoint.config, str(checkpoint.folder))
        hidden, width = architecture.hidden_size, architecture.moe_intermediate_size
        stems = [f"{self._mlp}.experts.{expert}" for expert in range(architecture.num_experts)]
        inner = {f"{stem}.{kind}": (width, hidden) for stem in stems for kind in (GATE, UP)}
        return inner | {f"{stem}.{DOWN}": (hidden, width) for stem in stems}

    def _write_converted(self, residual_TK: Tensor, kept: NDArray[np.bool_]) -> None:
        """Write what the next layer takes: the INT4 stream, less what the converted layer lacks."""
        walk, done = self._walk, 0
        with (
            self._work.reading_hidden(self._layer + 1, walk.shape) as read,
            self._work.writing_states(self._work.converted_path(self._layer + 1), walk.shape) as write,
        ):
            for first in range(0, walk.shape[0], walk.chunk):
                states = read(first, min(first + walk.chunk, walk.shape[0])).copy()
                chunk = kept[first : first + walk.chunk]
                count = int(np.count_nonzero(chunk)) * walk.shape[1]
                states[chunk] -= residual_TK[done : done + count].cpu().numpy().reshape(-1, *walk.shape[1:])
                write(states)
                done += count
