"""config.json of DeepSeek-V3-like models: the language model's part, its counts, its quantization_config, its tensors.

The tensors decide which weights are converted. Their bytes look the same in other schemes, so a source whose config
states a different scheme than its family has is refused. A config that states nothing is accepted.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.layouts.layout import QUANTIZATION_KEYS, fp8_tensors
from k2convert.choices import GROUP_SIZE
from k2convert.errors import PlanError, cut, quoted, shortened
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
    why_foreign,
)
from k2convert.models.source_formats import SOURCE_FORMATS

EXPERTS_KEY: Final = "n_routed_experts"
LATENT_KEY: Final = "routed_expert_hidden_size"
BOUNDS: Final = {
    field: most
    for most, fields in {
        1_000: "num_hidden_layers num_nextn_predict_layers first_k_dense_replace moe_layer_freq attn_res_block_size "
        "vt_num_hidden_layers",
        10_000: f"{EXPERTS_KEY} num_experts n_shared_experts num_shared_experts num_experts_per_tok "
        "num_experts_per_token n_group num_expert_group topk_group num_attention_heads num_key_value_heads num_heads",
        1_000_000: f"hidden_size {LATENT_KEY} intermediate_size moe_intermediate_size q_lora_rank "
        "kv_lora_rank head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim short_conv_kernel_size vt_hidden_size "
        "vt_intermediate_size qkv_hidden_size mm_hidden_size",
        100_000_000: "vocab_size",
        1_000_000_000: "max_position_embeddings original_max_position_embeddings sliding_window",
    }.items()
    for field in fields.split()
}
"""The most that a field of the language model may be: its numbers size loops and memory. No model comes near."""

_ALIASES: Final = {
    EXPERTS_KEY: "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "scoring_func": "moe_router_activation_func",
}
"""Other names of a field: those of configs that follow Kimi-Linear."""

_NESTED: Final = ("rope_scaling", "rope_parameters", "linear_attn_config")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of config.json: `text_config` of a multimodal model, else the whole."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return cast(dict[str, Any], inner)
    return config


_NOT_OF_THE_NETWORK: Final = (
    *QUANTIZATION_KEYS,
    *("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path"),
    *("torch_dtype", "dtype", "use_cache"),
)


def network_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model that its forward pass may depend on: all but those known not to matter.

    Special tokens are for whoever generates text.
    """
    text = text_config(config)
    return {key: text[key] for key in text if key not in _NOT_OF_THE_NETWORK and not key.endswith("_token_id")}


def key_of(config: Mapping[str, Any], field: str) -> str:
    """Return the name that a field of the language model has in this config."""
    text = text_config(config)
    if field not in text and any(alias in text for alias in _ALIASES.values()):
        return _ALIASES.get(field, field)
    return field


def expert_columns_key(config: Mapping[str, Any]) -> str:
    """Return the field that has the width of a routed expert's input."""
    if LATENT_KEY in text_config(config):
        return LATENT_KEY
    return "hidden_size"


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the output head is the embedding."""
    return any(part.get("tie_word_embeddings") is True for part in (config, text_config(config)))


_FIELD: Final = re.compile("[a-z_][a-z0-9_.]*")


def fields_of(shape: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a shape of a tensor is made of, with their values; None for one that is not there."""
    values: dict[str, Any] = {}
    for name in _FIELD.findall(shape):
        field = key_of(config, name)
        value: Any = config if field.startswith("vision_config.") else text_config(config)
        for part in field.split("."):
            value = mapping_or_empty(value).get(part)
        values[field] = value
    return values


