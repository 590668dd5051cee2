"""A pass over the layers of one or more models, planned from headers and text. The loop itself is layers.py.

It depends on what `job` says, needs `disk_needed` bytes of disk at a time, and goes on where an earlier run stopped.
Rule `gptq` is a pass of one model beside a conversion (calibration/conversion.py), an evaluation one of several models
(evaluation/streamed.py).

What a layer needs of a checkpoint on the Hub is fetched before the layer and removed after it. If the disk allows it,
the next part is fetched while a layer is computed. Each part has a folder of its own, because two layers may need
different parts of one shard.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.checkpoint.files import list_folder
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import check_disk
from k2convert.forward.work import HIDDEN, PassJob, ReadStates, WorkFolder
from k2convert.hub.ranges import Ranges, RemoteShards, ranges_of
from k2convert.models import detect_family
from k2convert.models.names import Role, block_starts
from k2convert.records.command import JobCommand, keep_command
from k2convert.records.events import Events, Extent, Phase
from k2convert.text.windows import Windows

_FOLDER: Final = "layer-{:03}"


def layer_ranges(source: Checkpoint, num_layers: int) -> tuple[Ranges, ...]:
    """Return the byte ranges that each layer reads. The first one also reads the embedding."""
    family = detect_family(source)
    by_layer: tuple[list[TensorInfo], ...] = tuple([] for _ in range(num_layers))
    for name, tensor in source.tensors.items():
        module_place = family.classify(name.rpartition(".")[0])
        if module_place is None:
            continue
        layer = 0 if module_place.role is Role.EMBEDDINGS else module_place.layer
        if layer is not None and layer < num_layers:
            by_layer[layer].append(tensor)
    return tuple(map(ranges_of, by_layer))


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Tensors that one layer reads of one checkpoint. `remote` is None for a folder, of which nothing is fetched."""

    checkpoint: Checkpoint
    remote: RemoteShards | None
    ranges: Ranges

    @property
    def num_bytes(self) -> int:
        """The bytes to fetch."""
        if self.remote is None:
            return 0
        return self.remote.bytes_needed(self.ranges)


@dataclass(slots=True)
class LayerShards:
    """The parts that layers read, in their order, in folders below `folder`.

    `space` is how many bytes they may take at once. A set `stop` ends what is being fetched. `wait` is called with the
    number of a part before that is read.
    """

    parts: Sequence[LayerPart]
    folder: Path
    space: int
    events: Events
    stop: Event = field(default_factory=Event)
    wait: Callable[[int], None] | None = None
    _fetched: dict[int, Future[None]] = field(default_factory=dict[int, Future[None]], init=False)
    _pool: ThreadPoolExecutor = field(init=False)

    @contextmanager
    def opened(self, first: int) -> Generator[None]:
        """Fetch during the block. Removes earlier downloads, except what arrived of the part `first`.

        Sets `stop` if the block fails, so that nothing more is fetched.
        """
        if all(part.remote is None for part in self.parts):
            yield
            return
        make_folder(self.folder)
        for path in list_folder(self.folder):
            if path.name != _FOLDER.format(first):
                shutil.rmtree(path, ignore_errors=True)
        with ThreadPoolExecutor(1, thread_name_prefix="fetch") as self._pool:
            try:
                yield
            except BaseException:
                self.stop.set()
                raise
            finally:
                for future in self._fetched.values():
                    future.cancel()

    @contextmanager
    def part(self, number: int) -> Generator[Checkpoint]:
        """Fetch what a part needs, and delete it after the block; yields the checkpoint to read it from."""
        if self.wait is not None:
            self.wait(number)
        part = self.parts[number]
        folder = self.folder / _FOLDER.format(number)
        if part.remote is None:
            yield part.checkpoint
            return
        self._submit(number).result()
        following = number + 1
        if following < len(self.parts) and part.num_bytes + self.parts[following].num_bytes <= self.space:
            self._submit(following)
        yield replace(part.checkpoint, folder=folder)
        shutil.rmtree(folder, ignore_errors=True)

    def _submit(self, number: int) -> Future[None]:
        if number not in self._fetched:
            self._fetched[number] = self._pool.submit(self._fetch, number)
        return self._fetched[number]

    def _fetch(self, number: int) -> None:
        part = self.parts[number]
        if part.remote is None:
            return

        def arrived(num_bytes: int, is_new: bool) -> None:
            self.events.transferred(downloaded=num_bytes, is_new=is_new)

        remote = replace(part.remote, folder=self.folder / _FOLDER.format(number))
        remote.fetch(part.ranges, stop=self.stop, arrived=arrived)


PASS_VERSION: Final = 4  # to be raised when a layer pass makes different bytes of the same input

DENSE_TOKENS: Final = 2048
"""Tokens of a dense layer that a CPU computes at a time. It reads their weights once however few they are."""


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

    @property
    def num_tokens(self) -> int:
        """The tokens of all windows."""
        return self.windows.ids.size

    @property
    def window(self) -> int:
        """The tokens of a window."""
        return self.windows.ids.shape[1]

    @property
    def chunk_tokens(self) -> int:
        """The tokens of a chunk of windows."""
        return self.windows_at_once(dense=False) * self.window

    @property
    def on_cpu(self) -> bool:
        """Return whether the CPU computes."""
        return self.devices == ("cpu",)

    def windows_at_once(self, *, dense: bool) -> int:
        """Return how many windows of a layer are computed at a time."""
        windows = min(self.chunk, self.windows.ids.shape[0])
        if dense and self.on_cpu:
            windows = min(windows, max(1, DENSE_TOKENS // self.window))
        return windows


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
        ample = max(size + other for size, other in zip(fetched, following, strict=True))
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

    def reading_blocks(self, model: PassModel, layer: int) -> list[AbstractContextManager[ReadStates]]:
        """Return what reads the states of a model before the layers that began a block of attention residuals."""
        starts = block_starts(layer, self.work.residual_block)
        return [self.work.reading(model.stream, start, self.shape) for start in starts]

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
        self,
        first: int,
        *,
        chunk: int,
        space: int,
        events: Events,
        stop: Event | None = None,
        wait: Callable[[int], None] | None = None,
    ) -> Generator[LayerPass]:
        """Yield the pass as it runs, `chunk` windows at a time; fetches parts into `space` during the block."""
        shards = replace(self.shards, space=space, events=events, stop=stop or Event(), wait=wait)
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
            begun = work.begin(self.job, events=events)
            if command is not None:
                keep_command(work.folder, command)
            first = work.resume(num_layers=self.num_steps, also={}, events=events)
            if first:
                done = min(first, self.num_layers)
                events.note(f"{work.folder}: resuming: {done} of {self.num_layers} layers done")
            space = self.disk_allowed - self.disk_bytes
            with self.opened(first, chunk=begun.chunk, space=space, events=events) as running:
                events.begun(self.extent(first), keep=keep)
                yield running
