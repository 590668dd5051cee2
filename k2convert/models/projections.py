"""The linear layers of a source that become NVFP4, found by the presence of `weight_packed`, never by a config's list.

Also here: the checks that the source is in its family's format, and that its tensors are those of the model that
config.json describes; and a projection's bytes as arrays.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import Bytes
from k2convert.choices import BLOCK_SIZE, GROUP_SIZE, Layout
from k2convert.errors import FormatError, MalformedFileError, PlanError, quoted
from k2convert.models.config import EXPERTS_KEY, DescribedModel, Experts, find_quantization_config, key_of
from k2convert.models.names import (
    CONVERTIBLE_ROLES,
    WEIGHT,
    WEIGHT_PACKED,
    WEIGHT_SCALE,
    WEIGHT_SHAPE,
    Architecture,
    Family,
    Role,
    SourceFormat,
    TensorName,
    why_foreign,
)
from k2convert.models.source_formats import INT4, MXFP4, NVFP4, SOURCE_FORMATS
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight

_PACKED_PARAMETERS: Final = tuple(dict.fromkeys(name for row in SOURCE_FORMATS for name in row.parameters))
SOURCE_REMEDY: Final = (
    "Check that the source is complete and unchanged: `hf download REPO --local-dir FOLDER` replaces damaged files."
)


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer [num_rows, num_columns] to convert, packed or BF16; `kind` is gate, up or down."""

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


def check_source_form(source: Checkpoint, names: Mapping[str, TensorName], *, family: Family) -> None:
    """Refuse checkpoints that are not in the family's format: NVFP4, FP8, BF16 and others get their own PlanErrors."""
    known = family.source_format
    is_packed = any(tensor_name.parameter == WEIGHT_PACKED for tensor_name in names.values())
    if not is_packed and (method := other_method(source.config)) is not None:
        raise PlanError(
            f"{source.folder}: config.json: quantization_config.quant_method is {method}, which is not converted. "
            f"{family.source_hint}"
        )
    # NVFP4 first: its block scales are FP8 too.
    for name, tensor_name in names.items():
        if tensor_name.parameter not in _TELLING:
            continue
        tensor = source.tensors[name]
        form = NVFP4
        if tensor_name.parameter == WEIGHT_PACKED and not any(
            f"{tensor_name.module}.{parameter}" in source.tensors for parameter in _GLOBAL_SCALES
        ):
            form = packed_form(tensor, source.tensors.get(f"{tensor_name.module}.{WEIGHT_SCALE}"))
        if form == NVFP4:
            raise PlanError(
                f"{source.folder}: {name} ({tensor.dtype}): this checkpoint is already NVFP4. Use the checkpoint "
                "that it was made of to get another form."
            )
        if not form and known.packed_dtype != tensor.dtype:
            raise PlanError(
                f"{source.folder}: {name} is {tensor.dtype}, and its scales are those of neither NVFP4 nor MXFP4. "
                f"Codes of {known.title} are {known.packed_dtype}. {family.source_hint}"
            )
        if form and form != known.title:
            raise PlanError(
                f"{source.folder}: {name} ({tensor.dtype}) is {form}, but {family.title} is converted from "
                f"{known.title}. {family.source_hint}"
            )
    for name, tensor in source.tensors.items():
        is_scale = tensor.dtype in known.scale_dtypes and name.endswith(WEIGHT_SCALE)
        if not is_scale and tensor.dtype.startswith("F8_"):
            raise PlanError(f"{source.folder}: {name} is {tensor.dtype}: an FP8 checkpoint. {family.source_hint}")
    if not is_packed:
        stated = (find_quantization_config(source.config) or ("", {}))[1].get("format")
        stored = sorted({name.parameter for name in names.values() if name.role is Role.EXPERTS})
        hint = family.source_hint
        if stated is not None:
            guess = f"config.json says {quoted(stated)}"
        elif stored and "weight" not in stored:
            guess = f"experts have {', '.join(stored)}"
        else:
            guess = "a BF16 copy?"
            hint += " ModelOpt and llm-compressor quantize BF16 models."
        raise PlanError(
            f"{source.folder}: no tensor ends in .{WEIGHT_PACKED}, so nothing is {known.title} ({guess}). {hint}"
        )


