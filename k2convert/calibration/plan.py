"""A layer pass, planned from headers and text: what it depends on, what disk it needs, and how far it is.

`run --calibrate` converts in a layer pass of rule `gptq` (conversion.py). An evaluation is one of several models.

    layer 0 -> layer 1 -> layer 2 -> ...          the layer pass, with a conversion in a thread of its own
                  |          |
               shard 1    shard 2                 the pipeline: a shard is converted when its last layer is done

The layer pass is at most AHEAD layers ahead of the shards, so that few converted layers wait on the disk.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from k2convert.calibration.text import Windows, experts_per_token, held_out
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import check_disk
from k2convert.forward.layer_shards import LayerPart, LayerShards, layer_ranges
from k2convert.forward.work import PassJob, WorkFolder
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
    from k2convert.forward.layer_pass import LayerLoop

PASS_VERSION: Final = 4  # to be raised when a layer pass makes different bytes of the same input
AHEAD: Final = 1
_STATE_BYTES: Final = 2
_PROJECTION_BYTES: Final = 1024  # of the header of a layer's codes
_EXPERT_BYTES: Final = 128  # of what is kept of the decisions in a layer
_CHANNEL_BYTES: Final = 8  # of an exponent as text
_LAYER_SLACK_BYTES: Final = 1 << 16  # of the files of a layer besides
_TOKEN_TENSORS: Final = 3  # f32 [tokens, hidden] of a layer
_UNEVEN: Final = 4  # the busiest experts have so many times the even share

Around = Callable[[int], AbstractContextManager[Checkpoint]]
"""Makes the context in which a layer of a checkpoint can be read."""


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

    def size(self, num_layers: int) -> "PassSize":
        """Return the size of a pass over the last `num_layers` layers."""
        from k2convert.calibration.memory import PassSize

        windows, length = self.windows.ids.shape
        return PassSize(windows, length, self.chunk, self.devices, self.threads, num_layers)


@dataclass(frozen=True, slots=True)
class LayerPass:
    """A planned layer pass. Nothing has been written yet.

    `shards` are read in the order of their parts: each layer of every checkpoint, then the head of every checkpoint if
    there are heads, all at once. `disk_bytes` is the space for the files of the pass, without what is fetched.
    `disk_allowed` is what may be used in all; next to a conversion, the conversion knows that.
    """

    text: PassText
    num_layers: int
    hidden_size: int
    work: WorkFolder
    job: PassJob
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
        """The least disk that the layer pass needs at a time."""
        return self.disk_bytes + self.layer_rooms[-1]

    def check_room(self) -> None:
        """Refuse a layer pass that cannot finish for lack of disk; raises DiskFullError with both numbers."""
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
        unit = self.num_models * self.num_tokens
        phases = dict[Phase, tuple[int, int]]()
        if any(self.fetched):
            total, done = others.get("download", (0, 0))
            phases["download"] = (total + sum(self.fetched), done + sum(self.fetched[: first * self.num_checkpoints]))
        phase: Phase = "calibrate" if self.work.purpose == "calibration" else "evaluate"
        phases[phase] = (self.num_steps * unit, first * unit)
        return phases

    def extent(self, first: int, *, layer_costs: tuple[float, ...]) -> Extent:
        """Return the extent of a layer pass on its own."""
        unit = self.num_models * self.num_tokens
        return Extent(self.phases(first, {}), layer_tokens=unit, layer_costs=layer_costs)

    @contextmanager
    def opened(self, first: int, *, room: int, events: Events, stop: Event | None = None) -> Generator[Around]:
        """Yield what makes the context in which a layer can be read; fetches parts during the block if it has to."""
        shards = replace(self.shards, room=room, events=events, stop=stop or Event())
        with shards.opened(first * self.num_checkpoints):
            yield shards.around

    def layer_pass(self, chunk: int, around: Around) -> "LayerLoop":
        """Return the layer pass of one model over the text, `chunk` windows at a time."""
        from k2convert.forward.layer_pass import LayerLoop

        return LayerLoop(
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
    ) -> Generator["LayerLoop"]:
        """Lock the work folder and yield the layer pass, begun or resumed. `command` is what the user typed.

        Raises DiskFullError without room, ResumeError in the folder of a different layer pass.
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
            with self.opened(first, room=self.disk_allowed - self.disk_bytes, events=events) as around:
                events.begun(self.extent(first, layer_costs=layer_costs), keep=keep)
                yield self.layer_pass(begun.chunk, around)


