"""A model as `fit` sees it: the counts of config.json, and its bytes by role and layer, from the headers.

A checkpoint is weighed as it is, or, if it is a source, as it would be converted.

A layer of linear attention (Kimi K3's KDA) has no KV cache. For each request it keeps a state of a fixed size: per head
a matrix [head_dim, head_dim] in FP32, and the last inputs of the convolutions of q, k and v in BF16. Those are the
defaults of vLLM (kda_state_shape and kda_state_dtype in model_executor/layers/mamba/mamba_utils.py) and of SGLang
(srt/configs/mamba_utils.py). llama.cpp keeps all of it in FP32.

Nothing is planned in detail: the bytes of a converted projection follow from its shape. On the 208,550 tensors of
Kimi-K2.5 (`scripts/fixtures k2.5-headers`) that takes a third of the time of finding its projections.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.layouts.layout import fp8_tensors
from k2convert.choices import ServedKvCache
from k2convert.errors import FitError, PlanError, quoted
from k2convert.models import detect_family, fp8_sizes, parse_tensor_name
from k2convert.models.config import (
    FP8,
    find_quantization_config,
    key_of,
    kv_cache_form,
    max_positions,
    text_config,
)
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE, Family, Role
from k2convert.plan.plan import OutputTensor, check_family, converted_roles, projection_tensors
from k2convert.plan.recipe import Recipe, load_recipe, resolve_recipe
from k2convert.quantize.rules import RULES


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a mixture-of-experts model with multi-head latent attention (MLA).

    `kv_values` is what the KV cache keeps for a token and a layer: the latent (kv_lora_rank) and the rotary part.
    `max_context` is None if config.json does not say.
    `linear_layers` are layers of linear attention, which have no KV cache. A request keeps `state_bytes` in each.
    `tensor_sizes` are the sizes of tensor parallelism that engines accept; empty: all that divide the heads.
    `fp8_sizes` are sizes of weights in FP8 blocks that tensor parallelism cuts, and may cut only between blocks.
    """

    num_layers: int
    num_heads: int
    num_experts: int
    experts_per_token: int
    num_groups: int
    expert_width: int
    kv_values: int
    max_context: int | None
    linear_layers: frozenset[int] = frozenset()
    state_bytes: int = 0
    tensor_sizes: tuple[int, ...] = ()
    fp8_sizes: tuple[int, ...] = ()

    def kv_layers(self, layers: Container[int] | None = None) -> int:
        """Return how many of some layers (None: of all) have a KV cache."""
        cached = (i for i in range(self.num_layers) if i not in self.linear_layers)
        return sum(layers is None or i in layers for i in cached)


def read_shape(config: Mapping[str, Any], *, family: Family, where: str, becomes_fp8: bool = False) -> ModelShape:
    """Read config.json. Attention whose weights a recipe stores in FP8 blocks `becomes_fp8`.

    Raises PlanError for damaged counts, FitError if the attention is neither MLA nor KDA.
    """
    counts = family.read_architecture(config, where)
    text = text_config(config)
    size = partial(_size, text, where=where)
    layers = family.linear_layers(config, counts.num_layers, where)
    experts_per_token = size(key_of(config, "num_experts_per_tok"))
    num_groups = size(key_of(config, "n_group"), default=1)
    if counts.num_experts < experts_per_token or counts.num_experts % num_groups:
        raise FitError(
            f"{where}: config.json: a token uses {experts_per_token:,} of {counts.num_experts:,} experts in "
            f"{num_groups:,} groups, which no router can choose. Use the model's own config.json."
        )
    state_bytes = 0
    if layers:
        linear = mapping_or_empty(text.get("linear_attn_config"))
        linear_size = partial(_size, linear, where=f"{where}: linear_attn_config")
        width = linear_size("head_dim")
        inputs = _CONVOLUTIONS * (linear_size("short_conv_kernel_size") - 1)
        state_bytes = linear_size("num_heads") * width * (width * _FP32_BYTES + inputs * _BF16_BYTES)
    return ModelShape(
        num_layers=counts.num_layers,
        num_heads=size("num_attention_heads"),
        num_experts=counts.num_experts,
        experts_per_token=experts_per_token,
        num_groups=num_groups,
        expert_width=size("moe_intermediate_size"),
        kv_values=size("kv_lora_rank") + size("qk_rope_head_dim"),
        max_context=max_positions(config),
        linear_layers=layers,
        state_bytes=state_bytes,
        tensor_sizes=family.tensor_parallel_sizes,
        fp8_sizes=fp8_sizes(config, becomes_fp8=becomes_fp8),
    )


