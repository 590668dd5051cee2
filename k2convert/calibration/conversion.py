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
from threading import Condition, Event
from typing import Final

from k2convert.calibration.layer_files import (
    Calibration,
    LayerResult,
    digest_of_exponents,
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


def open_pass(
    plan: CalibrationPlan,
    recipe: Recipe,
    shards: Collection[str],
    *,
    calibrated: CalibrationRecord | None,
    events: Events,
) -> "PassBesideJob | None":
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
    return PassBesideJob(plan, recipe, chunk=begun.chunk, first=first, shards=shards)


class PassBesideJob:
    """A layer pass in a thread of its own. Workers of the pipeline wait for it, shard by shard.

    `chunk` windows are computed at a time, as in its first run. The layers before `first` are done. `shards` are the
    output shards that are not recorded yet.
    """

    def __init__(
        self, plan: CalibrationPlan, recipe: Recipe, *, chunk: int, first: int, shards: Collection[str]
    ) -> None:
        self.plan = plan
        self.first = first
        self._recipe = recipe
        self._chunk = chunk
        self._work = plan.layer_pass.work
        self._calibration = Calibration(self._work)
        self._failure: BaseException | None = None
        self._stop = Event()
        self._changed = Condition()  # guards everything below
        self._needs = {name: plan.needs[name] for name in shards}
        self._num_done = first

    @contextmanager
    def running(self, *, space: int, stop: Event, events: Events) -> Generator[None]:
        """Run during the block, which converts shards and returns when `stop` is set; then wait for the layers.

        `space` is what fetched layers may use. Raises what failed first, in the block or in the layer pass.
        """
        self._stop = stop
        with self._calibration:
            thread = threading.Thread(target=self._guard, args=(space, events), name="layers", daemon=True)
            thread.start()
            try:
                yield
                _join(thread)
            except InterruptedRun:  # the layer pass may have stopped the block
                _join(thread, seconds=_LEAVE_SECONDS)
                if self._failure is None:
                    raise
            finally:
                stop.set()
                _join(thread, seconds=_LEAVE_SECONDS)
        if self._failure is not None:
            raise self._failure

    def wait_for(self, shard: str) -> Calibration:
        """Wait until the layers of a shard are done, and return them; raises InterruptedRun if the run stops before."""
        with self._changed:
            last = self._needs[shard].last
            self._wait(lambda: self._num_done > last)
        return self._calibration

    def recorded(self, shard: str) -> None:
        """Note that a shard is recorded, and remove the quantized weights that no other shard needs."""
        with self._changed:
            layers = self._needs.pop(shard).codes.keys() - self._needed()
            self._changed.notify_all()
        for layer in layers:
            self._calibration.drop(layer)

    def finish(self) -> CalibrationRecord:
        """Return the ledger's entry; raises CheckpointError if a file of a layer is damaged."""
        layer_pass = self.plan.layer_pass
        num_layers = layer_pass.num_layers
        results = {number: read_layer(self._work, number) for number in range(num_layers)}
        windows = layer_pass.text.windows
        smoothing = bool(self._recipe.smoothing)
        scaled = {n: found for n, result in results.items() if (found := result.smoothing()) is not None}
        moe_layers = self.plan.architecture.moe_layers
        return CalibrationRecord(
            texts=windows.texts,
            tokens=self.plan.fitted_windows * windows.ids.shape[1],
            window=windows.ids.shape[1],
            windows=self.plan.fitted_windows,
            dropped_windows=results[num_layers - 1].dropped,
            seed=windows.seed,
            smoothing=smoothing,
            exponents_digest=digest_of_exponents(scaled),
            layers={n: _layer_record(results[n], layer_pass.hidden_size, smoothing=smoothing) for n in moe_layers},
            held_out_windows=self.plan.held_out_windows,
            dense_layers={n: r.gptq for n, r in results.items() if n not in moe_layers and r.gptq is not None},
        )

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

    def _guard(self, space: int, events: Events) -> None:
        try:
            self._run(space, events)
        except BaseException as error:  # raised again in the thread that converts
            self._failure = error
            self._stop.set()

    def _run(self, space: int, events: Events) -> None:
        from k2convert.calibration.gptq_pass import GptqOptions, gptq_pass

        planned = self.plan.layer_pass
        with planned.opened(self.first, chunk=self._chunk, space=space, events=events, stop=self._stop) as layer_pass:

            @contextmanager
            def around(layer: int) -> Generator[Checkpoint]:
                with self._changed:  # few converted layers wait on the disk
                    self._wait(lambda: all(need.last >= layer - AHEAD for need in self._needs.values()))
                with layer_pass.shards.around(layer) as checkpoint:
                    self._check_stop()
                    yield checkpoint

            options = GptqOptions(
                seed=layer_pass.text.windows.seed,
                smoothing=bool(self._recipe.smoothing),
                roles=self._recipe.roles,
                check_stop=self._check_stop,
            )
            gptq_pass(layer_pass, around, options, save=self._save, events=events)

    def _save(self, layer: int, result: LayerResult) -> None:
        write_layer(self._work, layer, result)
        with self._changed:
            self._num_done = layer + 1
            is_needed = layer in self._needed()
            self._changed.notify_all()
        if not is_needed:
            self._calibration.drop(layer)


def _join(thread: threading.Thread, *, seconds: float | None = None) -> None:
    """Wait until a thread has ended, at most so long. A signal is handled in between."""
    end = None if seconds is None else time.monotonic() + seconds
    while thread.is_alive() and (end is None or time.monotonic() < end):
        thread.join(_POLL_SECONDS)


def _layer_record(result: LayerResult, hidden_size: int, *, smoothing: bool) -> LayerCalibration:
    counts = dict[int, int]()
    if smoothing:
        counts = dict(sorted(Counter(result.exponents or [0] * hidden_size).items()))
    return LayerCalibration(tokens=result.tokens, exponents=counts, gptq=result.gptq)