def other_method(config: Mapping[str, Any]) -> str | None:
    """Return the quant_method of a config whose weights are neither a source's nor a result's; None for all others."""
    method = (find_quantization_config(config) or ("", {}))[1].get("quant_method")
    if not isinstance(method, str) or method in _METHODS or method.startswith("modelopt"):
        return None
    return quoted(method)


_METHODS: Final = ("compressed-tensors", "fp8")  # told apart by the tensors
_GLOBAL_SCALES: Final = ("weight_scale_2", "weight_global_scale")
_TELLING: Final = (WEIGHT_PACKED, *_GLOBAL_SCALES)


def find_projections(
    source: Checkpoint, names: Mapping[str, TensorName], roles: tuple[str, ...]
) -> dict[str, Projection]:
    """Find every packed module, and the BF16 modules in `roles`, by module name; PlanError for incomplete ones."""
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, tensor_name in names.items():
        modules[tensor_name.module][tensor_name.parameter] = source.tensors[name]
    projections: dict[str, Projection] = {}
    for name, tensor_name in names.items():
        module = tensor_name.module
        parameters = modules[module]
        if WEIGHT_PACKED in parameters and module not in projections:
            projections[module] = _packed_projection(tensor_name, parameters)
        elif tensor_name.parameter in _PACKED_PARAMETERS and WEIGHT_PACKED not in parameters:
            raise PlanError(
                f"{parameters[tensor_name.parameter].shard}: {name}: no shard has its {WEIGHT_PACKED}. {SOURCE_REMEDY}"
            )
        elif tensor_name.role in roles and tensor_name.parameter == WEIGHT:
            projections[module] = _bf16_projection(tensor_name, parameters[WEIGHT])
    return projections


def projection_of(source: Checkpoint, tensor_name: TensorName) -> Projection:
    """Return one module of the source as a projection: packed or BF16; PlanError if it is neither."""
    parameters = (*_PACKED_PARAMETERS, WEIGHT)
    tensors = {p: t for p in parameters if (t := source.tensors.get(f"{tensor_name.module}.{p}")) is not None}
    if WEIGHT_PACKED in tensors:
        return _packed_projection(tensor_name, tensors)
    if WEIGHT not in tensors:
        raise PlanError(f"{source.folder}: {tensor_name.module}: not in the source.")
    return _bf16_projection(tensor_name, tensors[WEIGHT])


def _export(known: SourceFormat) -> str:
    return f"To convert it, {known.export}"


