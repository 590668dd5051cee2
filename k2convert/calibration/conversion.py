"""The layer pass of rule `gptq` (gptq_pass.py), next to the pipeline of a conversion.

What it has done is in DEST/.k2convert/calibration.work until the ledger has it. A layer's quantized weights are removed
when the last shard that needs them is recorded. If a shard has to be converted again after that, the layer pass begins
with the first layer once more: it makes the same bytes on the same machine.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Event
from typing import Final

from k2convert.calibration.channels import Calibration, digest_of_exponents
from k2convert.calibration.layer_files import (
    LayerFiles,
    LayerResult,
    QuantizedLayers,
    drop_quantized,
    needed_files,
    read_layer,
    write_layer,
)
from k2convert.calibration.plan import AHEAD, CalibrationPlan
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import WORK_FOLDER
from k2convert.errors import InterruptedRun
from k2convert.plan.recipe import Recipe
from k2convert.records.calibration import CalibrationRecord, LayerCalibration
from k2convert.records.events import Events

_POLL_SECONDS: Final = 0.2
_LEAVE_SECONDS: Final = 20.0  # a factor of K2's size takes this long, and nothing interrupts it


@dataclass(frozen=True, slots=True)
class OpenPass:
    """A layer pass that can go on: its plan, the recipe, the chunk of its first run, and the layers done.

    `shards` are the output shards that are not recorded yet.
    """

    plan: CalibrationPlan
    recipe: Recipe
    chunk: int
    first: int
    shards: Collection[str]

    def finish(self) -> CalibrationRecord:
        """Return the ledger's entry; raises CheckpointError if a file of a layer is damaged."""
        plan = self.plan
        num_layers = plan.layer_pass.num_layers
        results = {number: read_layer(plan.layer_pass.work, number) for number in range(num_layers)}
        windows = plan.layer_pass.text.windows
        smoothing = bool(self.recipe.smoothing)
        scaled = {n: found for n, result in results.items() if (found := result.smoothing()) is not None}
        moe_layers = plan.architecture.moe_layers
        return CalibrationRecord(
            texts=windows.texts,
            tokens=plan.fitted_windows * windows.ids.shape[1],
            window=windows.ids.shape[1],
            windows=plan.fitted_windows,
            dropped_windows=results[num_layers - 1].dropped,
            seed=windows.seed,
            smoothing=smoothing,
            exponents_digest=digest_of_exponents(scaled),
            layers={n: _layer_record(results[n], plan.layer_pass.hidden_size, smoothing=smoothing) for n in moe_layers},
            held_out_windows=plan.held_out_windows,
            dense_layers={n: r.gptq for n, r in results.items() if n not in moe_layers and r.gptq is not None},
        )

    @contextmanager
    def running(self, *, room: int, stop: Event, events: Events) -> "Generator[RunningPass]":
        """Run the layer pass during the block, which converts shards and returns when `stop` is set; then wait for it.

        `room` is what fetched layers may use. Raises what failed first, in the block or in the layer pass.
        """
        with QuantizedLayers(self.plan.layer_pass.work) as codes:
            layer_pass = RunningPass(self, codes, room=room, stop=stop, events=events)
            try:
                yield layer_pass
                layer_pass.join()
            except InterruptedRun:  # the layer pass may have stopped the block
                layer_pass.join(seconds=_LEAVE_SECONDS)
                if layer_pass.failure is None:
                    raise
            finally:
                stop.set()
                layer_pass.join(seconds=_LEAVE_SECONDS)
        if layer_pass.failure is not None:
            raise layer_pass.failure


def _layer_record(result: LayerResult, hidden_size: int, *, smoothing: bool) -> LayerCalibration:
    counts = dict[int, int]()
    if smoothing:
        counts = dict(sorted(Counter(result.exponents or [0] * hidden_size).items()))
    return LayerCalibration(tokens=result.tokens, exponents=counts, gptq=result.gptq)


