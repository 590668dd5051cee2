"""The linear layers of a source that become NVFP4, found by the presence of `weight_packed`, never by a config's list.

Also here: the checks that the source is an INT4 checkpoint, and that experts, router and config agree; and a
projection's bytes as arrays.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import Bytes
from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.errors import FormatError, MalformedFileError, PlanError
from k2convert.models.names import (
    CONVERTIBLE_ROLES,
    INT4_PARAMETERS,
    WEIGHT,
    WEIGHT_PACKED,
    WEIGHT_SCALE,
    WEIGHT_SHAPE,
    Architecture,
    Family,
    Role,
    TensorName,
)
from k2convert.quantize.formats.int4 import FIRST_UNUSABLE_BITS, Bf16Weight, Int4Weight, SourceWeight, check_int4_scales

SOURCE_REMEDY: Final = (
    "Check that the source is complete and unchanged: `hf download REPO --local-dir FOLDER` replaces damaged files."
)


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer [num_rows, num_columns] to convert: INT4 (packed, scale, shape) or BF16 (weight).

    `kind` is gate, up or down.
    """

    module: str
    role: Role
    kind: str
    sharing_key: str
    num_rows: int
    num_columns: int
    packed: TensorInfo | None = None
    scale: TensorInfo | None = None
    shape: TensorInfo | None = None
    weight: TensorInfo | None = None

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        return tuple(t for t in (self.packed, self.scale, self.shape, self.weight) if t is not None)

    @property
    def home(self) -> TensorInfo:
        """The tensor whose shard and position the result takes."""
        tensor = self.packed or self.weight
        assert tensor is not None
        return tensor

    @property
    def where(self) -> str:
        """Shard and module, for messages."""
        return f"{self.home.shard}: {self.module}"


def check_is_int4(source: Checkpoint, names: Mapping[str, TensorName], *, family: Family) -> None:
    """Refuse checkpoints that are not INT4: NVFP4, FP8 and BF16 ones each get their own PlanError."""
    # NVFP4 first: its block scales are FP8 too.
    for name, parts in names.items():
        tensor = source.tensors[name]
        nvfp4 = parts.parameter in ("weight_scale_2", "weight_global_scale")
        if nvfp4 or (parts.parameter == WEIGHT_PACKED and tensor.dtype == "U8"):
            raise PlanError(
                f"{source.folder}: {name} ({tensor.dtype}): this checkpoint is already NVFP4. There is nothing to do."
            )
    for name in names:
        tensor = source.tensors[name]
        if tensor.dtype.startswith("F8_"):
            raise PlanError(f"{source.folder}: {name} is {tensor.dtype}: an FP8 checkpoint. {family.source_hint}")
    if not any(parts.parameter == WEIGHT_PACKED for parts in names.values()):
        raise PlanError(
            f"{source.folder}: no tensor ends in .{WEIGHT_PACKED}, so nothing is INT4 (a BF16 copy?). "
            f"{family.source_hint} ModelOpt and llm-compressor quantize BF16 models."
        )


def find_projections(
    source: Checkpoint, names: Mapping[str, TensorName], roles: tuple[str, ...]
) -> dict[str, Projection]:
    """Find every INT4 module, and the BF16 modules in `roles`, by module name; raises PlanError for incomplete ones."""
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, parts in names.items():
        modules[parts.module][parts.parameter] = source.tensors[name]
    projections: dict[str, Projection] = {}
    for name, parts in names.items():
        module = parts.module
        found = modules[module]
        if WEIGHT_PACKED in found and module not in projections:
            projections[module] = _int4_projection(parts, found)
        elif parts.parameter in INT4_PARAMETERS and WEIGHT_PACKED not in found:
            raise PlanError(
                f"{found[parts.parameter].shard}: {name}: no shard has its {WEIGHT_PACKED}. {SOURCE_REMEDY}"
            )
        elif parts.role in roles and parts.parameter == WEIGHT:
            projections[module] = _bf16_projection(parts, found[WEIGHT])
    return projections


def projection_of(source: Checkpoint, parts: TensorName) -> Projection:
    """Return one module of the source as a projection: INT4 if it is packed, else BF16; PlanError if it is neither."""
    parameters = (*INT4_PARAMETERS, WEIGHT)
    found = {p: t for p in parameters if (t := source.tensors.get(f"{parts.module}.{p}")) is not None}
    if WEIGHT_PACKED in found:
        return _int4_projection(parts, found)
    if WEIGHT not in found:
        raise PlanError(f"{source.folder}: {parts.module}: not in the source.")
    return _bf16_projection(parts, found[WEIGHT])


