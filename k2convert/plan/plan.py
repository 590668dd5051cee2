"""Index, headers and recipe in; a frozen, complete Plan out. Nothing is read but headers.

Every source tensor is claimed exactly once: converted, copied or dropped, with a reason. A projection's packed codes,
scales and shape are found wherever they lie, and so is the partner of a gate or up projection, with which it must share
one global scale. The output bytes, shard by shard and tensor by tensor, are known before the first is written.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts import projection_tensors
from k2convert.errors import PlanError
from k2convert.models.int4_config import check_int4_config
from k2convert.models.kimi import detect_family, parse_tensor_names, read_architecture
from k2convert.models.names import WEIGHT, Architecture, Family, TensorName
from k2convert.models.projections import (
    Projection,
    check_expert_shapes,
    check_experts,
    check_is_int4,
    check_roles_match,
    find_projections,
)
from k2convert.plan.excludes import exclude_list
from k2convert.plan.recipe import Recipe

BF16_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of an output shard, in file order; offsets follow from the order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ConvertStep:
    """Projections written together; `partners` lie in other shards and are only measured for the shared scale."""

    members: tuple[Projection, ...]
    partners: tuple[Projection, ...]
    outputs: tuple[OutputTensor, ...]


@dataclass(frozen=True, slots=True)
class CopyStep:
    """One tensor copied byte for byte."""

    tensor: TensorInfo
    outputs: tuple[OutputTensor, ...]


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Everything one output shard is made of, in file order."""

    name: str
    metadata: tuple[tuple[str, str], ...]
    steps: tuple[ConvertStep | CopyStep, ...]

    @property
    def outputs(self) -> list[OutputTensor]:
        return [output for step in self.steps for output in step.outputs]

    @property
    def data_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)

    @property
    def source_tensors(self) -> list[TensorInfo]:
        return [t for step in self.steps for t in step_sources(step)]

    @property
    def bytes_in(self) -> int:
        return sum(t.num_bytes for t in self.source_tensors)

    @property
    def source_shards(self) -> list[str]:
        return sorted({t.shard for t in self.source_tensors})


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole job, decided. `dropped` maps source tensors without a place in the result to the reason."""

    family: Family
    prefix: str
    architecture: Architecture
    recipe: Recipe
    excludes: tuple[str, ...]
    jobs: tuple[ShardJob, ...]
    dropped: dict[str, str]

    @property
    def data_bytes(self) -> int:
        return sum(job.data_bytes for job in self.jobs)

    @property
    def projections(self) -> list[Projection]:
        return [m for j in self.jobs for s in j.steps if isinstance(s, ConvertStep) for m in s.members]


def step_sources(step: ConvertStep | CopyStep) -> list[TensorInfo]:
    """Source tensors that a step reads, partners included."""
    if isinstance(step, CopyStep):
        return [step.tensor]
    return [t for p in (*step.members, *step.partners) for t in p.sources]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a recipe claims of a source: its family and counts, and every projection to convert."""

    family: Family
    prefix: str
    architecture: Architecture
    projections: dict[str, Projection]


def claim_projections(*, source: Checkpoint, recipe: Recipe, names: Mapping[str, TensorName] | None = None) -> Claim:
    """Find what is to be converted and hold everything against config.json; raises PlanError for what does not fit.

    `names` are the source's names taken apart, where the caller has them already.
    """
    family, prefix = detect_family(source)
    if recipe.family is not None and recipe.family != family:
        raise PlanError(
            f"recipe {recipe.name}: is for {recipe.family}, but {source.folder} is {family}. "
            "Name another recipe, or none: the right one is then picked."
        )
    architecture = read_architecture(source.config, where=str(source.folder))
    names = parse_tensor_names(source, prefix=prefix) if names is None else names
    check_is_int4(source, names)
    check_int4_config(source.config, where=str(source.folder))
    roles = recipe.roles if recipe.target == "nvfp4" else ("experts",)
    projections = find_projections(source, names, roles)
    check_roles_match(roles, projections, source)
    check_experts(source, names, architecture, prefix)
    check_expert_shapes(projections, architecture)
    return Claim(family, prefix, architecture, projections)


def plan_conversion(*, source: Checkpoint, recipe: Recipe) -> Plan:
    """Decide the whole job from headers; raises PlanError for anything unclaimed, missing or contradictory."""
    claim = claim_projections(source=source, recipe=recipe)
    family, prefix, architecture, projections = claim.family, claim.prefix, claim.architecture, claim.projections
    steps, dropped = _make_steps(source, projections, recipe)
    jobs = _resharded(steps) if recipe.target == "bf16" else _same_shards(source, steps)
    excludes = exclude_list(recipe, architecture, family) if recipe.target == "nvfp4" else []
    return Plan(family, prefix, architecture, recipe, tuple(excludes), tuple(jobs), dropped)


