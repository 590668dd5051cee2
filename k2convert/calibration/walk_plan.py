"""A walk, planned: the text that goes through the layers, the disk that this needs, and how far it is.

A calibration is one walk, with or without a conversion beside it (plan.py), and so is an evaluation of several models.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from k2convert.calibration.text import Windows
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import check_disk
from k2convert.forward.layer_shards import LayerShards
from k2convert.forward.work import WalkJob, WorkFolder
from k2convert.records.command import JobCommand, keep_command
from k2convert.records.events import Events, Extent, Phase

if TYPE_CHECKING:
    from k2convert.calibration.sizes import PassSize
    from k2convert.forward.walk import Walk

WALK_VERSION: Final = 3  # to be raised when a walk makes different bytes of the same input

Around = Callable[[int], AbstractContextManager[Checkpoint]]
"""Makes the context in which a layer of a checkpoint can be read."""


@dataclass(frozen=True, slots=True)
class WalkText:
    """Text of a walk, and how this machine walks over it.

    `chunk` windows are computed at a time, unless an earlier run of the same job decided otherwise, on `devices`, by
    `threads` threads. `saved` is the statistics file to write, if any. With `by_default`, nobody asked for the number
    of tokens.
    """

    windows: Windows
    chunk: int
    devices: tuple[str, ...]
    threads: int
    saved: Path | None = None
    by_default: bool = False

    def identity(self, device: str) -> dict[str, Any]:
        """Return what the results depend on, field by field, as the fingerprint has it."""
        return {
            "walk": WALK_VERSION,
            "texts": ", ".join(f"{name} ({digest})" for name, digest in self.windows.texts),
            "tokens": self.windows.tokens,
            "window": self.windows.window,
            "seed": self.windows.seed,
            "token_ids": self.windows.digest,
            "device": device,
            "torch": version("torch"),
        }

    def size(self, num_layers: int) -> "PassSize":
        """Return the size of a pass over the last `num_layers` layers."""
        from k2convert.calibration.sizes import PassSize

        windows, length = self.windows.ids.shape
        return PassSize(windows, length, self.chunk, self.devices, self.threads, num_layers)


@dataclass(frozen=True, slots=True)
class WalkPlan:
    """A planned walk. Nothing has been written yet.

    `shards` are read in the order of their parts: each layer of every checkpoint, then the head of every checkpoint if
    there are heads, all at once. `disk_bytes` is the room for the walk's files, without what is fetched. `disk_allowed`
    is what may be used in all; next to a conversion, the conversion knows that.
    """

    text: WalkText
    num_layers: int
    hidden_size: int
    work: WorkFolder
    job: WalkJob
    shards: LayerShards
    disk_bytes: int
    disk_allowed: int
    num_checkpoints: int = 1
    num_models: int = 1

    @property
    def num_tokens(self) -> int:
        """The tokens of all windows."""
        return self.text.windows.ids.size

    @property
    def num_finished(self) -> int:
        """Return how many layers an earlier run of this job has done; the heads count as one."""
        return self.work.num_finished(self.job)

    @property
    def fetched(self) -> tuple[int, ...]:
        """The bytes that are fetched for each part."""
        return tuple(part.num_bytes for part in self.shards.parts)

    @property
    def layer_rooms(self) -> tuple[int, int]:
        """The room that fetched parts may get: for two at a time, so that one is fetched ahead, or the least."""
        fetched = self.fetched
        heads = self.num_checkpoints
        following = (*fetched[1:], 0)
        ample = max(one + other for one, other in zip(fetched, following, strict=True))
        return ample, max(*fetched, sum(fetched[-heads:]))

    @property
    def disk_needed(self) -> int:
        """The least disk that the walk needs at a time."""
        return self.disk_bytes + self.layer_rooms[-1]

    def check_room(self) -> None:
        """Refuse a walk that cannot finish for lack of disk; raises DiskFullError with both numbers."""
        advice = "Allow more with --max-disk, or free some space" if any(self.fetched) else "Free some space"
        check_disk(
            f"{self.work.folder}: the {self.work.purpose}",
            needed=self.disk_needed,
            allowed=self.disk_allowed,
            remedy=f"{advice}, or use fewer tokens.",
        )

    def phases(self, first: int, others: Mapping[Phase, tuple[int, int]]) -> dict[Phase, tuple[int, int]]:
        """Return the extent of the walk if the layers before `first` are done: its own, and all that is downloaded."""
        unit = self.num_models * self.num_tokens
        phases = dict[Phase, tuple[int, int]]()
        if any(self.fetched):
            total, done = others.get("download", (0, 0))
            phases["download"] = (
                total + sum(self.fetched),
                done + sum(self.fetched[: first * self.num_checkpoints]),
            )
        num_steps = len(self.shards.parts) // self.num_checkpoints
        phase: Phase = "calibrate" if self.work.purpose == "calibration" else "evaluate"
        phases[phase] = (num_steps * unit, first * unit)
        return phases

    def extent(self, first: int, *, layer_costs: tuple[float, ...]) -> Extent:
        """Return the extent of a walk on its own."""
        unit = self.num_models * self.num_tokens
        return Extent(self.phases(first, {}), layer_tokens=unit, layer_costs=layer_costs)

    @contextmanager
    def opened(self, first: int, *, room: int, events: Events, stop: Event | None = None) -> Generator[Around]:
        """Yield what makes the context in which a layer can be read; fetches parts during the block if it has to."""
        shards = replace(self.shards, room=room, events=events, stop=stop or Event())
        with shards.opened(first * self.num_checkpoints):
            yield shards.around

    def walk(self, chunk: int, around: Around) -> "Walk":
        """Return the walk of one model over the text, `chunk` windows at a time."""
        from k2convert.forward.walk import Walk

        return Walk(
            ids=self.text.windows.ids,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            chunk=chunk,
            devices=self.text.devices,
            workers=self.text.threads,
            around=around,
        )

    @contextmanager
    def resumed(
        self, *, command: JobCommand | None, layer_costs: tuple[float, ...], events: Events
    ) -> Generator["Walk"]:
        """Lock the work folder and yield the walk, begun or resumed. `command` is what the user typed.

        Raises DiskFullError without room, ResumeError in the folder of a different walk.
        """
        self.check_room()
        work = self.work
        with work.locked(events=events) as keep:
            was_begun = work.job() is not None
            begun = work.begin(self.job, events=events)
            if command is not None:
                keep_command(work.folder, command)
            num_steps = len(self.shards.parts) // self.num_checkpoints
            first = work.resume(num_layers=num_steps, also={}, events=events)
            if was_begun:
                done = min(first, self.num_layers)
                events.note(f"{self.text.saved or work.folder}: resuming: {done} of {self.num_layers} layers done")
            with self.opened(first, room=self.disk_allowed - self.disk_bytes, events=events) as around:
                events.begun(self.extent(first, layer_costs=layer_costs), keep=keep)
                yield self.walk(begun.chunk, around)
