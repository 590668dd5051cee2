"""Walk through the layers next to the pipeline, for rule `feedback`: see feedback_plan.py.

What the walk has done is in DEST/.k2convert/calibration.work until the ledger says it. A layer's converted experts are
removed when the last shard that takes them is recorded. If a shard has to be made again after that, the walk begins
with the first layer once more: it makes the same bytes on the same machine.
"""

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, Event
from typing import Final

from k2convert.calibrate.columns import Calibration
from k2convert.calibrate.feedback_work import CodesFolder, FeedbackWork, LayerFiles
from k2convert.calibrate.statistics import LayerStatistics, open_statistics
from k2convert.checkpoint.files import write_atomically
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import WORK_FOLDER
from k2convert.errors import CalibrationError, CheckpointError
from k2convert.job.calibration import calibration_record
from k2convert.job.feedback_plan import AHEAD, FeedbackPlan, ShardNeeds
from k2convert.job.layer_shards import LayerShards, local_layers
from k2convert.job.prepare import Job
from k2convert.job.room import Item
from k2convert.job.shard import InterruptedRun
from k2convert.job.statistics_file import gather_statistics
from k2convert.records.calibration import CalibrationRecord, FeedbackLayer
from k2convert.records.events import Events, Phase

_POLL_SECONDS: Final = 0.2
_LEAVE_SECONDS: Final = 20.0  # a factor of K2's size takes this long, and nothing interrupts it


@dataclass(frozen=True, slots=True)
class OpenWalk:
    """A walk that can go on: what it is, with the chunk of its first run, and how many layers are done."""

    plan: FeedbackPlan
    chunk: int
    first: int

    def phases(self, others: Mapping[Phase, tuple[int, int]]) -> dict[Phase, tuple[int, int]]:
        """Return the extent of the walk's own phase, and of the download with what the walk fetches."""
        plan, phases = self.plan, dict[Phase, tuple[int, int]]()
        if "download" in others:
            total, done = others["download"]
            phases["download"] = (total + sum(plan.fetched), done + sum(plan.fetched[: self.first]))
        phases["calibrate"] = (plan.num_layers * plan.num_tokens, self.first * plan.num_tokens)
        return phases


def open_walk(job: Job, items: Sequence[Item], events: Events) -> OpenWalk | None:
    """Begin or resume the walk of a job that has `items` to convert; None if the job has none, or it is done.

    Begins again if something is damaged that the items or the next layer need. Raises ResumeError.
    """
    plan = job.feedback
    if plan is None:
        return None
    work = plan.work
    if not items and job.calibrated is not None:
        _check_kept(plan, job.calibrated)
        if work.folder.exists():
            work.remove()  # the run that wrote the ledger was killed before it could
        return None
    make_folder(work.folder / WORK_FOLDER, root=job.destination.folder)
    begun = work.begin(plan.job, events=events)
    needed = {layer for item in items for layer in plan.needs[item.name].codes}
    first = work.resume(num_layers=plan.num_layers, also=work.needed(needed), events=events)
    if first:
        events.note(f"{work.folder}: resuming: {first} of {plan.num_layers} layers done")
    for layer in set(range(first)) - needed:
        work.drop_codes(layer)
    return OpenWalk(plan, begun.chunk, first)


def _check_kept(plan: FeedbackPlan, calibrated: CalibrationRecord) -> None:
    """Refuse to save statistics that a finished job did not keep; raises CalibrationError."""
    path = plan.text.saved
    if path is not None and not (path.exists() and open_statistics(path).digest == calibrated.statistics):
        raise CalibrationError(
            f"{path}: the conversion is complete, and its statistics were not kept. Leave out "
            "calibration.save_statistics; `k2convert calibrate` makes them."
        )


