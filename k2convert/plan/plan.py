"""Index, headers and recipe in; a frozen, complete Plan out. Only headers are read.

Every source tensor is claimed exactly once: converted, copied or dropped. A projection's packed codes, scales and shape
may be in different shards, and so may the partner of a gate or up projection, which must share its global scale. The
output bytes are known shard by shard and tensor by tensor before the first byte is written.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.layouts.layout import fp8_tensors
from k2convert.choices import Activations, Layout, RoleName, Target
from k2convert.errors import PlanError
from k2convert.models import detect_family, parse_tensor_names
from k2convert.models.config import check_source_config
from k2convert.models.names import (
    WEIGHT,
    Architecture,
    ColumnScaling,
    Family,
    Role,
    TensorName,
    column_scaling,
)
from k2convert.models.projections import (
    SOURCE_REMEDY,
    Projection,
    check_fp8,
    check_model,
    check_recipe,
    check_roles_match,
    check_source_form,
    find_fp8,
    find_projections,
)
from k2convert.plan.recipe import Recipe

BF16_SHARD_BYTES: Final = 5_000_000_000
SCALABLE_DTYPES: Final = ("BF16", "F32")  # of copied tensors: norms, routers, shared experts


class OutputTensor(NamedTuple):
    """One tensor of an output shard. Its offset follows from the order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ConvertStep:
    """Projections written together; `partners` in other shards are only measured. K3 has a million outputs."""

    members: tuple[Projection, ...]
    partners: tuple[Projection, ...]
    recipe: Recipe

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        return tuple(output for member in self.members for output in self.outputs_of(member))

    def outputs_of(self, member: Projection) -> Iterator[OutputTensor]:
        for parameter, dtype, shape, num_bytes in self._tensors(member):
            yield OutputTensor(f"{member.module}.{parameter}", dtype, shape, num_bytes)

    @property
    def num_outputs(self) -> int:
        return sum(len(self._tensors(member)) for member in self.members)

    @property
    def num_bytes(self) -> int:
        return sum(tensor[3] for p in self.members for tensor in self._tensors(p))

    def _tensors(self, projection: Projection) -> tuple[tuple[str, str, tuple[int, ...], int], ...]:
        recipe = self.recipe
        shape = (projection.num_rows, projection.num_columns)
        return projection_tensors(recipe.target, recipe.layout, recipe.activations, *shape)


@lru_cache(maxsize=64)
def projection_tensors(
    target: Target, layout: Layout, activations: Activations, rows: int, columns: int
) -> tuple[tuple[str, str, tuple[int, ...], int], ...]:
    """Return (parameter, dtype, shape, num_bytes) of what a projection [rows, columns] becomes."""
    if target == "bf16":
        return ((WEIGHT, "BF16", (rows, columns), rows * columns * 2),)
    has_input_scale = activations == "w4a4"
    return tuple(LAYOUTS[layout].tensors(num_rows=rows, num_columns=columns, has_input_scale=has_input_scale))


@dataclass(frozen=True, slots=True)
class CopyStep:
    """One tensor copied byte for byte, or with exactly scaled columns."""

    tensor: TensorInfo
    scaling: ColumnScaling | None = None

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        return (OutputTensor(self.tensor.name, self.tensor.dtype, self.tensor.shape, self.tensor.num_bytes),)

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_bytes


@dataclass(frozen=True, slots=True)
class Fp8Step:
    """A BF16 weight [N, K] that becomes FP8, with scales of rows or of blocks, which `partner` shares.

    Smoothing scales its columns before.
    """

    tensor: TensorInfo
    role: Role
    has_blocks: bool
    partner: TensorInfo | None
    scaling: ColumnScaling | None = None

    @property
    def module(self) -> str:
        return self.tensor.name.rpartition(".")[0]

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        rows, columns = self.tensor.shape
        tensors = fp8_tensors(rows, columns, has_blocks=self.has_blocks)
        return tuple(OutputTensor(f"{self.module}.{tensor[0]}", *tensor[1:]) for tensor in tensors)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)


Step = ConvertStep | Fp8Step | CopyStep


