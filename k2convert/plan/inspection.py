"""What a checkpoint is, from its headers: family, counts, dtypes by role, quantization_config, oddities."""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any, cast

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import PlanError
from k2convert.models import detect_family, parse_tensor_names
from k2convert.models.config import find_quantization_config, text_config
from k2convert.models.names import INT4_PARAMETERS, WEIGHT_PACKED, WEIGHT_SHAPE, Architecture, Family, TensorName
from k2convert.plan.plan import claim_projections
from k2convert.plan.recipe import load_recipe


@dataclass(frozen=True, slots=True)
class Holding:
    """Tensors of one role and one storage form: their count, bytes, and weights (INT4 weights counted unpacked)."""

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
    hidden_size: int
    moe_intermediate_size: int
    num_shards: int
    num_tensors: int
    tensor_bytes: int
    int4_projections: int
    holdings: list[Holding]
    quantization: dict[str, Any] | None
    oddities: list[str]
    recipe: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for --json."""
        return asdict(self)


def inspect_checkpoint(source: Checkpoint) -> Inspection:
    """Describe a checkpoint; raises PlanError if it belongs to no known family."""
    family = detect_family(source)
    names = parse_tensor_names(source, family=family)
    architecture = family.read_architecture(source.config, str(source.folder))
    found = find_quantization_config(source.config)
    recipe: str | None = family.recipe
    oddities = _oddities(source, names, architecture, family)
    try:
        claim_projections(source=source, recipe=load_recipe(family.recipe), names=names)
    except PlanError as error:
        oddities.append(f"cannot be converted: {error}")
        recipe = None
    return Inspection(
        folder=str(source.folder),
        family=family.name,
        model_type=source.config.get("model_type"),
        architectures=_strings(source.config.get("architectures")),
        layers={
            "total": architecture.num_layers,
            "dense": architecture.num_dense_layers,
            "moe": len(architecture.moe_layers),
        },
        experts_per_layer=architecture.num_experts,
        hidden_size=architecture.hidden_size,
        moe_intermediate_size=architecture.moe_intermediate_size,
        num_shards=len(source.headers),
        num_tensors=len(source.tensors),
        tensor_bytes=source.tensor_bytes,
        int4_projections=sum(parts.parameter == WEIGHT_PACKED for parts in names.values()),
        holdings=_holdings(source, names),
        quantization=None if found is None else {"where": found[0], **_headline(found[1])},
        oddities=oddities,
        recipe=recipe,
    )


def _headline(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("quant_method", "format", "quant_algo", "kv_cache_scheme")
    result = {key: config[key] for key in keys if config.get(key) is not None}
    # Shown as found, but not relied on: the tensors decide what is INT4.
    first = next(iter(mapping_or_empty(config.get("config_groups")).values()), None)
    weights = mapping_or_empty(mapping_or_empty(first).get("weights"))
    return result | {key: weights[key] for key in ("num_bits", "type", "group_size", "symmetric") if key in weights}


def _holdings(source: Checkpoint, names: dict[str, TensorName]) -> list[Holding]:
    int4 = {parts.module for parts in names.values() if parts.parameter == WEIGHT_PACKED}
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, parts in names.items():
        tensor = source.tensors[name]
        is_int4 = parts.module in int4 and parts.parameter in INT4_PARAMETERS
        form = "INT4" if is_int4 else tensor.dtype
        weights = 1
        for size in tensor.shape:
            weights *= size
        if is_int4:
            weights = weights * 8 if parts.parameter == WEIGHT_PACKED else 0
        entry = sums[parts.role, form]
        entry[0] += 1
        entry[1] += tensor.num_bytes
        entry[2] += weights
    return [Holding(role, form, *entry) for (role, form), entry in sorted(sums.items(), key=lambda i: -i[1][1])]


def _strings(value: object) -> list[str]:
    return [str(entry) for entry in cast(list[object], value)] if isinstance(value, list) else []


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
    for name, parts in names.items():
        if parts.projection is not None:
            apart[parts.sharing_key].add(source.tensors[name].shard)
    if split := sum(len(shards) > 1 for shards in apart.values()):
        notes.append(f"{split} gate/up pair(s) or projection(s) are split over several shards")
    inner, top = text_config(source.config), source.config
    if inner is not top and "quantization_config" in inner and "quantization_config" in top:
        notes.append("two quantization_config: at the top level and in text_config")
    if architecture.num_experts not in (0, family.usual_num_experts):
        notes.append(
            f"{architecture.num_experts} experts a layer (the family's usual count is {family.usual_num_experts}): "
            "a pruned or a small model"
        )
    return notes
