"""Families of checkpoints: roles, tensor names taken apart, and the row that describes a family.

The names also decide which tensors smoothing changes. The weight of the norm before the MLP is multiplied, channel by
channel, by 2^a. Everything that reads the norm's output is divided by 2^a, column by column: the router, and gate and
up of routed and shared experts. The model is the same function. Rule gptq chooses the exponents.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from k2convert.checkpoint.reader import Bytes
from k2convert.choices import Activations, Engine, Layout
from k2convert.quantize.formats.bf16 import SourceWeight

WEIGHT: Final = "weight"
WEIGHT_PACKED: Final = "weight_packed"
WEIGHT_SCALE: Final = "weight_scale"
WEIGHT_SHAPE: Final = "weight_shape"


class Role(StrEnum):
    """Role of a module in the model. A recipe may name the first three."""

    EXPERTS = "experts"
    SHARED_EXPERTS = "shared_experts"
    DENSE_MLP = "dense_mlp"
    ATTENTION = "attention"
    ROUTER = "router"
    NORM = "norm"
    EMBEDDINGS = "embeddings"
    LM_HEAD = "lm_head"
    VISION_TOWER = "vision_tower"
    MM_PROJECTOR = "mm_projector"
    LATENT = "latent"
    RESIDUAL = "residual"


CONVERTIBLE_ROLES: Final = (Role.EXPERTS, Role.SHARED_EXPERTS, Role.DENSE_MLP)


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """Where a module is in the model. `projection` is gate, up or down, and None outside MLPs."""

    role: Role
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorName(ModulePlace):
    """A tensor name taken apart: its module, where that is in the model, and what is behind the module's name."""

    module: str
    parameter: str

    @property
    def sharing_key(self) -> str:
        """Modules with the same key must share one global scale: gate and up of one MLP; each down has its own."""
        if self.projection is None:
            return self.module
        stem = self.module.rsplit(".", 1)[0]
        return f"{stem}.{'gate_up' if self.projection in ('gate', 'up') else 'down'}"


@dataclass(frozen=True, slots=True)
class Architecture:
    """The counts of config.json that names and shapes are checked against."""

    num_layers: int
    num_dense_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    hidden_size: int
    moe_intermediate_size: int
    residual_block: int = 0  # layers of a block of attention residuals; 0: the hidden states are the only state


def block_starts(layer: int, residual_block: int) -> range:
    """Return the layers that begin a block of attention residuals before layer number `layer`."""
    return range(0, layer, residual_block) if residual_block else range(0)


OUTPUT_MIXTURE: Final = "output_attn_res"
"""Norm and projection of the mixture that the final norm reads, if a model has attention residuals: X_norm, X_proj."""

AttentionKind = Literal["rotary", "gated", "delta"]
"""Attention with rotary positions; MLA without them, whose output is gated; Kimi Delta Attention (KDA)."""

_FOREIGN: Final = (
    (
        re.compile(r"(^base_model|\.(lora_\w+|base_layer|modules_to_save|original_module))\."),
        "belongs to an adapter that was not merged. Merge it with PEFT's `merge_and_unload()`, and save the model.",
    ),
    (
        re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\."),
        "belongs to a layer for multi-token prediction (MTP), which is not converted. Remove the layer's tensors from "
        "the shards and the index, and set num_nextn_predict_layers to 0. If it belongs to a layer of the model, "
        "num_hidden_layers in config.json is wrong.",
    ),
)


def why_foreign(name: str) -> str:
    """Return why no model has a tensor of this name, and the remedy; empty for a name that tells nothing."""
    return next((words for pattern, words in _FOREIGN if pattern.search(name)), "")


@dataclass(frozen=True, slots=True)
class EngineNaming:
    """Names by which engines know a family's modules and exclude entries. Empty: those of the checkpoint."""

    wrapper: str = ""  # a prefix that some engines cut off
    renamed_prefixes: tuple[tuple[str, str], ...] = ()  # (old, new)
    vllm_renamed_prefixes: tuple[tuple[str, str], ...] = ()
    renamed_modules: Mapping[str, str] = field(default_factory=dict[str, str])  # whole names
    vllm_fused: Mapping[str, str] = field(default_factory=dict[str, str])  # projections -> fused layers, as the next
    sglang_fused: Mapping[str, str] = field(default_factory=dict[str, str])
    banks: Mapping[str, str] = field(default_factory=dict[str, str])  # by which a layer's experts are looked up


