"""A conversion with feedback, planned: its text, what each shard waits for, what its walk through the layers takes.

    layer 0 -> layer 1 -> layer 2 -> ...          the walk (calibrate/feedback_walk.py), in a thread of its own
                  |          |
               shard 1    shard 2                 the pipeline: a shard is converted when its last layer is done

The walk is at most AHEAD layers ahead of the shards, so that few converted layers wait on the disk.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from k2convert.calibrate.feedback_work import FeedbackWork
from k2convert.calibrate.statistics import StatisticsHeader
from k2convert.calibrate.text import Windows, held_out
from k2convert.calibrate.work import PassJob
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import DestinationError
from k2convert.hub.client import Hub
from k2convert.hub.ranges import RemoteShards
from k2convert.job.layer_shards import LayerShards, layer_ranges
from k2convert.job.machine import device_name
from k2convert.job.places import Source
from k2convert.job.room import Item
from k2convert.job.statistics_file import (
    check_statistics_path,
    found_header,
    statistics_bytes,
    statistics_header,
    text_identity,
)
from k2convert.models import detect_family, locate_module
from k2convert.models.names import Architecture, Role
from k2convert.plan.plan import ConvertStep, Plan, ShardJob
from k2convert.records.events import SILENT
from k2convert.records.job_description import JobDescription

WALK_VERSION: Final = 2  # to be raised when the walk makes different bytes of the same input
AHEAD: Final = 1
_STREAMS: Final = 2  # the INT4 model's, and that of what is converted so far
_STATE_BYTES: Final = 4
_PROJECTION_BYTES: Final = 1024  # of the header of a layer's codes
_EXPERT_BYTES: Final = 128  # of what is kept of the decisions in a layer


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """What `run --calibrate` walks over.

    `tokens` and `window` are what was asked for. `chunk` windows are computed at one time, unless an earlier run of the
    same job decided otherwise, by `threads` threads. `saved` is the statistics file to write, if any.
    """

    windows: Windows
    tokens: int
    window: int
    seed: int
    chunk: int
    threads: int
    saved: Path | None = None

    def identity(self, devices: Sequence[str]) -> dict[str, Any]:
        """Return what the converted weights depend on, field by field, as the fingerprint has it."""
        return {
            "walk": WALK_VERSION,
            "texts": text_identity(self.windows),
            "tokens": self.tokens,
            "window": self.window,
            "seed": self.seed,
            "token_ids": blake3(self.windows.ids.tobytes()).hexdigest(),
            "device": device_name(devices),
            "torch": version("torch"),
        }


@dataclass(frozen=True, slots=True)
class ShardNeeds:
    """What an output shard needs of the walk.

    `last` is the last layer that it waits for, -1 if it waits for none. `codes` are the bytes of converted experts that
    it takes, by layer.
    """

    last: int
    codes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class FeedbackPlan:
    """The walk of a job, over the windows in `header`. Nothing has been written yet.

    `needs` are those of each output shard. `shards` is None for a source in a folder. `disk_bytes` is the room for the
    walk's files, without what is fetched for a layer.
    """

    text: CalibrationText
    work: FeedbackWork
    job: PassJob
    header: StatisticsHeader
    architecture: Architecture
    needs: Mapping[str, ShardNeeds]
    shards: LayerShards | None
    disk_bytes: int

    @property
    def num_layers(self) -> int:
        """Every decoder layer."""
        return self.architecture.num_layers

    def in_order(self, items: Iterable[Item]) -> tuple[Item, ...]:
        """Return the shards in the order of the last layer of each."""
        return tuple(sorted(items, key=lambda item: self.needs[item.name].last))

    @property
    def held_out_windows(self) -> int:
        """The windows that are kept out of everything that is fitted."""
        return int(held_out(self.header.windows).sum())

    @property
    def fitted_header(self) -> StatisticsHeader:
        """The header of the walk's statistics: they are of the windows that are not kept out."""
        return _without_held_out(self.header)

    @property
    def num_tokens(self) -> int:
        """The tokens of all windows."""
        return self.text.windows.ids.size

    @property
    def num_finished(self) -> int:
        """How many layers an earlier run of this job has done."""
        found = self.work.job()
        return self.work.num_finished() if found is not None and found.identity == self.job.identity else 0

    @property
    def layer_rooms(self) -> tuple[int, ...]:
        """The room that fetched layers may get: for two at one time, so that one is fetched ahead, or for one."""
        fetched = self.fetched
        if not any(fetched):
            return (0,)
        return max(map(sum, zip(fetched, (*fetched[1:], 0), strict=True))), max(fetched)

    @property
    def fetched(self) -> tuple[int, ...]:
        """The bytes that are fetched for each layer."""
        return tuple(0 if self.shards is None else self.shards.takes(layer) for layer in range(self.num_layers))


def plan_feedback(
    text: CalibrationText, *, source: Source, destination: Path, plan: Plan, job: JobDescription, hub: Hub
) -> FeedbackPlan:
    """Plan the walk of a job from headers; raises DestinationError if the statistics cannot be saved."""
    checkpoint, work = source.checkpoint, FeedbackWork(destination)
    architecture = read_architecture(checkpoint)
    header = statistics_header(text.windows, source_headers=job.fingerprint["source_headers"], seed=text.seed)
    if text.saved is not None:
        local = checkpoint.folder if source.remote is None else None
        _check_saved(text.saved, header, source=local, destination=destination)
    needs = {shard.name: shard_needs(shard) for shard in plan.jobs}
    shards = None
    if source.remote is not None:
        ranges = layer_ranges(checkpoint, architecture.num_layers)
        remote = RemoteShards(hub, source.remote, work.downloads)
        shards = LayerShards(checkpoint, remote, ranges, room=0, events=SILENT)
    states = text.windows.ids.size * architecture.hidden_size * _STATE_BYTES * min(architecture.num_layers - 1, 2)
    decided = architecture.num_layers * architecture.num_experts * _EXPERT_BYTES
    return FeedbackPlan(
        text=text,
        work=work,
        job=PassJob(job.fingerprint | {"layers": architecture.num_layers}, text.chunk, job.source or {}),
        header=header,
        architecture=architecture,
        needs=needs,
        shards=shards,
        disk_bytes=_STREAMS * states
        + 2 * statistics_bytes(architecture)
        + decided
        + waiting_bytes(needs.values(), num_layers=architecture.num_layers),
    )


def read_architecture(checkpoint: Checkpoint) -> Architecture:
    """Return the sizes of a checkpoint's model."""
    return detect_family(checkpoint).read_architecture(checkpoint.config, str(checkpoint.folder))


def _check_saved(path: Path, header: StatisticsHeader, *, source: Path | None, destination: Path) -> None:
    check_statistics_path(path, source=source)
    if path.resolve().is_relative_to(destination.resolve()):
        raise DestinationError(f"{path}: is inside the destination, where only the result goes. Choose a path outside.")
    found_header(path, _without_held_out(header))


def _without_held_out(header: StatisticsHeader) -> StatisticsHeader:
    windows = header.windows - int(held_out(header.windows).sum())
    return replace(header, windows=windows, tokens=windows * header.window)


def shard_needs(shard: ShardJob) -> ShardNeeds:
    """Return what an output shard needs of a walk: every layer that it has tensors of.

    Copied tensors count too: whether norm scaling changes them is asked of their layer.
    """
    layers, codes = {-1}, dict[int, int]()
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
    """Return the most bytes of converted experts that wait at one time.

    While a layer is computed, the codes of a layer before it are there if a shard that takes them is not converted.
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