def _int4_projection(parts: TensorName, found: dict[str, TensorInfo]) -> Projection:
    packed, module = found[WEIGHT_PACKED], parts.module
    where = f"{packed.shard}: {module}"
    if parts.role not in CONVERTIBLE_ROLES:
        raise PlanError(
            f"{where}: is INT4 in the role {parts.role}; no engine loads this role in NVFP4. {SOURCE_REMEDY}"
        )
    for parameter in INT4_PARAMETERS:
        if parameter not in found:
            raise PlanError(f"{where}.{parameter}: missing in every shard. {SOURCE_REMEDY}")
    if extra := sorted(set(found) - set(INT4_PARAMETERS)):
        raise PlanError(
            f"{where}.{extra[0]}: not part of a symmetric INT4 projection (asymmetric or act-order?). {SOURCE_REMEDY}"
        )
    scale, shape = found[WEIGHT_SCALE], found[WEIGHT_SHAPE]
    _expect(packed, dtypes=("I32",), rank=2)
    _expect(scale, dtypes=("BF16",), rank=2)
    _expect(shape, dtypes=("I32", "I64"), rank=1)
    num_rows, num_columns = packed.shape[0], packed.shape[1] * 8
    if num_columns % GROUP_SIZE:
        raise PlanError(
            f"{packed.shard}: {packed.name}: {num_columns} input columns are not a multiple of the group size "
            f"{GROUP_SIZE}. {SOURCE_REMEDY}"
        )
    if scale.shape != (num_rows, num_columns // GROUP_SIZE):
        raise PlanError(
            f"{scale.shard}: {scale.name}: shape {list(scale.shape)}, but {packed.name} {list(packed.shape)} needs "
            f"{[num_rows, num_columns // GROUP_SIZE]} (one scale per {GROUP_SIZE} columns). {SOURCE_REMEDY}"
        )
    if shape.shape != (2,):
        raise PlanError(f"{shape.shard}: {shape.name}: shape {list(shape.shape)}, expected [2]. {SOURCE_REMEDY}")
    return Projection(
        module, parts.role, str(parts.projection), parts.sharing_key, num_rows, num_columns,
        packed=packed, scale=scale, shape=shape,
    )  # fmt: skip


def _bf16_projection(parts: TensorName, weight: TensorInfo) -> Projection:
    _expect(weight, dtypes=("BF16",), rank=2)
    num_rows, num_columns = weight.shape
    if num_columns % BLOCK_SIZE:
        raise PlanError(
            f"{weight.shard}: {weight.name}: {num_columns} input columns are not a multiple of {BLOCK_SIZE}. "
            f"{SOURCE_REMEDY}"
        )
    return Projection(
        parts.module, parts.role, str(parts.projection), parts.sharing_key, num_rows, num_columns, weight=weight
    )


def _expect(tensor: TensorInfo, *, dtypes: tuple[str, ...], rank: int) -> None:
    if tensor.dtype not in dtypes or len(tensor.shape) != rank:
        raise PlanError(
            f"{tensor.shard}: {tensor.name}: {tensor.dtype} {list(tensor.shape)}, expected "
            f"{' or '.join(dtypes)} with {rank} dimension{'s' if rank > 1 else ''}. {SOURCE_REMEDY}"
        )


def check_roles_match(roles: tuple[str, ...], projections: dict[str, Projection], source: Checkpoint) -> None:
    """Refuse a recipe role without any tensor, and INT4 in a role that the recipe does not name (PlanError)."""
    present = {p.role for p in projections.values()}
    for role in roles:
        if role not in present:
            raise PlanError(
                f"{source.folder}: the recipe names the role {role}, but no tensor has it. "
                f"Remove {role} from the recipe's roles."
            )
    for p in projections.values():
        if p.role not in roles:
            raise PlanError(
                f"{p.where}: is INT4, but the recipe does not name its role {p.role}. "
                f"Add {p.role} to the recipe's roles: an NVFP4 checkpoint may not contain INT4."
            )


def check_experts(
    source: Checkpoint, names: Mapping[str, TensorName], architecture: Architecture, family: Family
) -> None:
    """Check experts and router of every MoE layer against n_routed_experts, in pruned models too (PlanError)."""
    experts: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for parts in names.values():
        if parts.role is Role.EXPERTS and parts.layer is not None and parts.expert is not None:
            experts[parts.layer][parts.expert].add(str(parts.projection))
    count = architecture.num_experts
    if sorted(experts) != list(architecture.moe_layers):
        raise PlanError(
            f"{source.folder}: config.json has the MoE layers {_span(architecture.moe_layers)}, but experts are in "
            f"{_span(tuple(sorted(experts)))}. A shard is missing, or config.json belongs to a different model. "
            f"{SOURCE_REMEDY}"
        )
    for layer, found in experts.items():
        if sorted(found) != list(range(count)):
            raise PlanError(
                f"{source.folder}: layer {layer} has {len(found)} experts numbered {min(found)}..{max(found)}, but "
                f"config.json says n_routed_experts = {count} (expected 0..{count - 1}). {SOURCE_REMEDY}"
            )
        for expert, kinds in found.items():
            if lacking := {"gate", "up", "down"} - kinds:
                raise PlanError(
                    f"{source.folder}: layer {layer} expert {expert} has no {sorted(lacking)[0]}_proj. {SOURCE_REMEDY}"
                )
        _check_router(source, layer, count, family)


def _check_router(source: Checkpoint, layer: int, count: int, family: Family) -> None:
    for parameter in family.router_parameters:
        name = f"{family.router.format(layer=layer)}.{parameter}"
        tensor = source.tensors.get(name)
        if tensor is None or tensor.shape[:1] != (count,):
            rows = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}"
            raise PlanError(
                f"{source.folder}: {name} {rows}, but config.json says n_routed_experts = {count}. {SOURCE_REMEDY}"
            )