def open_pass(
    plan: CalibrationPlan,
    recipe: Recipe,
    shards: Collection[str],
    *,
    calibrated: CalibrationRecord | None,
    events: Events,
) -> OpenPass | None:
    """Begin or resume the layer pass of a job that has `shards` to convert; None if it is done: `calibrated` says so.

    Begins again if something is damaged that the shards or the next layer need. Raises ResumeError.
    """
    work = plan.layer_pass.work
    if not shards and calibrated is not None:
        if work.folder.exists():
            work.remove()  # the run that wrote the ledger was killed before it could
        return None
    make_folder(work.folder / WORK_FOLDER)
    begun = work.begin(plan.layer_pass.job, events=events)
    needed = {layer for name in shards for layer in plan.needs[name].codes}
    first = work.resume(num_layers=plan.layer_pass.num_layers, also=needed_files(work, needed), events=events)
    if first:
        events.note(f"{work.folder}: resuming: {first} of {plan.layer_pass.num_layers} layers done")
    for layer in set(range(first)) - needed:
        drop_quantized(work, layer)
    return OpenPass(plan, recipe, begun.chunk, first, shards)


class RunningPass:
    """A layer pass in a thread of its own. Workers of the pipeline wait for it, shard by shard."""

    def __init__(self, opened: OpenPass, codes: QuantizedLayers, *, room: int, stop: Event, events: Events) -> None:
        self.calibration = Calibration(LayerFiles(opened.plan.layer_pass.work), codes)
        self.failure: BaseException | None = None
        self._opened = opened
        self._plan = opened.plan
        self._room = room
        self._codes = codes
        self._stop = stop
        self._events = events
        self._thread = threading.Thread(target=self._guard, name="layers", daemon=True)
        self._changed = Condition()  # guards everything below
        self._needs = {name: self._plan.needs[name] for name in opened.shards}
        self._num_done = opened.first
        self._thread.start()

    def wait_for(self, shard: str) -> Calibration:
        """Wait until the layers of a shard are done, and return them; raises InterruptedRun if the run stops before."""
        with self._changed:
            last = self._needs[shard].last
            self._wait(lambda: self._num_done > last)
        return self.calibration

    def recorded(self, shard: str) -> None:
        """Note that a shard is recorded, and remove the converted experts that no other shard needs."""
        with self._changed:
            layers = self._needs.pop(shard).codes.keys() - self._needed()
            self._changed.notify_all()
        for layer in layers:
            self._codes.drop(layer)

    def join(self, *, seconds: float | None = None) -> None:
        """Wait until the thread has ended, at most so long."""
        end = None if seconds is None else time.monotonic() + seconds
        while self._thread.is_alive() and (end is None or time.monotonic() < end):
            self._thread.join(_POLL_SECONDS)

    def _needed(self) -> set[int]:
        return {layer for need in self._needs.values() for layer in need.codes}

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait, holding the lock, until `is_ready`; raises InterruptedRun if the run stops."""
        self._check_stop()
        while not is_ready():
            self._changed.wait(_POLL_SECONDS)
            self._check_stop()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise InterruptedRun

    def _guard(self) -> None:
        try:
            self._run()
        except BaseException as error:  # raised again in the thread that converts
            self.failure = error
            self._stop.set()

    def _run(self) -> None:
        from k2convert.calibration.gptq_pass import GptqOptions, gptq_pass

        plan = self._plan
        with plan.layer_pass.opened(
            self._opened.first, room=self._room, events=self._events, stop=self._stop
        ) as layers:

            @contextmanager
            def around(layer: int) -> Generator[Checkpoint]:
                with self._changed:  # few converted layers wait on the disk
                    self._wait(lambda: all(need.last >= layer - AHEAD for need in self._needs.values()))
                with layers(layer) as checkpoint:
                    self._check_stop()
                    yield checkpoint

            recipe = self._opened.recipe
            options = GptqOptions(
                seed=plan.layer_pass.text.windows.seed,
                smoothing=bool(recipe.smoothing),
                roles=recipe.roles,
                check_stop=self._check_stop,
            )
            layer_pass = plan.layer_pass.layer_pass(self._opened.chunk, around)
            gptq_pass(layer_pass, options, plan.layer_pass.work, save=self._save, events=self._events)

    def _save(self, layer: int, result: LayerResult) -> None:
        write_layer(self._plan.layer_pass.work, layer, result)
        with self._changed:
            self._num_done = layer + 1
            is_needed = layer in self._needed()
            self._changed.notify_all()
        if not is_needed:
            self._codes.drop(layer)