@dataclass(frozen=True, slots=True)
class ModelCardFacts:
    """Facts that a model card states of a family. `refusals` are (engine, what it cannot serve, why)."""

    model_kind: str
    unquantized: tuple[str, ...]  # what stays BF16
    unquantized_attention: str = ""  # the same of attention that becomes FP8; empty if it never does
    tags: tuple[str, ...] = ()  # of the Hub
    vllm_options: str = ""  # its own options, as the next two
    sglang_options: str = ""
    sglang_blackwell: str = ""  # MoE kernels that W4A4 needs on data-center Blackwell; empty: its own choice
    tensorrt_llm_options: str = ""
    has_vision: bool = False
    draft_heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # by model
    notes: tuple[str, ...] = ()  # on serving it
    refusals: tuple[tuple[Engine, Layout | Activations | Literal["pipeline"], str], ...] = ()


@dataclass(frozen=True, slots=True)
class SourceFormat:
    """Form in which a source stores a weight [N, K] that is converted: a row of `source_formats.SOURCE_FORMATS`."""

    title: str  # in messages
    parameters: tuple[str, ...]  # the tensors of a projection
    packed_dtype: str  # of `weight_packed` [N, K / columns_per_element]
    scale_dtypes: tuple[str, ...]  # of `weight_scale` [N, K / 32]
    columns_per_element: int
    bits: float  # of a weight, with its share of a scale
    known_config: Mapping[str, object]  # what config.json may say of the quantization, its groups, their weights
    known_group: Mapping[str, object]
    known_weights: Mapping[str, object]
    export: str  # how to quantize a model so that it can be converted, the end of a sentence
    load: Callable[[Bytes, Bytes, int, str], SourceWeight]  # (codes, scales, N, name) -> weight; raises FormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of checkpoints: everything that depends on it. `models.FAMILIES` lists them.

    The last three fields are names and shapes, from config.json, of all tensors except for routed experts. A shape is
    text, as `num_attention_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank`: dimensions, each a product of sums
    of fields and numbers. `F32: ` begins the shape of a tensor that is published in FP32, not BF16.
    """

    name: str  # as in recipes and ledgers
    title: str  # in messages
    source_hint: str  # which checkpoint to start from, one sentence
    recipe: str  # the shipped recipe to use if none is named
    prefix: str  # of the language model's tensors
    layer: str  # its name, as those of router, experts and mlp_norm below; `{layer}` is the number
    router: str
    experts: str
    mlp_norm: str  # the norm before a layer's MLP
    classify: Callable[[str], ModulePlace | None]  # the place of a module, None if the family has no such module
    expected_name: Callable[[str], str]  # the name a tensor should have if its prefix is wrong
    read_architecture: Callable[[Mapping[str, Any], str], Architecture]  # (config.json, where) -> counts; PlanError
    # (converted roles, counts) -> (name part, whether more may follow) of the modules left in BF16
    unconverted: Callable[[Sequence[str], Architecture], list[tuple[str, bool]]]
    card: ModelCardFacts
    # (model_type, key) of the config.json of a part of a model -> what it is
    refused_configs: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    linear_layers: Callable[[Mapping[str, Any], int, str], frozenset[int]] = lambda _, __, ___: frozenset()
    model_types: tuple[str, ...] = ()  # what model_type in config.json may be; empty: anything
    model_class: str = ""  # by which engines choose their code, from `architectures`; empty: any
    activation: str = "silu"  # of the MLPs, which is the only one that engines compute
    attention: Callable[[Mapping[str, Any], int], AttentionKind] = lambda _, __: "rotary"  # (config.json, layer)
    unsplit_attention: tuple[str, ...] = ()  # what every GPU of tensor parallelism keeps whole
    usual_num_experts: int = 0  # of the unpruned models
    source_format: SourceFormat  # of the weights to convert
    roles: tuple[Role, ...] = CONVERTIBLE_ROLES  # that a recipe may convert
    projections: Mapping[str, str] = field(default_factory=lambda: {k: f"{k}_proj" for k in ("gate", "up", "down")})
    banks: tuple[str, ...] = ()  # names of a layer's experts in `quantized_layers`; empty: it has no such map
    tensor_parallel_sizes: tuple[int, ...] = ()  # that the model can be split to; empty: any
    least_expert_piece: int = 0  # columns to which vLLM pads what a GPU has of an expert; 0: it pads nothing
    not_calibrated: str = ""  # why it is not calibrated on a text; empty: it is
    fp8_layout: Layout = "compressed-tensors"  # in which engines load FP8 beside NVFP4
    fp8_roles: tuple[Role, ...] = (Role.ATTENTION, Role.SHARED_EXPERTS, Role.DENSE_MLP)  # that may become FP8
    has_fp8_blocks: bool = False  # FP8 with a scale for each block of 128 x 128, not for each row
    fp8_partners: Mapping[str, str] = field(default_factory=dict[str, str])  # linear layers that share scales of blocks
    fp8_fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # -> engines' layers
    kept_attention: str = ""  # the linear layer of attention that stays BF16 beside FP8
    # (roles, counts) -> the linear layers by regular expressions of their names, also of those that engines fuse
    linear_patterns: Callable[[Sequence[str], Architecture], list[str]] = lambda _, __: []
    has_kv_scheme: bool = True  # whether engines accept a KV cache type in the config
    naming: EngineNaming = EngineNaming()
    outer_tensors: Callable[[Mapping[str, Any]], dict[str, str]] | None = None  # outside the layers; None: not known
    # of the layer with this number, and whether it has experts
    layer_tensors: Callable[[Mapping[str, Any], int, bool], dict[str, str]] = lambda _, __, ___: {}
    # tower and projector, whole or not there; empty if not known
    vision_tensors: Callable[[Mapping[str, Any]], dict[str, str]] = lambda _: {}

    def takes_fp8(self, tensor_name: TensorName, roles: Sequence[str]) -> bool:
        """Return whether a linear layer becomes FP8 with these roles in a recipe's fp8."""
        is_kept = self.kept_attention != "" and tensor_name.module.endswith(self.kept_attention)
        return tensor_name.role in roles and not is_kept

    def becomes_fp8(self, module: str, roles: Sequence[str]) -> bool:
        """The same by the name of a module, whose weight must have two dimensions."""
        module_place = self.classify(module)
        return module_place is not None and self.takes_fp8(
            TensorName(module_place.role, module=module, parameter=WEIGHT), roles
        )

    def fp8_partner(self, module: str) -> str | None:
        """Return the module that shares its scales of blocks with this one, if the model has it; None: no module."""
        stem, _, last = module.rpartition(".")
        return f"{stem}.{self.fp8_partners[last]}" if last in self.fp8_partners else None

    def fp8_names(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Return every name by which engines look up these FP8 layers, sorted; none if patterns name them."""
        names = set[str]()
        for module in modules if self.has_fp8_blocks else ():
            stem, _, last = module.removeprefix(self.prefix).rpartition(".")
            own = (last, *self.fp8_fused.get(last, ()))
            names |= {f"{prefix}{stem}.{name}" for name in own for prefix in (self.prefix, "model.", "")}
        return tuple(sorted(names))

    def bank_names(self, layers: Sequence[int]) -> tuple[str, ...]:
        """Return every name of every bank of experts, sorted."""
        return tuple(sorted(name.format(layer=layer) for layer in layers for name in self.banks))


def tensor_sizes(sizes: Iterable[int], num_heads: object, known: Sequence[int]) -> list[int]:
    """Return the sizes of tensor parallelism that the attention heads, and the engines, allow: `known`, or any."""
    heads = num_heads if isinstance(num_heads, int) else 0
    return [n for n in sizes if heads % n == 0 and (not known or n in known)]


_READERS = (Role.EXPERTS, Role.SHARED_EXPERTS)


@dataclass(frozen=True, slots=True)
class ColumnScaling:
    """Change of one tensor by smoothing: its columns times 2^a, or divided by it, with the exponents of `layer`."""

    layer: int
    is_divided: bool


def reads_norm(module: ModulePlace) -> bool:
    """Return whether a module of a MoE layer reads the output of the norm before the MLP."""
    return module.role is Role.ROUTER or (module.role in _READERS and module.projection in ("gate", "up"))


def column_scaling(tensor_name: TensorName, *, family: Family) -> ColumnScaling | None:
    """Return how smoothing changes an unconverted tensor of a MoE layer, None if it does not."""
    if tensor_name.layer is None or tensor_name.parameter != WEIGHT:
        return None
    if tensor_name.module == family.mlp_norm.format(layer=tensor_name.layer):
        return ColumnScaling(tensor_name.layer, is_divided=False)
    if reads_norm(tensor_name):
        return ColumnScaling(tensor_name.layer, is_divided=True)
    return None
