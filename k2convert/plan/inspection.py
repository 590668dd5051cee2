"""Inspection of a checkpoint's headers: family, counts, dtypes by role, quantization_config, oddities."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.errors import PlanError
from k2convert.models import detect_family, family_of, parse_tensor_names
from k2convert.models.config import FP8, find_quantization_config, text_config
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, Architecture, Family, TensorName
from k2convert.models.projections import packed_form
from k2convert.models.source_formats import INT4, MXFP4, NVFP4, SOURCE_FORMATS
from k2convert.plan.plan import claim_projections
from k2convert.plan.recipe import load_recipe

# weights in one element of the packed tensor
_WEIGHTS_PER_CODE: Final = {NVFP4: 2, FP8: 1, **{row.title: row.columns_per_element for row in SOURCE_FORMATS}}
_PACKED_PARAMETERS: Final = {
    **{row.title: frozenset(row.parameters) for row in SOURCE_FORMATS},
    NVFP4: frozenset(name for layout in LAYOUTS.values() for name in layout.parameters),
    FP8: frozenset((WEIGHT, WEIGHT_SCALE)),
}
_FORMS: Final = {"U8": NVFP4, "F8_E4M3": FP8}  # by the dtype of `weight`


@dataclass(frozen=True, slots=True)
class Holding:
    """Tensors of one role and one storage form: their count, bytes, and weights (4-bit weights counted unpacked)."""

    role: str
    form: str
    num_tensors: int
    num_bytes: int
    num_weights: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything `inspect` shows."""

    folder: str
    family: str
    model_type: str | None
    architectures: list[str]
    layers: dict[str, int]
    experts_per_layer: int
    conversion: Mapping[str, Any] | None
    hidden_size: int
    moe_intermediate_size: int
    num_shards: int
    num_tensors: int
    tensor_bytes: int
    int4_projections: int
    mxfp4_projections: int
    nvfp4_projections: int
    holdings: list[Holding]
    quantization: dict[str, Any] | None
    oddities: list[str]
    recipe: str | None


def inspect_checkpoint(
    source: Checkpoint,
    *,
    shown_as: str,
    conversion: Mapping[str, Any] | None = None,
) -> Inspection:
    """Describe a checkpoint, with `conversion` from its ledger. Raises PlanError if it is unknown."""
    given = source
    family = family_of(source.config, source.tensors)
    for old, new in family.naming.renamed_prefixes:  # as engines do while loading
        tensors = {f"{new}{n.removeprefix(old)}" if n.startswith(old) else n: t for n, t in source.tensors.items()}
        source = replace(source, tensors=tensors)
    family = detect_family(source)
    names = parse_tensor_names(source, family=family)
    packed: dict[str, str] = {}
    for name, tensor_name in names.items():
        if tensor_name.parameter == WEIGHT_PACKED:
            scale = source.tensors.get(f"{tensor_name.module}.{WEIGHT_SCALE}")
            packed[tensor_name.module] = packed_form(source.tensors[name], scale) or NVFP4
        elif tensor_name.parameter == WEIGHT and source.tensors[name].dtype in _FORMS:
            packed[tensor_name.module] = _FORMS[source.tensors[name].dtype]
    counts = family.read_architecture(source.config, str(source.folder))
    quantization = find_quantization_config(source.config)
    recipe = cast(str | None, family.recipe)
    named = source.config.get("architectures")
    oddities = _oddities(source, names, counts, family)
    try:
        detect_family(given)  # the names that engines rename are not those of a source
        claim_projections(source=source, recipe=load_recipe(family.recipe), names=names)
    except PlanError as error:
        recipe = None
        if conversion is None:
            oddities.append(f"cannot be converted: {str(error).replace(str(source.folder), shown_as)}")
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, tensor_name in names.items():
        tensor = source.tensors[name]
        form = packed.get(tensor_name.module)
        weights = math.prod(tensor.shape)
        if form is not None and tensor_name.parameter in _PACKED_PARAMETERS[form]:
            weights *= _WEIGHTS_PER_CODE[form] if tensor_name.parameter in (WEIGHT, WEIGHT_PACKED) else 0
        else:
            form = None
        entry = sums[tensor_name.role, form or tensor.dtype]
        entry[0] += 1
        entry[1] += tensor.num_bytes
        entry[2] += weights
    return Inspection(
        folder=shown_as,
        family=family.name,
        model_type=source.config.get("model_type"),
        architectures=list(map(str, cast(list[object], named))) if isinstance(named, list) else [],
        layers={"total": counts.num_layers, "dense": counts.num_dense_layers, "moe": len(counts.moe_layers)},
        experts_per_layer=counts.num_experts,
        conversion=conversion,
        hidden_size=counts.hidden_size,
        moe_intermediate_size=counts.moe_intermediate_size,
        num_shards=len(source.headers),
        num_tensors=len(source.tensors),
        tensor_bytes=source.tensor_bytes,
        int4_projections=sum(form == INT4.title for form in packed.values()),
        mxfp4_projections=sum(form == MXFP4.title for form in packed.values()),
        nvfp4_projections=sum(form == NVFP4 for form in packed.values()),
        holdings=[Holding(role, form, *entry) for (role, form), entry in sorted(sums.items(), key=lambda i: -i[1][1])],
        quantization=None if quantization is None else {"where": quantization[0], **_headline(quantization[1])},
        oddities=oddities,
        recipe=recipe,
    )


def _headline(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("quant_method", "format", "quant_algo", "kv_cache_scheme")
    result = {key: config[key] for key in keys if config.get(key) is not None}
    # Shown as found, but not relied on: the tensors decide.
    groups = mapping_or_empty(config.get("config_groups")).values()
    weights = mapping_or_empty(mapping_or_empty(next(iter(groups), None)).get("weights"))
    return result | {key: weights[key] for key in ("num_bits", "type", "group_size", "symmetric") if key in weights}


def _oddities(
    source: Checkpoint, names: dict[str, TensorName], architecture: Architecture, family: Family
) -> list[str]:
    notes: list[str] = []
    if source.stray_shards:
        notes.append(f"{len(source.stray_shards)} .safetensors file(s) not in the index: {source.stray_shards[0]} ...")
    stated = source.index_metadata.get("total_size")
    if stated is not None and stated != source.tensor_bytes:
        notes.append(f"the index states total_size {stated}, the headers add up to {source.tensor_bytes}")
    shapes = Counter(source.tensors[n].dtype for n, p in names.items() if p.parameter == WEIGHT_SHAPE)
    if len(shapes) > 1:
        notes.append("weight_shape is " + " and ".join(f"{dtype} ({n})" for dtype, n in shapes.items()))
    apart: dict[str, set[str]] = defaultdict(set)
    for name, tensor_name in names.items():
        if tensor_name.projection is not None:
            apart[tensor_name.sharing_key].add(source.tensors[name].shard)
    if split := sum(len(shards) > 1 for shards in apart.values()):
        notes.append(f"{split} gate/up pair(s) or projection(s) are split over several shards")
    inner = text_config(source.config)
    top = source.config
    if inner is not top and "quantization_config" in inner and "quantization_config" in top:
        notes.append("two quantization_config: at the top level and in text_config")
    if architecture.num_experts not in (0, family.usual_num_experts):
        notes.append(
            f"{architecture.num_experts} experts per layer (the family's usual count is {family.usual_num_experts}): "
            "a pruned or a small model"
        )
    return notes