def _size(fields: Mapping[str, Any], key: str, *, where: str, default: int | None = None) -> int:
    value = fields.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FitError(
            f"{where}: config.json: {key} is {quoted(value)}, expected a count. `fit` needs it; it knows models "
            "with multi-head latent attention (MLA) only, or with it and Kimi Delta Attention (KDA)."
        )
    return value


_FP32_BYTES = 4
_BF16_BYTES = 2
_CONVOLUTIONS = 3
_DROPPED: Final = (f".{WEIGHT_SCALE}", f".{WEIGHT_SHAPE}")  # the bytes of a source's projection count for its codes


Tensor = TensorInfo | OutputTensor
"""A tensor that takes memory: an entry of a header, or a tensor that a plan will write."""


class WeightGroup(NamedTuple):
    """Weights that a layout treats alike: `is_split` says whether tensor parallelism divides them."""

    role: Role
    layer: int | None  # None: outside the layers
    is_split: bool


_SPLIT_ROLES: Final = frozenset(
    (Role.EXPERTS, Role.SHARED_EXPERTS, Role.DENSE_MLP, Role.ATTENTION, Role.EMBEDDINGS, Role.LM_HEAD)
)


def weigh(tensors: Iterable[Tensor], *, family: Family, recipe: Recipe | None) -> dict[WeightGroup, int]:
    """Add up the bytes of tensors by group; raises PlanError naming a tensor that no model of the family has.

    With a `recipe`, packed projections, and BF16 weights that it converts, count with the bytes that they will have.
    """
    groups: dict[str, WeightGroup] = {}
    sums: dict[WeightGroup, int] = defaultdict(int)
    for tensor in tensors:
        name = tensor.name
        if recipe is not None and name.endswith(_DROPPED):
            continue
        module, _, parameter = name.rpartition(".")
        if module not in groups:
            known = family.classify(module) or parse_tensor_name(name, family=family)  # which raises PlanError
            is_whole = module.rpartition(".")[2] in family.unsplit_attention
            is_split = known.role in _SPLIT_ROLES and not is_whole
            groups[module] = WeightGroup(known.role, known.layer, is_split)
        group = groups[module]
        is_packed = parameter == WEIGHT_PACKED
        in_fp8 = recipe is not None and _becomes_fp8(tensor, group.role, recipe, family)
        is_converted = recipe is not None and parameter == WEIGHT and group.role in converted_roles(recipe)
        if recipe is None or not (is_packed or in_fp8 or is_converted):
            sums[group] += tensor.num_bytes
            continue
        if len(tensor.shape) != 2:
            raise PlanError(f"tensor {name}: shape {quoted(list(tensor.shape))}, expected rows and columns.")
        rows, columns = tensor.shape
        columns *= family.source_format.columns_per_element if is_packed else 1
        if in_fp8:
            stored = fp8_tensors(rows, columns, has_blocks=family.has_fp8_blocks)
        else:
            stored = projection_tensors(recipe.target, recipe.layout, recipe.activations, rows, columns)
        sums[group] += sum(tensor[3] for tensor in stored)
    return dict(sums)


def _becomes_fp8(tensor: Tensor, role: Role, recipe: Recipe, family: Family) -> bool:
    """Return whether it is a weight that a recipe makes FP8. Norms have the role of their block, and one dimension."""
    module, _, parameter = tensor.name.rpartition(".")
    is_matrix = parameter == WEIGHT and len(tensor.shape) == 2
    return is_matrix and role in recipe.fp8 and family.becomes_fp8(module, recipe.fp8)


