"""A walk, planned from headers and text: what it depends on, what disk it needs, and how far it is.

`k2convert calibrate` walks through the layers and writes a statistics file. `run --calibrate` converts on the same walk
by rule `gptq` (conversion.py). Both are one plan. An evaluation is a walk of several models.

    layer 0 -> layer 1 -> layer 2 -> ...          the walk, with a conversion in a thread of its own
                  |          |
               shard 1    shard 2                 the pipeline: a shard is converted when its last layer is done

The walk is at most AHEAD layers ahead of the shards, so that few converted layers wait on the disk.
"""

import platform
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from k2convert import __version__
from k2convert.calibration.statistics import StatisticsHeader, open_statistics
from k2convert.calibration.text import Windows, experts_per_token, held_out
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import CalibrationError, CheckpointError, DestinationError, check_disk, quoted
from k2convert.forward.layer_shards import LayerPart, LayerShards, layer_ranges
from k2convert.forward.work import WalkJob, WorkFolder
from k2convert.hub.client import Hub
from k2convert.hub.ranges import RemoteShards
from k2convert.models import locate_module, read_architecture
from k2convert.models.names import Architecture, Role
from k2convert.plan.plan import ConvertStep, ShardJob
from k2convert.records.command import JobCommand, keep_command
from k2convert.records.events import SILENT, Events, Extent, Phase
from k2convert.records.fingerprint import Source

if TYPE_CHECKING:
    from k2convert.calibration.memory import PassSize
    from k2convert.forward.walk import Walk

WALK_VERSION: Final = 3  # to be raised when a walk makes different bytes of the same input
AHEAD: Final = 1
_LIBRARIES: Final = ("numpy", "torch", "transformers", "tokenizers", "tiktoken")
_STATE_BYTES: Final = 2
_PROJECTION_BYTES: Final = 1024  # of the header of a layer's codes
_EXPERT_BYTES: Final = 128  # of what is kept of the decisions in a layer
_LAYER_SLACK_BYTES: Final = 1 << 16  # of the files of a layer, without the arrays
_TOKEN_TENSORS: Final = 3  # f32 [tokens, hidden] of a layer
_UNEVEN: Final = 4  # the busiest experts have so many times the even share

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
        from k2convert.calibration.memory import PassSize

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
        """Return the extent of the walk if the layers before `first` are done: its own, and all that is downloaded."""
        unit = self.num_models * self.num_tokens
        phases = dict[Phase, tuple[int, int]]()
        if any(self.fetched):
            total, done = others.get("download", (0, 0))
            phases["download"] = (total + sum(self.fetched), done + sum(self.fetched[: first * self.num_checkpoints]))
        phase: Phase = "calibrate" if self.work.purpose == "calibration" else "evaluate"
        phases[phase] = (self.num_steps * unit, first * unit)
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
            first = work.resume(num_layers=self.num_steps, also={}, events=events)
            if was_begun:
                done = min(first, self.num_layers)
                events.note(f"{self.text.saved or work.folder}: resuming: {done} of {self.num_layers} layers done")
            with self.opened(first, room=self.disk_allowed - self.disk_bytes, events=events) as around:
                events.begun(self.extent(first, layer_costs=layer_costs), keep=keep)
                yield self.walk(begun.chunk, around)


@dataclass(frozen=True, slots=True)
class ShardNeeds:
    """Layers and tensors that an output shard needs of the walk.

    `last` is the last layer that it waits for, -1 if it waits for none. `codes` are the bytes of converted experts that
    it needs, by layer.
    """

    last: int
    codes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """A planned calibration. Nothing has been written yet.

    `header` is that of the statistics file, without dropped windows. `needs` are those of each output shard, None
    without a conversion.
    """

    walk: WalkPlan
    source: Checkpoint
    header: StatisticsHeader
    architecture: Architecture
    needs: Mapping[str, ShardNeeds] | None

    @property
    def held_out_windows(self) -> int:
        """The windows that are kept out of everything that is fitted."""
        if self.needs is None:
            return 0
        return int(held_out(self.walk.text.windows.ids.shape[0]).sum())

    def last_layer(self, shard: str) -> int:
        """Return the last layer that an output shard waits for, -1 if it waits for none."""
        if self.needs is None:
            return -1
        return self.needs[shard].last

    def layer_costs(self) -> tuple[float, ...]:
        """Return how much work each layer is."""
        from k2convert.calibration.memory import layer_costs, read_sizes

        size = self.walk.text.size(self.walk.num_layers)
        return layer_costs(read_sizes(self.source), size, is_gptq=self.needs is not None)

    def finished_header(self) -> StatisticsHeader | None:
        """Return the header of the statistics file if this job made it; None if there is no file.

        Raises DestinationError if the file was made from something else.
        """
        path = self.walk.text.saved
        header = self.header
        if path is None or not path.exists():
            return None
        try:
            found = open_statistics(path)
        except (CalibrationError, CheckpointError) as error:
            raise DestinationError(
                f"{path}: is not a statistics file, so it is not replaced ({str(error).rstrip('.')}). Remove it, or "
                "choose a different name."
            ) from None
        for name in ("source_headers", "texts", "tokens", "window", "windows", "seed"):
            if getattr(found, name) != (now := getattr(header, name)):
                raise DestinationError(
                    f"{path}: exists, made from something else: {name} was {quoted(getattr(found, name))}, now "
                    f"{quoted(now)}. Choose a different name, or remove the file."
                )
        return replace(header, dropped=found.dropped, versions=found.versions)