class ShardWalk:
    """A walk in a thread of its own. Workers of the pipeline wait for it, shard by shard."""

    def __init__(
        self, job: Job, opened: OpenWalk, items: Sequence[Item], codes: CodesFolder, stop: Event, events: Events
    ) -> None:
        self.calibration = Calibration(
            LayerFiles(opened.plan.work), weighted=True, norm_scaling=bool(job.plan.recipe.norm_scaling), codes=codes
        )
        self.failure: BaseException | None = None
        self._job, self._opened, self._plan = job, opened, opened.plan
        self._codes, self._stop, self._events = codes, stop, events
        self._thread = threading.Thread(target=self._guard, name="walk", daemon=True)
        self._changed = Condition()  # guards everything below
        self._needs: dict[str, ShardNeeds] = {item.name: self._plan.needs[item.name] for item in items}
        self._num_done = opened.first

    def wait_for(self, shard: str) -> Calibration:
        """Wait until the layers of a shard are done, and return them; raises InterruptedRun if the run stops before."""
        with self._changed:
            last = self._needs[shard].last
            self._wait(lambda: self._num_done > last)
        return self.calibration

    def recorded(self, shard: str) -> None:
        """Take that a shard is recorded, and remove the converted experts that no other shard takes."""
        with self._changed:
            layers = self._needs.pop(shard).codes.keys() - self._needed()
            self._changed.notify_all()
        for layer in layers:
            self._codes.drop(layer)

    def start(self) -> None:
        """Begin to walk."""
        self._thread.start()

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
            self._walk()
        except BaseException as error:  # raised again in the thread that converts
            self.failure = error
            self._stop.set()

    def _walk(self) -> None:
        from k2convert.calibrate.feedback_walk import FeedbackWalk, walk_with_feedback
        from k2convert.calibrate.walk import Walk

        plan, job, text = self._plan, self._job, self._plan.text
        with self._open_layers() as layers:
            walk = Walk(
                ids=text.windows.ids,
                num_layers=plan.num_layers,
                hidden_size=plan.architecture.hidden_size,
                seed=text.seed,
                chunk=self._opened.chunk,
                devices=job.limits.devices,
                workers=text.threads,
                around=partial(self._around, layers),
            )
            feedback = FeedbackWalk(walk, self.calibration.norm_scaling, self._check_stop)
            walk_with_feedback(feedback, plan.work, save=self._save, events=self._events)

    @contextmanager
    def _open_layers(self) -> Generator[LayerShards | None]:
        """Fetch layers during the block, if the source is on the Hub."""
        shards = self._plan.shards
        if shards is None:
            yield None
            return
        room = self._job.limits.layer_room
        shards = replace(shards, room=room, events=self._events, stop=self._stop)
        with shards.opened(self._opened.first):
            yield shards

    @contextmanager
    def _around(self, shards: LayerShards | None, layer: int) -> Generator[Checkpoint]:
        """Bring a layer when the shards of earlier layers are converted."""
        with self._changed:
            self._wait(lambda: all(need.last >= layer - AHEAD for need in self._needs.values()))
        source = self._job.source.checkpoint
        with local_layers(source, layer) if shards is None else shards.around(layer) as checkpoint:
            self._check_stop()
            yield checkpoint

    def _save(self, layer: LayerStatistics, dropped: int) -> None:
        """Declare a layer done."""
        header = replace(self._plan.fitted_header, dropped=dropped)
        self._plan.work.write_layer(layer, header)
        with self._changed:
            self._num_done = layer.layer + 1
            is_needed = layer.layer in self._needed()
            self._changed.notify_all()
        if not is_needed:
            self._codes.drop(layer.layer)


@contextmanager
def walking(job: Job, opened: OpenWalk, items: Sequence[Item], *, stop: Event, events: Events) -> Generator[ShardWalk]:
    """Walk while the block runs, which converts `items` and returns when `stop` is set; then wait for the walk's end.

    Raises what failed first, in the block or in the walk.
    """
    with CodesFolder(opened.plan.work) as codes:
        walk = ShardWalk(job, opened, items, codes, stop, events)
        walk.start()
        try:
            yield walk
            walk.join()
        except InterruptedRun:  # the walk may have stopped the block
            walk.join(seconds=_LEAVE_SECONDS)
            if walk.failure is None:
                raise
        finally:
            stop.set()
            walk.join(seconds=_LEAVE_SECONDS)
    if walk.failure is not None:
        raise walk.failure


def finish_walk(job: Job, opened: OpenWalk) -> Job:
    """Put the statistics of a finished walk together, save them if asked for; returns the job with its record.

    Raises CheckpointError if a file of a layer is damaged.
    """
    plan, work = opened.plan, opened.plan.work
    gather_statistics(work, work.gathered_path, plan.fitted_header, num_layers=plan.num_layers)
    if plan.text.saved is not None:
        write_atomically(plan.text.saved, work.gathered_path)
    statistics = open_statistics(work.gathered_path)
    calibration = Calibration(statistics, weighted=True, norm_scaling=bool(job.plan.recipe.norm_scaling))
    record = calibration_record(statistics, calibration, plan.architecture)
    layers = {number: replace(layer, feedback=_decided(work, number)) for number, layer in record.layers.items()}
    record = replace(record, feedback=True, held_out_windows=plan.held_out_windows, layers=layers)
    return replace(job, calibrated=record)


def _decided(work: FeedbackWork, layer: int) -> FeedbackLayer:
    found = work.read_feedback(layer)
    if found is None:
        raise CheckpointError(f"{work.feedback_path(layer)}: missing. Delete {work.folder} and repeat the command.")
    return found