def evaluate_shape(shape: str, config: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    """Return a shape of `Family` as numbers; None if config.json leaves a field out. PlanError for no number."""
    values = fields_of(shape, config)
    if None in values.values():
        return None
    for field, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _not_a_count(where, field, value)

    def total(terms: str) -> int:
        names = (term.strip() for term in terms.strip(" ()").split("+"))
        return sum(int(name) if name.isdigit() else values[key_of(config, name)] for name in names)

    return tuple(math.prod(map(total, product.split("*"))) for product in shape.split(","))


def _not_a_count(where: str, field: str, value: object) -> PlanError:
    return PlanError(f"{where}: config.json: {field} is {quoted(value)}, expected a count. Use the model's own config.")


def read_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Read the counts of config.json; raises PlanError naming `where` and a missing or invalid field."""
    text = text_config(config)
    check_bounds(config, where)

    def count(key: str, default: int | None = None) -> int:
        value = text.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _not_a_count(where, key, value)
        return value

    num_layers = count("num_hidden_layers")
    num_dense = count("first_k_dense_replace", 0)
    frequency = max(count("moe_layer_freq", 1), 1)
    num_experts = count(key_of(config, EXPERTS_KEY))
    chosen = key_of(config, "num_experts_per_tok")
    if num_experts and count(chosen, 0) > num_experts:
        raise PlanError(
            f"{where}: config.json: {chosen} is {text[chosen]}, but a layer has {num_experts} experts. Use the model's "
            "own config."
        )
    return Architecture(
        num_layers=num_layers,
        num_dense_layers=num_dense,
        moe_layers=tuple(i for i in range(num_dense, num_layers) if i % frequency == 0),
        num_experts=num_experts,
        hidden_size=count("hidden_size"),
        moe_intermediate_size=count("moe_intermediate_size"),
        residual_block=count("attn_res_block_size", 0),
    )


def check_bounds(config: Mapping[str, Any], where: str) -> None:
    """Refuse a number that no model has, before it sizes a loop or memory (PlanError)."""
    text = text_config(config)
    nested = {key: text.get(key) for key in _NESTED} | {"vision_config": config.get("vision_config")}
    parts = [("", text), *((f"{key}.", mapping_or_empty(part)) for key, part in nested.items())]
    for prefix, part in parts:
        for key in BOUNDS.keys() & part.keys():
            value = part[key]
            if isinstance(value, int | float) and not abs(value) <= BOUNDS[key]:
                raise PlanError(
                    f"{where}: config.json: {prefix}{key} is {cut(quoted(value), 40)}, more than any model has. The "
                    f"limit is {BOUNDS[key]:,}. Use the model's own config."
                )


def stated_count(config: Mapping[str, Any], field: str) -> int | None:
    """Return a count of the language model, None if the config does not say. `field` has DeepSeek-V3's name."""
    value = text_config(config).get(key_of(config, field))
    if isinstance(value, int) and value > 0:
        return value
    return None


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens the model was made for at most, None if the config does not say."""
    return stated_count(config, "max_position_embeddings")


def find_quantization_config(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return (path, quantization_config), the top level first; None if there is none under either of its names."""
    for path, holder in (("config.json", config), ("config.json text_config", config.get("text_config"))):
        if isinstance(holder, Mapping):
            for key in QUANTIZATION_KEYS:
                quantization = cast(Mapping[str, Any], holder).get(key)
                if isinstance(quantization, dict):
                    return path, cast(dict[str, Any], quantization)
    return None


def kv_cache_form(quantization: Mapping[str, Any]) -> str:
    """Return the form of the KV cache that a quantization_config declares: "FP8", or another such as "INT8" and
    "dynamic FP8"; empty if it declares none.
    """
    scheme = quantization.get("kv_cache_scheme")
    stated = mapping_or_empty(scheme)
    bits = stated.get("num_bits", 8)
    kind = _KINDS.get(str(stated.get("type", "float")))
    if not scheme:
        return ""
    if not stated or kind is None or not isinstance(bits, int):
        return cut(quoted(scheme), 40)
    return f"dynamic {kind}{bits}" if stated.get("dynamic") else f"{kind}{bits}"


FP8: Final = "FP8"
_KINDS: Final = {"float": "FP", "int": "INT"}


def check_source_config(config: Mapping[str, Any], *, family: Family, where: str) -> None:
    """Refuse a quantization_config that states a different scheme (PlanError). Fields it leaves out are accepted."""
    for path, stated_fields, expected in _statements(config, family.source_format):
        for field, known in expected.items():
            stated = stated_fields.get(field)
            if stated is not None and stated != known:
                raise PlanError(
                    f"{where}: config.json: {path}.{field} is {quoted(stated)}, but only {known!r} can be converted. "
                    f"{family.source_hint} Or {family.source_format.export}"
                )


def _statements(
    config: Mapping[str, Any], known: SourceFormat
) -> Iterator[tuple[str, dict[str, Any], Mapping[str, object]]]:
    """Yield (path, stated fields, known fields) for every part that describes the weights."""
    stated = {key: config.get(key) for key in QUANTIZATION_KEYS}
    if (inner := text_config(config)) is not config:
        stated |= {f"text_config.{key}": inner.get(key) for key in QUANTIZATION_KEYS}
    for path, value in stated.items():
        quantization = mapping_or_empty(value)
        yield path, quantization, known.known_config
        for name, group in mapping_or_empty(quantization.get("config_groups")).items():
            weights = mapping_or_empty(mapping_or_empty(group).get("weights"))
            yield f"{path}.config_groups.{shortened(name)}.weights", weights, known.known_weights
            if weights:
                yield f"{path}.config_groups.{shortened(name)}", mapping_or_empty(group), known.known_group


Experts = Mapping[int, Collection[int]]  # the numbers of the experts that have tensors, by layer


class Expected(NamedTuple):
    """A tensor that config.json describes. The first dtype is the published one. Without a shape, any will do."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...] | None
    sizes: str


class Fault(NamedTuple):
    """A tensor that is missing (nothing found), unknown (nothing expected), or different from what is expected."""

    name: str
    expected: Expected | None
    tensor: TensorInfo | None


_NUMBERS: Final = ("BF16", "F32", "F16")
KV_SCALES: Final = ("k_scale", "v_scale", "kv_scale", "output_scale")
"""Scales of an FP8 KV cache: ModelOpt's `k_proj.k_scale`, compressed-tensors' `self_attn.k_scale`, and older ones."""
_OPTIONAL: Final = (*KV_SCALES, "q_scale", "prob_scale", "inv_freq")
"""Parameters of attention that some checkpoints have beside those that config.json describes."""


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """The model that a config.json describes. `where` names the checkpoint in messages."""

    family: Family
    architecture: Architecture
    config: Mapping[str, Any]
    where: str

    def find_faults(self, tensors: Mapping[str, TensorInfo], experts: Experts) -> Iterator[Fault]:
        """Yield what is missing, different or unknown. Numbers of experts are the caller's to check."""
        num_found = 0
        for expected in self.tensors(tensors, experts):
            name, dtypes, shape, _ = expected
            tensor = tensors.get(name)
            num_found += tensor is not None
            if tensor is None or tensor.dtype not in dtypes or (shape is not None and tensor.shape != shape):
                yield Fault(name, expected, tensor)
        if num_found < len(tensors):
            known = {expected.name for expected in self.tensors(tensors, experts)}
            yield from (
                Fault(name, None, tensor)
                for name, tensor in tensors.items()
                if name not in known and not self._may_have(name)
            )

    def tensors(self, tensors: Mapping[str, TensorInfo], experts: Experts) -> Iterator[Expected]:
        """Yield every tensor as `tensors` store it; the module, with no dtypes, of an expert without tensors."""
        family = self.family
        if family.outer_tensors is None:
            return
        shapes = family.outer_tensors(self.config)
        vision = family.vision_tensors(self.config)
        if any(name in tensors for name in vision):
            shapes |= vision
        for layer in range(self.architecture.num_layers):
            stem = family.layer.format(layer=layer)
            layer_tensors = family.layer_tensors(self.config, layer, layer in self.architecture.moe_layers)
            shapes |= {f"{stem}.{name}": shape for name, shape in layer_tensors.items()}
        for name, text in shapes.items():
            yield from self._stored(name, text, tensors)
        for layer, numbers in experts.items():
            if layer in self.architecture.moe_layers:
                yield from self._experts(family.experts.format(layer=layer), numbers, tensors)

    def _stored(self, name: str, text: str, tensors: Mapping[str, TensorInfo]) -> Iterator[Expected]:
        dtype, _, sizes = text.rpartition(": ")
        shape = evaluate_shape(sizes, self.config, self.where)
        module, _, parameter = name.rpartition(".")
        stored = tensors.get(name)
        if stored is not None and stored.dtype == "F8_E4M3" and shape is not None and len(shape) == 2:
            for own, fp8_dtype, fp8_shape, _ in fp8_tensors(*shape, has_blocks=self.family.has_fp8_blocks):
                yield Expected(f"{module}.{own}", (fp8_dtype,), fp8_shape, sizes)
            return
        module_place = self.family.classify(module)
        is_linear = module_place is not None and module_place.role in CONVERTIBLE_ROLES and parameter == WEIGHT
        form = _form(module, tensors, self.family) if is_linear else ""
        if form:
            for parameter, stored_dtypes, own in _parameters(module, form, shape, tensors):
                yield Expected(f"{module}.{parameter}", stored_dtypes, own, sizes)
        else:
            dtypes = _NUMBERS
            if dtype:
                dtypes = (dtype, *(other for other in _NUMBERS if other != dtype))
            yield Expected(name, dtypes, shape, sizes)

    def _experts(self, stem: str, numbers: Iterable[int], tensors: Mapping[str, TensorInfo]) -> Iterator[Expected]:
        rows = "moe_intermediate_size"
        columns = expert_columns_key(self.config)
        sizes = {"gate": f"{rows}, {columns}", "up": f"{rows}, {columns}", "down": f"{columns}, {rows}"}
        shapes = {kind: evaluate_shape(text, self.config, self.where) for kind, text in sizes.items()}
        for number in numbers:
            for kind, last in self.family.projections.items():
                module = f"{stem}.{number}.{last}"
                form = _form(module, tensors, self.family)
                if form:
                    for parameter, dtypes, shape in _parameters(module, form, shapes[kind], tensors):
                        yield Expected(f"{module}.{parameter}", dtypes, shape, sizes[kind])
                elif f"{module}.{WEIGHT}" in tensors:
                    yield Expected(f"{module}.{WEIGHT}", _NUMBERS, shapes[kind], sizes[kind])
                else:
                    yield Expected(module, (), shapes[kind], sizes[kind])

    def _may_have(self, name: str) -> bool:
        module, _, parameter = name.rpartition(".")
        module_place = self.family.classify(module)
        role = None if module_place is None else module_place.role
        is_described = self.family.outer_tensors is not None
        if role in (Role.VISION_TOWER, Role.MM_PROJECTOR):
            return is_described and not self.family.vision_tensors(self.config)
        is_tied_head = role is Role.LM_HEAD and parameter == WEIGHT and is_tied(self.config)
        return is_tied_head or (role is Role.ATTENTION and parameter in _OPTIONAL) or not is_described

    def problem(self, fault: Fault) -> str:
        """Return what is wrong with a tensor, to follow its name."""
        expected = fault.expected
        tensor = fault.tensor
        if expected is None:
            return why_foreign(fault.name).partition(". ")[0] or "is not in the model that config.json describes"
        if tensor is None:
            return "is missing"
        if tensor.dtype not in expected.dtypes:
            return f"is {tensor.dtype} ({tensor.shard}), expected {' or '.join(expected.dtypes)}"
        fields = fields_of(expected.sizes, self.config)
        values = ", ".join(f"{field} {value}" for field, value in fields.items())
        return (
            f"has the shape {list(tensor.shape)} ({tensor.shard}), but config.json says {list(expected.shape or ())} "
            f"({values})"
        )


def _form(module: str, tensors: Mapping[str, TensorInfo], family: Family) -> str:
    """Return how a linear layer is stored: a format of a source, a layout of a result, or empty for plain numbers."""
    scale = tensors.get(f"{module}.{WEIGHT_SCALE}")
    if scale is not None and scale.dtype != "F8_E4M3":
        return family.source_format.title
    for layout in LAYOUTS.values():
        if f"{module}.{layout.global_scale}" in tensors:
            return layout.name
    weight = tensors.get(f"{module}.{WEIGHT}")
    if scale is not None or (weight is not None and weight.dtype == "U8"):
        names = (layout.name for layout in reversed(LAYOUTS.values()) if f"{module}.{layout.weight}" in tensors)
        return next(names, next(iter(LAYOUTS)))
    if weight is not None:
        return ""
    if f"{module}.{WEIGHT_PACKED}" in tensors:
        return family.source_format.title
    return ""


_Parameters = tuple[tuple[str, tuple[str, ...], tuple[int, ...] | None], ...]
"""Name, dtypes and shape of each tensor of a linear layer."""


def _parameters(
    module: str, form: str, shape: tuple[int, ...] | None, tensors: Mapping[str, TensorInfo]
) -> _Parameters:
    names = LAYOUTS.get(form)
    return _stored_parameters(form, shape, names is not None and f"{module}.{names.input_scale}" in tensors)


@lru_cache(maxsize=64)
def _stored_parameters(form: str, shape: tuple[int, ...] | None, has_input_scale: bool) -> _Parameters:
    """Return the tensors of a linear layer [N, K]. Scalars of a layout may be [] or [1]."""
    rows, columns = shape or (0, 0)
    if form in LAYOUTS:
        stored = LAYOUTS[form].tensors(num_rows=rows, num_columns=columns, has_input_scale=has_input_scale)
        return tuple((p, (d,), s if shape is not None and len(s) == 2 else None) for p, d, s, _ in stored)
    known = next(row for row in SOURCE_FORMATS if row.title == form)
    packed = (rows, columns // known.columns_per_element)
    scales = (rows, columns // GROUP_SIZE)
    parameters: dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]] = {
        WEIGHT_PACKED: ((known.packed_dtype,), packed if shape is not None else None),
        WEIGHT_SCALE: (known.scale_dtypes, scales if shape is not None else None),
        WEIGHT_SHAPE: (("I32", "I64"), (2,)),
    }
    return tuple((parameter, parameters[parameter][0], parameters[parameter][1]) for parameter in known.parameters)