def _make_steps(
    source: Checkpoint, projections: dict[str, Projection], recipe: Recipe
) -> tuple[list[tuple[str, ConvertStep | CopyStep]], dict[str, str]]:
    """Steps with the shard each belongs to, in source order; partners found across shards."""
    claimed: dict[str, Projection] = {t.name: p for p in projections.values() for t in p.sources}
    sharing: dict[str, list[Projection]] = defaultdict(list)
    for projection in projections.values():
        sharing[projection.sharing_key].append(projection)
    steps: list[tuple[str, ConvertStep | CopyStep]] = []
    done: set[str] = set()
    for shard, header in source.headers.items():
        for tensor in sorted(header.tensors.values(), key=lambda t: t.begin):
            projection = claimed.get(tensor.name)
            if projection is None:
                output = OutputTensor(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes)
                steps.append((shard, CopyStep(tensor, (output,))))
            elif tensor is projection.home and projection.module not in done:
                group = sharing[projection.sharing_key]
                members = tuple(p for p in group if p.home.shard == shard)
                partners = tuple(p for p in group if p.home.shard != shard)
                done.update(p.module for p in members)
                outputs = tuple(o for p in members for o in _projection_outputs(p, recipe))
                steps.append((shard, ConvertStep(members, partners, outputs)))
    reason = "its value is the result's shape" if recipe.target == "nvfp4" else "its value is the weight's shape"
    dropped = {p.shape.name: reason for p in projections.values() if p.shape is not None}
    return steps, dropped


def _projection_outputs(projection: Projection, recipe: Recipe) -> list[OutputTensor]:
    rows, columns = projection.num_rows, projection.num_columns
    if recipe.target == "bf16":
        return [OutputTensor(f"{projection.module}.{WEIGHT}", "BF16", (rows, columns), rows * columns * 2)]
    tensors = projection_tensors(
        layout=recipe.layout, num_rows=rows, num_columns=columns, has_input_scale=recipe.activations == "w4a4"
    )
    return [OutputTensor(f"{projection.module}.{t[0]}", t[1], t[2], t[3]) for t in tensors]


def _same_shards(source: Checkpoint, steps: list[tuple[str, ConvertStep | CopyStep]]) -> list[ShardJob]:
    by_shard: dict[str, list[ConvertStep | CopyStep]] = defaultdict(list)
    for shard, step in steps:
        by_shard[shard].append(step)
    # A shard that held nothing but parts of projections living elsewhere has no successor.
    return [
        ShardJob(shard, tuple(sorted(header.metadata.items())), tuple(by_shard[shard]))
        for shard, header in source.headers.items()
        if by_shard[shard]
    ]


def _resharded(steps: list[tuple[str, ConvertStep | CopyStep]]) -> list[ShardJob]:
    parts: list[list[ConvertStep | CopyStep]] = [[]]
    filled = 0
    for _, step in steps:
        num_bytes = sum(output.num_bytes for output in step.outputs)
        if parts[-1] and filled + num_bytes > BF16_SHARD_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(step)
        filled += num_bytes
    total = len(parts)
    names = [f"model-{i:05d}-of-{total:06d}.safetensors" for i in range(1, total + 1)]
    return [ShardJob(name, (("format", "pt"),), tuple(part)) for name, part in zip(names, parts, strict=True)]


def action_counts(plan: Plan) -> dict[str, dict[str, Any]]:
    """Tensors and bytes by action, for the dry run: source side for what goes in, result side for what comes out."""
    converts = [s for j in plan.jobs for s in j.steps if isinstance(s, ConvertStep)]
    copies = [s for j in plan.jobs for s in j.steps if isinstance(s, CopyStep)]
    sources = [t for s in converts for p in s.members for t in p.sources]
    outputs = [o for s in converts for o in s.outputs]
    copied = sum(s.tensor.num_bytes for s in copies)
    return {
        "convert": {
            "source_tensors": len(sources),
            "bytes_in": sum(t.num_bytes for t in sources),
            "tensors": len(outputs),
            "bytes_out": sum(o.num_bytes for o in outputs),
            "projections": sum(len(s.members) for s in converts),
        },
        "copy": {"source_tensors": len(copies), "bytes_in": copied, "tensors": len(copies), "bytes_out": copied},
    }