@dataclass(frozen=True, slots=True)
class ShardNeeds:
    """Layers and tensors that an output shard needs of the layer pass.

    `last` is the last layer that it waits for, -1 if it waits for none. `codes` are the bytes of quantized weights that
    it needs, by layer.
    """

    last: int
    codes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """A planned calibration. Nothing has been written yet. `needs` are those of each output shard."""

    layer_pass: LayerPass
    source: Checkpoint
    architecture: Architecture
    needs: Mapping[str, ShardNeeds]
    shared_width: int  # inner activations of the widest MLP that is converted and that every token takes, or 0

    @property
    def held_out_windows(self) -> int:
        """The windows that are kept out of everything that is fitted."""
        return int(held_out(self.layer_pass.text.windows.ids.shape[0]).sum())

    @property
    def fitted_windows(self) -> int:
        """The other windows."""
        return self.layer_pass.text.windows.ids.shape[0] - self.held_out_windows

    def last_layer(self, shard: str) -> int:
        """Return the last layer that an output shard waits for, -1 if it waits for none."""
        return self.needs[shard].last

    def layer_costs(self) -> tuple[float, ...]:
        """Return how much work each layer is."""
        from k2convert.calibration.memory import layer_costs, read_sizes

        size = self.layer_pass.text.size(self.layer_pass.num_layers)
        return layer_costs(read_sizes(self.source), size, is_gptq=True)


def plan_calibration(
    text: PassText,
    source: Source,
    *,
    hub: Hub,
    identity: Mapping[str, Any],
    work: WorkFolder,
    shards: Sequence[ShardJob],
) -> CalibrationPlan:
    """Plan a calibration from headers and windows; `shards` are those of the conversion. Raises PlanError.

    `identity` has every field that the results depend on.
    """
    architecture = read_architecture(source.checkpoint)
    num_layers = architecture.num_layers
    ids = text.windows.ids
    needs = {shard.name: shard_needs(shard) for shard in shards}
    states = 2 * ids.size * architecture.hidden_size * _STATE_BYTES * min(num_layers - 1, 2)
    experts = num_layers * architecture.num_experts * _EXPERT_BYTES
    decisions = num_layers * (_CHANNEL_BYTES * architecture.hidden_size + _LAYER_SLACK_BYTES)
    disk_bytes = states + experts + decisions + waiting_bytes(needs.values(), num_layers=num_layers)
    if text.devices == ("cpu",):
        disk_bytes += _scratch_bytes(source.checkpoint, tokens=ids.size, workers=text.threads)
    parts = [LayerPart(source.checkpoint, None, {})] * num_layers
    if source.remote is not None:
        remote = RemoteShards(hub, source.remote, work.downloads)
        parts = [LayerPart(source.checkpoint, remote, of) for of in layer_ranges(source.checkpoint, num_layers)]
    return CalibrationPlan(
        layer_pass=LayerPass(
            text=text,
            num_layers=num_layers,
            hidden_size=architecture.hidden_size,
            work=work,
            job=PassJob({**identity, "layers": num_layers}, text.chunk, source.identities()),
            shards=LayerShards(parts, work.downloads, 0, SILENT),
            disk_bytes=disk_bytes,
            disk_allowed=0,
        ),
        source=source.checkpoint,
        architecture=architecture,
        needs=needs,
        shared_width=max((_shared_width(shard) for shard in shards), default=0),
    )


def _scratch_bytes(source: Checkpoint, *, tokens: int, workers: int) -> int:
    """Return the disk that layer_tokens.py uses for a layer next to a CPU; an estimate for very uneven experts."""
    architecture = read_architecture(source)
    chosen = tokens * experts_per_token(source)
    at_once = (workers + 1) * _UNEVEN * chosen // max(architecture.num_experts, 1)
    outputs = min(at_once, chosen) * architecture.hidden_size
    inner = chosen * architecture.moe_intermediate_size
    return 4 * (_TOKEN_TENSORS * tokens * architecture.hidden_size + inner + outputs)


def _shared_width(shard: ShardJob) -> int:
    members = (p for step in shard.steps if isinstance(step, ConvertStep) for p in step.members)
    return max((p.num_columns for p in members if p.kind == "down" and p.role is not Role.EXPERTS), default=0)


def shard_needs(shard: ShardJob) -> ShardNeeds:
    """Return what an output shard needs of a layer pass: every layer that it has tensors of.

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
        if is_converted:
            num_bytes = sum(output.num_bytes for output in step.outputs) + _PROJECTION_BYTES * len(step.members)
            codes[place.layer] = codes.get(place.layer, 0) + num_bytes
    return ShardNeeds(max(layers), codes)


def waiting_bytes(needs: Collection[ShardNeeds], *, num_layers: int) -> int:
    """Return the most bytes of quantized weights that wait at a time.

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
