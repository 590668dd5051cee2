"""A pass over the layers of one or more models, planned from headers and text. The loop itself is layers.py.

It depends on what `job` says, needs `disk_needed` bytes of disk at a time, and goes on where an earlier run stopped.
Rule `gptq` is a pass of one model beside a conversion (calibration/conversion.py), an evaluation one of several models
(evaluation/streamed.py).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from threading import Event
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.errors import check_disk
from k2convert.forward.layer_shards import LayerShards
from k2convert.forward.work import HIDDEN, PassJob, WorkFolder
from k2convert.records.command import JobCommand, keep_command
from k2convert.records.events import Events, Extent, Phase
from k2convert.text.windows import Windows

PASS_VERSION: Final = 4  # to be raised when a layer pass makes different bytes of the same input

DENSE_TOKENS: Final = 2048
"""Tokens of a dense layer that a CPU computes at a time. It reads their weights once however few they are."""


@dataclass(frozen=True, slots=True)
class PassSize:
    """Size of a pass: the last `num_layers` layers over some windows, `chunk` of them at once.

    `workers` threads compute.
    """

    num_windows: int
    window: int
    chunk: int
    devices: tuple[str, ...]
    workers: int
    num_layers: int

    @property
    def num_tokens(self) -> int:
        """The tokens of all windows."""
        return self.num_windows * self.window

    @property
    def chunk_windows(self) -> int:
        """The windows of a chunk: fewer if there are no more."""
        return min(self.chunk, self.num_windows)

    @property
    def chunk_tokens(self) -> int:
        """The tokens of a chunk."""
        return self.chunk_windows * self.window

    @property
    def on_cpu(self) -> bool:
        """Return whether the CPU computes."""
        return self.devices == ("cpu",)


@dataclass(frozen=True, slots=True)
class PassText:
    """Text of a layer pass, and how this machine goes over it.

    `chunk` windows are computed at a time, unless an earlier run of the same job decided otherwise, on `devices`, by
    `threads` threads. With `by_default`, nobody asked for the number of tokens.
    """

    windows: Windows
    chunk: int
    devices: tuple[str, ...]
    threads: int
    by_default: bool = False

    def identity(self, device: str) -> dict[str, Any]:
        """Return what the results depend on, field by field, as the fingerprint has it."""
        return {
            "layer_pass": PASS_VERSION,
            "texts": ", ".join(f"{name} ({digest})" for name, digest in self.windows.texts),
            "tokens": self.windows.tokens,
            "window": self.windows.window,
            "seed": self.windows.seed,
            "token_ids": self.windows.digest,
            "device": device,
            "torch": version("torch"),
        }

    def size(self, num_layers: int) -> PassSize:
        """Return the size of a pass over the last `num_layers` layers."""
        windows, length = self.windows.ids.shape
        return PassSize(windows, length, self.chunk, self.devices, self.threads, num_layers)

    def windows_at_once(self, *, dense: bool) -> int:
        """Return how many windows of a layer are computed at a time."""
        if dense and self.devices[0] == "cpu":
            return min(self.chunk, max(1, DENSE_TOKENS // self.windows.ids.shape[1]))
        return self.chunk


@dataclass(frozen=True, slots=True)
class PassModel:
    """A model of a pass: its stream of hidden states, the number of its checkpoint, and what it rounds to fewer bits.

    `name` is for messages; the first model, which the others are compared with, has none.
    """

    stream: str = HIDDEN
    checkpoint: int = 0
    fp4_activations: bool = False
    fp8_cache: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class LayerPass:
    """A planned pass. Nothing has been written yet.

    `models` are ordered by their checkpoints. `shards` are read in the order of their parts: each layer of every
    checkpoint, then the head of every checkpoint if there are heads, all at once. `disk_bytes` is the space for the
    files of the pass, without what is fetched. `disk_allowed` is what may be used in all; next to a conversion, the
    conversion knows that.
    """

    text: PassText
    num_layers: int
    hidden_size: int
    work: WorkFolder
    job: PassJob
    shards: LayerShards
    models: tuple[PassModel, ...] = (PassModel(),)
    disk_bytes: int = 0
    disk_allowed: int = 0

    @property
    def ids(self) -> NDArray[np.int64]:
        """The tokens, int64 [windows, tokens]."""
        return self.text.windows.ids

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the hidden states: windows, tokens, hidden."""
        return (self.ids.shape[0], self.ids.shape[1], self.hidden_size)

    @property
    def num_checkpoints(self) -> int:
        """Return how many checkpoints the models are from."""
        return self.models[-1].checkpoint + 1

    @property
    def num_steps(self) -> int:
        """The layers, and one more for the heads if there are any."""
        return len(self.shards.parts) // self.num_checkpoints

    @property
    def num_finished(self) -> int:
        """Return how many layers an earlier run of this job has done; the heads count as one."""
        return self.work.num_finished(self.job)

    @property
    def fetched(self) -> tuple[int, ...]:
        """The bytes that are fetched for each part."""
        return tuple(part.num_bytes for part in self.shards.parts)

    @property
    def fetch_sizes(self) -> tuple[int, int]:
        """The space that fetched parts may get: for two at a time, so that one is fetched ahead, or the least."""
        fetched = self.fetched
        following = (*fetched[1:], 0)
        ample = max(one + other for one, other in zip(fetched, following, strict=True))
        return ample, max(*fetched, sum(fetched[-self.num_checkpoints :]))

    @property
    def disk_needed(self) -> int:
        """The least disk that the pass needs at a time."""
        return self.disk_bytes + self.fetch_sizes[-1]

    def check_room(self) -> None:
        """Refuse a pass that cannot finish for lack of disk; raises DiskFullError with both numbers."""
        advice = "Free some space"
        if any(self.fetched):
            advice = "Allow more with --max-disk, or free some space"
        check_disk(
            f"{self.work.folder}: the {self.work.purpose}",
            needed=self.disk_needed,
            allowed=self.disk_allowed,
            remedy=f"{advice}, or use fewer tokens.",
        )

    def phases(self, first: int, others: Mapping[Phase, tuple[int, int]]) -> dict[Phase, tuple[int, int]]:
        """Return the extent of the pass if the layers before `first` are done: its own, and all that is downloaded."""
        unit = len(self.models) * self.ids.size
        phases = dict[Phase, tuple[int, int]]()
        if any(self.fetched):
            total, done = others.get("download", (0, 0))
            phases["download"] = (total + sum(self.fetched), done + sum(self.fetched[: first * self.num_checkpoints]))
        phase: Phase = "calibrate" if self.work.purpose == "calibration" else "evaluate"
        phases[phase] = (self.num_steps * unit, first * unit)
        return phases

    def extent(self, first: int) -> Extent:
        """Return the extent of a pass on its own."""
        return Extent(self.phases(first, {}), layer_tokens=len(self.models) * self.ids.size)

    @contextmanager
    def opened(
        self, first: int, *, chunk: int, space: int, events: Events, stop: Event | None = None
    ) -> Generator[LayerPass]:
        """Yield the pass as it runs, `chunk` windows at a time; fetches parts into `space` during the block."""
        shards = replace(self.shards, space=space, events=events, stop=stop or Event())
        with shards.opened(first * self.num_checkpoints):
            yield replace(self, shards=shards, text=replace(self.text, chunk=chunk))

    @contextmanager
    def resumed(self, *, command: JobCommand | None, events: Events) -> Generator[LayerPass]:
        """Lock the work folder and yield the pass as it runs, begun or resumed. `command` is what the user typed.

        Raises DiskFullError without space, ResumeError in the folder of a different pass.
        """
        self.check_room()
        work = self.work
        with work.locked(events=events) as keep:
            was_begun = work.job() is not None
            begun = work.begin(self.job, events=events)
            if command is not None:
                keep_command(work.folder, command)
            first = work.resume(num_layers=self.num_steps, also={}, events=events)
            if was_begun:
                done = min(first, self.num_layers)
                events.note(f"{work.folder}: resuming: {done} of {self.num_layers} layers done")
            space = self.disk_allowed - self.disk_bytes
            with self.opened(first, chunk=begun.chunk, space=space, events=events) as running:
                events.begun(self.extent(first), keep=keep)
                yield running