def plan_calibration(
    text: WalkText,
    source: Source,
    *,
    hub: Hub,
    identity: Mapping[str, Any],
    work: WorkFolder,
    shards: Iterable[ShardJob] | None = None,
    disk_allowed: int = 0,
) -> CalibrationPlan:
    """Plan a calibration from headers and windows; `shards` are those of a conversion. Raises PlanError.

    `identity` has every field that the results depend on, `disk_allowed` is what a walk without a conversion may use.
    """
    architecture = read_architecture(source.checkpoint)
    num_layers = architecture.num_layers
    ids = text.windows.ids
    needs = None
    if shards is not None:
        needs = {shard.name: shard_needs(shard) for shard in shards}
    states = ids.size * architecture.hidden_size * _STATE_BYTES * min(num_layers - 1, 2)
    floats = architecture.num_experts * (architecture.moe_intermediate_size + 4) + 4 * architecture.hidden_size
    statistics = num_layers * (4 * floats + _LAYER_SLACK_BYTES)
    disk_bytes = (1 if needs is None else 2) * states + 2 * statistics
    if needs is not None:
        disk_bytes += num_layers * architecture.num_experts * _EXPERT_BYTES
        disk_bytes += waiting_bytes(needs.values(), num_layers=num_layers)
        if text.devices == ("cpu",):
            disk_bytes += _scratch_bytes(source.checkpoint, tokens=ids.size, workers=text.threads)
    parts = [LayerPart(source.checkpoint, None, {})] * num_layers
    if source.remote is not None:
        remote = RemoteShards(hub, source.remote, work.downloads)
        parts = [LayerPart(source.checkpoint, remote, of) for of in layer_ranges(source.checkpoint, num_layers)]
    windows = ids.shape[0] - (0 if needs is None else int(held_out(ids.shape[0]).sum()))
    return CalibrationPlan(
        walk=WalkPlan(
            text=text,
            num_layers=num_layers,
            hidden_size=architecture.hidden_size,
            work=work,
            job=WalkJob({**identity, "layers": num_layers}, text.chunk, source.identities()),
            shards=LayerShards(parts, work.downloads, 0, SILENT),
            disk_bytes=disk_bytes,
            disk_allowed=disk_allowed,
        ),
        source=source.checkpoint,
        header=StatisticsHeader(
            source_headers=identity["source_headers"],
            texts=text.windows.texts,
            tokens=windows * ids.shape[1],
            window=ids.shape[1],
            windows=windows,
            dropped=0,
            seed=text.windows.seed,
            versions={
                "k2convert": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in _LIBRARIES},
            },
        ),
        architecture=architecture,
        needs=needs,
    )


def _scratch_bytes(source: Checkpoint, *, tokens: int, workers: int) -> int:
    """Return the disk that layer_tokens.py uses for a layer next to a CPU; an estimate for very uneven experts."""
    architecture = read_architecture(source)
    chosen = tokens * experts_per_token(source)
    at_once = (workers + 1) * _UNEVEN * chosen // max(architecture.num_experts, 1)
    outputs = min(at_once, chosen) * architecture.hidden_size
    inner = chosen * architecture.moe_intermediate_size
    return 4 * (_TOKEN_TENSORS * tokens * architecture.hidden_size + inner + outputs)


def source_fields(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a conversion's fingerprint that statistics depend on too."""
    return {key: fingerprint[key] for key in ("arithmetic", "source_revision", "source_headers", "source_config")}


def shard_needs(shard: ShardJob) -> ShardNeeds:
    """Return what an output shard needs of a walk: every layer that it has tensors of.

    Copied tensors count too: whether smoothing changes them is asked of their layer.
    """
    layers = {-1}
    codes = dict[int, int]()
    for step in shard.steps:
        is_converted = isinstance(step, ConvertStep)
        module = step.members[0].module if is_converted else step.tensor.name.rpartition(".")[0]
        place = locate_module(module)  # that of all members: they are of the same MLP
        if place is None or place.layer is None:
            continue
        layers.add(place.layer)
        if is_converted and place.role is Role.EXPERTS:
            num_bytes = sum(output.num_bytes for output in step.outputs) + _PROJECTION_BYTES * len(step.members)
            codes[place.layer] = codes.get(place.layer, 0) + num_bytes
    return ShardNeeds(max(layers), codes)


def waiting_bytes(needs: Collection[ShardNeeds], *, num_layers: int) -> int:
    """Return the most bytes of converted experts that wait at a time.

    While a layer is computed, the codes of a layer before it are there if a shard that needs them is not converted.
    """
    totals: dict[int, int] = {}
    for need in needs:
        for layer, num_bytes in need.codes.items():
            totals[layer] = totals.get(layer, 0) + num_bytes
    most = 0
    for current in range(num_layers):
        waiting = {layer for need in needs if need.last >= current - AHEAD for layer in need.codes if layer <= current}
        most = max(most, sum(totals[layer] for layer in waiting))
    return most