def _packed_projection(tensor_name: TensorName, tensors: dict[str, TensorInfo]) -> Projection:
    packed = tensors[WEIGHT_PACKED]
    module = tensor_name.module
    known = format_of(packed)
    where = f"{packed.shard}: {module}"
    if tensor_name.role not in CONVERTIBLE_ROLES:
        raise PlanError(
            f"{where}: is {known.title} in the role {tensor_name.role}; only experts and MLPs are converted. "
            f"{_export(known)}"
        )
    for parameter in known.parameters:
        if parameter not in tensors:
            advice = SOURCE_REMEDY
            if parameter == WEIGHT_SHAPE:
                advice = _export(known)
            raise PlanError(f"{where}.{parameter}: missing in every shard. {advice}")
    if extra := sorted(set(tensors) - set(known.parameters)):
        raise PlanError(
            f"{where}.{extra[0]}: not part of a symmetric {known.title} projection (asymmetric or act-order?). "
            f"{_export(known)}"
        )
    scale = tensors[WEIGHT_SCALE]
    shape = tensors.get(WEIGHT_SHAPE)
    _expect(packed, dtypes=(known.packed_dtype,), rank=2)
    _expect(scale, dtypes=known.scale_dtypes, rank=2, advice=_export(known))
    if shape is not None:
        _expect(shape, dtypes=("I32", "I64"), rank=1)
    num_rows = packed.shape[0]
    num_columns = packed.shape[1] * known.columns_per_element
    if num_columns % GROUP_SIZE:
        raise PlanError(
            f"{packed.shard}: {packed.name}: {num_columns} input columns are not a multiple of the group size "
            f"{GROUP_SIZE}. {_export(known)}"
        )
    if scale.shape != (num_rows, num_columns // GROUP_SIZE):
        raise PlanError(
            f"{scale.shard}: {scale.name}: shape {list(scale.shape)}, but {packed.name} {list(packed.shape)} needs "
            f"{[num_rows, num_columns // GROUP_SIZE]} (one scale per {GROUP_SIZE} columns). {_export(known)}"
        )
    if shape is not None and shape.shape != (2,):
        raise PlanError(f"{shape.shard}: {shape.name}: shape {list(shape.shape)}, expected [2]. {SOURCE_REMEDY}")
    return Projection(
        module, tensor_name.role, str(tensor_name.projection), tensor_name.sharing_key, num_rows, num_columns,
        packed=packed, scale=scale, shape=shape,
    )  # fmt: skip


def _bf16_projection(tensor_name: TensorName, weight: TensorInfo) -> Projection:
    _expect(weight, dtypes=("BF16",), rank=2)
    num_rows, num_columns = weight.shape
    if num_columns % BLOCK_SIZE:
        raise PlanError(
            f"{weight.shard}: {weight.name}: {num_columns} input columns are not a multiple of {BLOCK_SIZE}. "
            f"{SOURCE_REMEDY}"
        )
    return Projection(
        tensor_name.module,
        tensor_name.role,
        str(tensor_name.projection),
        tensor_name.sharing_key,
        num_rows,
        num_columns,
        weight=weight,
    )


def _expect(tensor: TensorInfo, *, dtypes: tuple[str, ...], rank: int, advice: str = SOURCE_REMEDY) -> None:
    if tensor.dtype not in dtypes or len(tensor.shape) != rank:
        raise PlanError(
            f"{tensor.shard}: {tensor.name}: {tensor.dtype} {list(tensor.shape)}, expected "
            f"{' or '.join(dtypes)} with {rank} dimension{'s' if rank > 1 else ''}. {advice}"
        )


def check_roles_match(roles: tuple[str, ...], projections: dict[str, Projection], source: Checkpoint) -> None:
    """Refuse a recipe role without any tensor, and a packed weight in a role that is not named (PlanError)."""
    present = {p.role for p in projections.values()}
    for role in roles:
        if role not in present:
            raise PlanError(
                f"{source.folder}: the recipe names the role {role}, but no tensor has it. "
                f"Remove {role} from the recipe's roles."
            )
    for p in projections.values():
        if p.role not in roles:
            form = format_of(p.home).title
            raise PlanError(
                f"{p.where}: is {form}, but the recipe does not name its role {p.role}. "
                f"Add {p.role} to the recipe's roles: an NVFP4 checkpoint may not contain {form}."
            )


def find_fp8(
    source: Checkpoint,
    names: Mapping[str, TensorName],
    roles: Sequence[str],
    *,
    family: Family,
    architecture: Architecture,
) -> dict[str, Role]:
    """Find the BF16 weights [N, K] that become FP8, with their roles; PlanError for one in another form."""
    weights: dict[str, Role] = {}
    patterns = family.linear_patterns(roles, architecture)
    for name, tensor_name in names.items():
        tensor = source.tensors[name]
        if not family.takes_fp8(tensor_name, roles) or tensor_name.parameter != WEIGHT or len(tensor.shape) != 2:
            continue
        _expect(tensor, dtypes=("BF16",), rank=2)
        weights[name] = tensor_name.role
        if not any(re.fullmatch(pattern, tensor_name.module) for pattern in patterns):
            raise PlanError(
                f"{tensor.shard}: {name}: FP8 is known for the attention of {family.title} only, in which no linear "
                "layer has this name. Remove attention from the recipe's fp8."
            )
    for role in roles:
        if role not in weights.values():
            raise PlanError(
                f"{source.folder}: the recipe's fp8 names the role {role}, but no tensor has it. Remove {role} from it."
            )
    return weights


def check_fp8(family: Family, roles: Sequence[str], *, layout: Layout, where: str) -> None:
    """Refuse FP8 of roles and in a layout that not every engine loads for the family (PlanError)."""
    if layout != family.fp8_layout:
        raise PlanError(
            f"{where}: SGLang does not load FP8 for {family.title} in the layout {layout}. Use --layout "
            f"{family.fp8_layout}, or remove fp8 from the recipe."
        )
    if extra := [role for role in roles if role not in family.fp8_roles]:
        raise PlanError(
            f"{where}: the recipe's fp8 names {extra[0]}, but SGLang and TensorRT-LLM do not load it in FP8 for "
            f"{family.title}. Remove {extra[0]} from it."
        )


def check_recipe(family: Family, roles: tuple[str, ...], *, kv_cache: str | None, where: str) -> None:
    """Refuse what not every engine loads for the family: roles beyond its own, and a KV cache type (PlanError)."""
    if extra := [role for role in roles if role not in family.roles]:
        raise PlanError(
            f"{where}: the recipe converts {extra[0]}, but SGLang and TensorRT-LLM do not load it for "
            f"{family.title}. Remove {extra[0]} from the recipe's roles."
        )
    if kv_cache is not None and not family.has_kv_scheme:
        raise PlanError(
            f"{where}: kv_cache {kv_cache}: most layers of {family.title} have no such cache. Leave it out, and serve "
            f"with `--kv-cache-dtype {kv_cache}`."
        )


def find_experts(names: Iterable[TensorName]) -> Experts:
    experts: dict[int, set[int]] = defaultdict(set)
    for tensor_name in names:
        if tensor_name.expert is not None and tensor_name.layer is not None:
            experts[tensor_name.layer].add(tensor_name.expert)
    return experts


def experts_remedy(tensors: Mapping[str, TensorInfo], experts: Experts, *, family: Family, key: str) -> str:
    """Return how to mend wrong numbers of experts, by the routers' rows; empty if tensors are missing.

    `key` is the field of config.json that states their number.
    """
    counts = {len(numbers) for numbers in experts.values()}
    for layer, numbers in experts.items():
        router = tensors.get(f"{family.router.format(layer=layer)}.{WEIGHT}")
        if router is None or router.shape[:1] != (len(numbers),):
            return ""
    if len(counts) > 1:
        return f"Keep equally many experts in every layer: these have {min(counts)} to {max(counts)}."
    count = max(counts, default=0)
    setting = f"set {key} to {count} in config.json."
    if all(sorted(numbers) == list(range(count)) for numbers in experts.values()):
        return setting.capitalize()
    return f"Renumber the experts of each layer 0..{count - 1} in the order of the router's rows, and {setting}"


MAX_FAULTS: Final = 4  # faults that one message names
_UNKNOWN_REMEDY: Final = "Use the model's own config.json, or remove what engines do not load."


def check_model(
    source: Checkpoint, names: Mapping[str, TensorName], architecture: Architecture, family: Family
) -> None:
    """Compare every tensor with what config.json describes: first the experts' numbers, then the rest (PlanError)."""
    experts = find_experts(names.values())
    num_experts = architecture.num_experts
    key = key_of(source.config, EXPERTS_KEY)
    if experts and max(experts) >= architecture.num_layers:
        raise PlanError(
            f"{source.folder}: layer {max(experts)} {why_foreign('.eh_proj.')} config.json has the layers "
            f"0..{architecture.num_layers - 1}."
        )
    if sorted(experts) != list(architecture.moe_layers):
        raise PlanError(
            f"{source.folder}: config.json has the MoE layers {span(architecture.moe_layers)}, but experts are in "
            f"{span(tuple(sorted(experts)))}. A shard is missing, or config.json belongs to a different model. "
            f"{SOURCE_REMEDY}"
        )
    for layer, numbers in experts.items():
        if sorted(numbers) != list(range(num_experts)):
            raise PlanError(
                f"{source.folder}: layer {layer} has {len(numbers)} experts numbered {min(numbers)}..{max(numbers)}, "
                f"but config.json says {key} = {num_experts} (expected 0..{num_experts - 1}). "
                f"{experts_remedy(source.tensors, experts, family=family, key=key) or SOURCE_REMEDY}"
            )
    model = DescribedModel(family, architecture, source.config, str(source.folder))
    faults = list(model.find_faults(source.tensors, experts))
    if not faults:
        return
    faults.sort(key=lambda fault: not why_foreign(fault.name))
    advice = _UNKNOWN_REMEDY
    if faults[0].expected is not None:
        advice = SOURCE_REMEDY
    advice = why_foreign(faults[0].name).partition(". ")[2] or advice
    first = [f"{fault.name} {model.problem(fault)}" for fault in faults[:MAX_FAULTS]]
    more = ""
    if len(faults) > MAX_FAULTS:
        more = f"; and {len(faults) - MAX_FAULTS:,} more"
    count = ""
    if len(faults) > 1:
        count = f"{len(faults):,} tensors are not as config.json describes the model: "
    raise PlanError(f"{source.folder}: {count}{'; '.join(first)}{more}. {advice}")


def span(numbers: Sequence[int]) -> str:
    """Return the first and last of numbers, and their count."""
    if numbers:
        return f"{numbers[0]}..{numbers[-1]} ({len(numbers)})"
    return "none"


def format_of(packed: TensorInfo) -> SourceFormat:
    """Return the format of a projection by its codes; INT4 for a dtype that none has."""
    return next((row for row in SOURCE_FORMATS if row.packed_dtype == packed.dtype), INT4)


def packed_form(packed: TensorInfo, scale: TensorInfo | None) -> str:
    """Return how `weight_packed` is stored: the title of a format, or NVFP4; empty if its scales tell of neither."""
    if packed.dtype != MXFP4.packed_dtype:
        return format_of(packed).title
    if scale is None or len(packed.shape) != 2:
        return ""
    if scale.dtype == "F8_E4M3" and scale.shape == (packed.shape[0], 2 * packed.shape[1] // BLOCK_SIZE):
        return NVFP4
    if scale.dtype in MXFP4.scale_dtypes:
        return MXFP4.title
    return ""


def load_projection(read: Callable[[TensorInfo], Bytes], projection: Projection) -> SourceWeight:
    """Read one projection by its tensors; raises MalformedFileError for a wrong weight_shape and invalid scales."""
    rows = projection.num_rows
    columns = projection.num_columns
    if projection.weight is not None:
        return Bf16Weight(read(projection.weight).view(np.uint16).reshape(rows, columns))
    packed = projection.packed
    scale = projection.scale
    shape = projection.shape
    assert packed is not None
    assert scale is not None
    if shape is not None:
        stored = np.frombuffer(read(shape), dtype="<i4" if shape.dtype == "I32" else "<i8").tolist()
        if stored != [rows, columns]:
            raise MalformedFileError(
                f"{shape.shard}: {shape.name} is {stored}, but {packed.name} has the shape {[rows, columns]}."
            )
    try:
        return format_of(packed).load(read(packed), read(scale), rows, f"{scale.shard}: {scale.name}")
    except FormatError as error:
        raise MalformedFileError(str(error)) from None