@dataclass(frozen=True)
class ShardJob:
    """The content of one output shard, in file order. What is added up over its steps is added up once."""

    name: str
    metadata: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]

    @property
    def outputs(self) -> list[OutputTensor]:
        return [output for step in self.steps for output in step.outputs]

    @cached_property
    def num_outputs(self) -> int:
        return sum(step.num_outputs for step in self.steps)

    @cached_property
    def data_bytes(self) -> int:
        return sum(step.num_bytes for step in self.steps)

    @property
    def source_tensors(self) -> list[TensorInfo]:
        return [t for step in self.steps for t in step_sources(step)]

    @cached_property
    def bytes_in(self) -> int:
        return sum(t.num_bytes for t in self.source_tensors)

    @property
    def source_shards(self) -> list[str]:
        return sorted({t.shard for t in self.source_tensors})


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole job, decided."""

    family: str
    recipe: Recipe
    excludes: tuple[str, ...]
    banks: tuple[str, ...]
    jobs: tuple[ShardJob, ...]
    fp8_targets: tuple[tuple[str, ...], ...] = ()
    fp8_layers: tuple[str, ...] = ()

    @property
    def data_bytes(self) -> int:
        return sum(job.data_bytes for job in self.jobs)

    @property
    def projections(self) -> list[Projection]:
        return [m for j in self.jobs for s in j.steps if isinstance(s, ConvertStep) for m in s.members]


def step_sources(step: Step) -> list[TensorInfo]:
    """Return the source tensors that a step reads, including those of partners."""
    if isinstance(step, Fp8Step) and step.partner is not None:
        return [step.tensor, step.partner]
    if not isinstance(step, ConvertStep):
        return [step.tensor]
    return [t for p in (*step.members, *step.partners) for t in p.sources]


def claim_projections(
    *, source: Checkpoint, recipe: Recipe, names: Mapping[str, TensorName] | None = None
) -> tuple[Family, Architecture, dict[str, Projection], Mapping[str, TensorName]]:
    """Find what to convert, in the source's parsed `names`, and check it against config.json; raises PlanError.

    Returns the source's family, its counts, every projection to convert, and the parsed names.
    """
    family = detect_family(source)
    check_family(recipe, family, where=str(source.folder))
    architecture = family.read_architecture(source.config, str(source.folder))
    names = parse_tensor_names(source, family=family) if names is None else names
    check_source_form(source, names, family=family)
    check_source_config(source.config, family=family, where=str(source.folder))
    roles = converted_roles(recipe)
    projections = find_projections(source, names, roles)
    check_roles_match(roles, projections, source)
    check_model(source, names, architecture, family)
    return family, architecture, projections, names


def converted_roles(recipe: Recipe) -> tuple[RoleName, ...]:
    """Return the roles whose weights become NVFP4, or BF16, which is for experts alone."""
    return recipe.roles if recipe.target == "nvfp4" else ("experts",)


def check_family(recipe: Recipe, family: Family, *, where: str) -> None:
    """Refuse a recipe that is not for the family of `where`, or whose result not every engine loads (PlanError)."""
    if recipe.family is not None and recipe.family != family.name:
        raise PlanError(
            f"recipe {recipe.name}: is for {recipe.family}, but {where} is {family.name}. "
            "Choose a different recipe, or none: the right one is then used."
        )
    check_recipe(family, converted_roles(recipe), kv_cache=recipe.kv_cache, where=f"recipe {recipe.name}")
    if recipe.fp8:
        check_fp8(family, recipe.fp8, layout=recipe.layout, where=f"recipe {recipe.name}")


def plan_conversion(*, source: Checkpoint, recipe: Recipe, scaled_layers: Collection[int] = ()) -> Plan:
    """Decide the whole job from headers; `scaled_layers` are smoothed MoE layers. Raises PlanError."""
    family, architecture, projections, names = claim_projections(source=source, recipe=recipe)
    scalings: dict[str, ColumnScaling] = {}
    for layer in scaled_layers:
        if (name := f"{family.mlp_norm.format(layer=layer)}.{WEIGHT}") not in source.tensors:
            raise PlanError(f"{source.folder}: {name}: not in the source. {SOURCE_REMEDY}")
    for name, tensor_name in names.items():
        if tensor_name.layer not in scaled_layers or (scaling := column_scaling(tensor_name, family=family)) is None:
            continue
        tensor = source.tensors[name]
        columns = architecture.hidden_size
        if tensor.dtype not in SCALABLE_DTYPES or tensor.shape[-1:] != (columns,):
            raise PlanError(
                f"{tensor.shard}: {name}: {tensor.dtype} {list(tensor.shape)}; smoothing needs "
                f"{' or '.join(SCALABLE_DTYPES)} with {columns} columns. Use --set smoothing=false."
            )
        scalings[name] = scaling
    fp8: dict[str, Fp8Step] = {}
    if recipe.fp8:
        weights = find_fp8(source, names, recipe.fp8, family=family, architecture=architecture)
        fp8 = {name: _fp8_step(source, name, role, family, scalings.get(name)) for name, role in weights.items()}
    steps = _make_steps(source, projections, recipe, scalings, fp8)
    jobs = _resharded(steps) if recipe.target == "bf16" else _same_shards(source, steps)
    unconverted = family.unconverted((*recipe.roles, *recipe.fp8), architecture) if recipe.target == "nvfp4" else ()
    excludes = tuple(LAYOUTS[recipe.layout].exclude_entry(part, is_open) for part, is_open in unconverted)
    banks = family.bank_names(architecture.moe_layers)
    targets = fp8_targets(family, recipe, architecture)
    layers = family.fp8_names(step.module for step in fp8.values())
    return Plan(family.name, recipe, excludes, banks, tuple(jobs), targets, layers)


def _fp8_step(source: Checkpoint, name: str, role: Role, family: Family, scaling: ColumnScaling | None) -> Fp8Step:
    partner = source.tensors.get(f"{family.fp8_partner(name.removesuffix(f'.{WEIGHT}'))}.{WEIGHT}")
    return Fp8Step(source.tensors[name], role, family.has_fp8_blocks, partner, scaling)


def fp8_targets(family: Family, recipe: Recipe, architecture: Architecture) -> tuple[tuple[str, ...], ...]:
    """Return the patterns of the NVFP4 and of the FP8 layers as groups of a config have them; empty without FP8, or if
    each layer is listed.
    """
    if not recipe.fp8 or family.has_fp8_blocks:
        return ()
    patterns = (family.linear_patterns(roles, architecture) for roles in (recipe.roles, recipe.fp8))
    return tuple(tuple(f"re:{pattern}" for pattern in group) for group in patterns)


def _make_steps(
    source: Checkpoint,
    projections: dict[str, Projection],
    recipe: Recipe,
    scalings: Mapping[str, ColumnScaling],
    fp8: Mapping[str, Fp8Step],
) -> list[tuple[str, Step]]:
    """Return (shard, step) in source order. Partners are found across shards."""
    claimed: dict[str, Projection] = {t.name: p for p in projections.values() for t in p.sources}
    sharing: dict[str, list[Projection]] = defaultdict(list)
    for projection in projections.values():
        sharing[projection.sharing_key].append(projection)
    steps: list[tuple[str, Step]] = []
    done: set[str] = set()
    for shard, header in source.headers.items():
        for tensor in sorted(header.tensors.values(), key=lambda t: t.begin):
            projection = claimed.get(tensor.name)
            if tensor.name in fp8:
                steps.append((shard, fp8[tensor.name]))
            elif projection is None:
                steps.append((shard, CopyStep(tensor, scalings.get(tensor.name))))
            elif tensor is projection.home and projection.module not in done:
                group = sharing[projection.sharing_key]
                members = tuple(p for p in group if p.home.shard == shard)
                partners = tuple(p for p in group if p.home.shard != shard)
                done.update(p.module for p in members)
                steps.append((shard, ConvertStep(members, partners, recipe)))
    return steps


def _same_shards(source: Checkpoint, steps: list[tuple[str, Step]]) -> list[ShardJob]:
    by_shard: dict[str, list[Step]] = defaultdict(list)
    for shard, step in steps:
        by_shard[shard].append(step)
    # A shard that has only parts of projections of other shards gets no output shard.
    return [
        ShardJob(shard, tuple(sorted(header.metadata.items())), tuple(by_shard[shard]))
        for shard, header in source.headers.items()
        if by_shard[shard]
    ]


def _resharded(steps: list[tuple[str, Step]]) -> list[ShardJob]:
    parts: list[list[Step]] = [[]]
    filled = 0
    for _, step in steps:
        num_bytes = step.num_bytes
        if parts[-1] and filled + num_bytes > BF16_SHARD_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(step)
        filled += num_bytes
    return [
        ShardJob(f"model-{i:05d}-of-{len(parts):06d}.safetensors", (("format", "pt"),), tuple(part))
        for i, part in enumerate(parts, start=1)
    ]


def action_counts(plan: Plan) -> dict[str, dict[str, int]]:
    """Return tensors and bytes by action, of source and result; `scale` and `fp8` only if there are such tensors."""
    none = dict.fromkeys(("source_tensors", "bytes_in", "tensors", "bytes_out"), 0)
    counts = {"convert": none | {"projections": 0}, "copy": {**none}}
    for step in (step for job in plan.jobs for step in job.steps):
        if isinstance(step, ConvertStep):
            action = "convert"
            sources = [t for member in step.members for t in member.sources]
            counts[action]["projections"] += len(step.members)
        else:
            action = "fp8" if isinstance(step, Fp8Step) else "copy" if step.scaling is None else "scale"
            sources = [step.tensor]
        entry = counts.setdefault(action, {**none})
        entry["source_tensors"] += len(sources)
        entry["bytes_in"] += sum(tensor.num_bytes for tensor in sources)
        entry["tensors"] += step.num_outputs
        entry["bytes_out"] += step.num_bytes
    return counts
