"""The layer pass of rule `gptq`, planned from headers and text, and what each output shard needs of it.

    layer 0 -> layer 1 -> layer 2 -> ...          the layer pass, with a conversion in a thread of its own
                  |          |
               shard 1    shard 2                 the pipeline: a shard is converted when its last layer is done

The layer pass is at most AHEAD layers ahead of the shards, so that few converted layers wait on the disk.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from k2convert.calibration.memory import layer_costs, read_sizes
from k2convert.checkpoint.index import Checkpoint
from k2convert.forward.layer_pass import LayerPass, PassText
from k2convert.forward.layer_shards import LayerPart, LayerShards, layer_ranges
from k2convert.forward.work import PassJob, WorkFolder
from k2convert.hub.client import Hub
from k2convert.hub.ranges import RemoteShards
from k2convert.models import locate_module, read_architecture
from k2convert.models.names import Architecture, Role
from k2convert.plan.plan import ConvertStep, ShardJob
from k2convert.records.events import SILENT
from k2convert.records.fingerprint import Source
from k2convert.text.windows import experts_per_token, held_out

AHEAD: Final = 1
_STATE_BYTES: Final = 2
_PROJECTION_BYTES: Final = 1024  # of the header of a layer's codes
_EXPERT_BYTES: Final = 128  # of what is kept of the decisions in a layer
_CHANNEL_BYTES: Final = 8  # of an exponent as text
_LAYER_SLACK_BYTES: Final = 1 << 16  # of the files of a layer besides
_TOKEN_TENSORS: Final = 3  # f32 [tokens, hidden] of a layer
_UNEVEN: Final = 4  # the busiest experts have so many times the even share


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