@dataclass(frozen=True, slots=True)
class Model:
    """A model and the bytes of its weights.

    `recipe` is the one a source is weighed by; None for weights as they are.
    """

    family: Family
    shape: ModelShape
    groups: Mapping[WeightGroup, int]
    recipe: Recipe | None
    is_nvfp4: bool
    kv: ServedKvCache
    """The KV cache of engines without an option: FP8 if config.json declares it, else BF16."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights."""
        return sum(self.groups.values())

    @property
    def bytes_by_role(self) -> dict[Role, int]:
        """The bytes of each role, the largest first."""
        sums: dict[Role, int] = defaultdict(int)
        for group, num_bytes in self.groups.items():
            sums[group.role] += num_bytes
        return dict(sorted(sums.items(), key=lambda entry: -entry[1]))

    @property
    def kv_values(self) -> int:
        """Values that the KV cache keeps for one token."""
        return self.shape.kv_values * self.shape.kv_layers()

    @property
    def state_bytes(self) -> int:
        """Bytes that one request keeps in all layers of linear attention, whatever its length."""
        return self.shape.state_bytes * len(self.shape.linear_layers)

    def with_experts(self, count: int) -> "Model":
        """Return the pruned model; raises FitError if its router cannot choose from that many experts."""
        shape = self.shape
        if not shape.experts_per_token <= count <= shape.num_experts:
            raise FitError(
                f"--experts {count}: a layer has {shape.num_experts} experts and each token uses "
                f"{shape.experts_per_token}. Pass {shape.experts_per_token} to {shape.num_experts}."
            )
        if count % shape.num_groups:
            raise FitError(
                f"--experts {count}: the router splits experts into {shape.num_groups} groups. Pass a multiple."
            )
        pruned = (Role.EXPERTS, Role.ROUTER)  # experts of a layer, and their rows of the router, have the same bytes
        groups = {
            group: num_bytes * count // shape.num_experts if group.role in pruned else num_bytes
            for group, num_bytes in self.groups.items()
        }
        return replace(self, shape=replace(shape, num_experts=count), groups=groups)


def read_model(checkpoint: Checkpoint, *, recipe: str | None = None) -> Model:
    """Weigh an opened checkpoint, a source by this recipe or by that of its family.

    Raises PlanError for one of no known family or not of the recipe's, FitError for one that is not MLA, RecipeError.
    """
    family = detect_family(checkpoint)
    tensors = checkpoint.tensors
    stems = (name.removesuffix(WEIGHT_PACKED) for name in tensors if name.endswith(f".{WEIGHT_PACKED}"))
    scales = (tensors.get(f"{stem}{WEIGHT_SCALE}") for stem in stems)  # an NVFP4 result may have U8 codes too
    is_source = any(s is not None and s.dtype in family.source_format.scale_dtypes for s in scales)
    where = str(checkpoint.folder)
    if recipe is not None and not is_source:
        raise FitError(f"{where}: no INT4 or MXFP4 source, so a recipe has nothing to convert. Leave out --recipe.")
    chosen = load_recipe(recipe or family.recipe) if is_source else None
    if chosen is not None:
        text_comes_later = (
            RULES[chosen.rule].needs_text or bool(chosen.smoothing) or "calibration" in chosen.model_fields_set
        )
        chosen = resolve_recipe(chosen, has_text=text_comes_later)
        check_family(chosen, family, where=where)
    return read_result(tensors.values(), family=family, config=checkpoint.config, where=where, recipe=chosen)


def read_result(
    tensors: Iterable[Tensor], *, family: Family, config: Mapping[str, Any], where: str, recipe: Recipe | None = None
) -> Model:
    """Weigh a result by the tensors of its shards, which need not be here; raises as `read_model` does."""
    becomes_fp8 = recipe is not None and Role.ATTENTION in recipe.fp8 and family.has_fp8_blocks
    shape = read_shape(config, family=family, where=where, becomes_fp8=becomes_fp8)
    groups = weigh(tensors, family=family, recipe=recipe)
    _, quantization = find_quantization_config(config) or ("", {})
    if recipe is not None:
        is_nvfp4 = recipe.target == "nvfp4"
    else:
        is_nvfp4 = any(layout.read_activations(quantization) is not None for layout in LAYOUTS.values())
    will_declare = recipe is not None and recipe.kv_cache is not None
    kv: ServedKvCache = "fp8" if will_declare or kv_cache_form(quantization).endswith(FP8) else "bf16"
    return Model(family, shape, groups, recipe, is_nvfp4, kv)