def check_expert_shapes(projections: dict[str, Projection], architecture: Architecture) -> None:
    """Check every routed expert's [out, in] against hidden_size and moe_intermediate_size (PlanError)."""
    hidden, width = architecture.hidden_size, architecture.moe_intermediate_size
    for p in projections.values():
        expected = (hidden, width) if p.kind == "down" else (width, hidden)
        if p.role is Role.EXPERTS and (p.num_rows, p.num_columns) != expected:
            raise PlanError(
                f"{p.home.shard}: {p.home.name}: has the shape {[p.num_rows, p.num_columns]}, but config.json says "
                f"{list(expected)} (hidden_size {hidden}, moe_intermediate_size {width}). {SOURCE_REMEDY}"
            )


def _span(numbers: tuple[int, ...]) -> str:
    return f"{numbers[0]}..{numbers[-1]} ({len(numbers)})" if numbers else "none"


class TensorSource(Protocol):
    """The source of a tensor's bytes: a ShardReader, or bytes that were read before."""

    def read(self, tensor: TensorInfo) -> Bytes:
        """Return all bytes of a tensor; raises SourceReadError if reading fails."""
        ...


def load_projection(reader: TensorSource, projection: Projection) -> SourceWeight:
    """Read one projection; raises MalformedFileError for a wrong weight_shape and for invalid scales."""
    rows, columns = projection.num_rows, projection.num_columns
    if projection.weight is not None:
        return Bf16Weight(reader.read(projection.weight).view(np.uint16).reshape(rows, columns))
    packed, scale, shape = projection.packed, projection.scale, projection.shape
    assert packed is not None
    assert scale is not None
    assert shape is not None
    stored = np.frombuffer(reader.read(shape), dtype="<i4" if shape.dtype == "I32" else "<i8").tolist()
    if stored != [rows, columns]:
        raise MalformedFileError(
            f"{shape.shard}: {shape.name} is {stored}, but {packed.name} has the shape {[rows, columns]}."
        )
    weight = Int4Weight(
        packed=reader.read(packed).reshape(rows, columns // 2),
        scale_bits=reader.read(scale).view(np.uint16).reshape(rows, columns // GROUP_SIZE),
    )
    if weight.scale_bits.max(initial=0) >= FIRST_UNUSABLE_BITS:
        try:
            check_int4_scales(weight.scale_bits, name=f"{scale.shard}: {scale.name}")
        except FormatError as error:
            raise MalformedFileError(str(error)) from None
    return weight
