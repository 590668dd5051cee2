"""config.json of DeepSeek-V3-like models: the language model's part, its counts, its quantization_config.

The tensors decide which weights are converted. Their bytes look the same in other schemes, so a source whose config
states a different scheme than its family has is refused. A config that states nothing is accepted.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.checkpoint.layouts import QUANTIZATION_KEYS
from k2convert.errors import PlanError, cut, quoted, shortened
from k2convert.models.names import Architecture, Family, SourceFormat

EXPERTS_KEY: Final = "n_routed_experts"
LATENT_KEY: Final = "routed_expert_hidden_size"
BOUNDS: Final = {
    field: most
    for most, fields in {
        1_000: "num_hidden_layers num_nextn_predict_layers first_k_dense_replace moe_layer_freq attn_res_block_size",
        10_000: f"{EXPERTS_KEY} num_experts n_shared_experts num_shared_experts num_experts_per_tok "
        "num_experts_per_token n_group num_expert_group topk_group num_attention_heads num_key_value_heads num_heads",
        1_000_000: f"hidden_size {LATENT_KEY} intermediate_size moe_intermediate_size q_lora_rank "
        "kv_lora_rank head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim short_conv_kernel_size",
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
}
"""Other names of a field: those of configs that follow Kimi-Linear."""

_NESTED: Final = ("rope_scaling", "rope_parameters", "linear_attn_config")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of config.json: `text_config` of a multimodal model, else the whole."""
    inner = config.get("text_config")
    return cast(dict[str, Any], inner) if isinstance(inner, dict) else config


def key_of(config: Mapping[str, Any], field: str) -> str:
    """Return the name that a field of the language model has in this config."""
    text = text_config(config)
    uses_aliases = field not in text and any(alias in text for alias in _ALIASES.values())
    return _ALIASES.get(field, field) if uses_aliases else field


def read_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Read the counts of config.json; raises PlanError naming `where` and a missing or invalid field."""
    text = text_config(config)
    check_bounds(config, where)

    def count(key: str, default: int | None = None) -> int:
        value = text.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise PlanError(
                f"{where}: config.json: {key} is {quoted(value)}, expected a count. Use the model's own config."
            )
        return value

    num_layers, num_dense = count("num_hidden_layers"), count("first_k_dense_replace", 0)
    frequency = max(count("moe_layer_freq", 1), 1)
    return Architecture(
        num_layers=num_layers,
        num_dense_layers=num_dense,
        moe_layers=tuple(i for i in range(num_dense, num_layers) if i % frequency == 0),
        num_experts=count(key_of(config, EXPERTS_KEY)),
        hidden_size=count("hidden_size"),
        moe_intermediate_size=count("moe_intermediate_size"),
        expert_columns=count(LATENT_KEY, text.get("hidden_size")),
    )


def check_bounds(config: Mapping[str, Any], where: str) -> None:
    """Refuse a number that no model has, before it sizes a loop or memory (PlanError)."""
    text = text_config(config)
    parts = [("", text), *((f"{key}.", text[key]) for key in _NESTED if isinstance(text.get(key), Mapping))]
    for prefix, part in parts:
        for key in BOUNDS.keys() & part.keys():
            value = part[key]
            if isinstance(value, int | float) and not abs(value) <= BOUNDS[key]:
                raise PlanError(
                    f"{where}: config.json: {prefix}{key} is {cut(quoted(value), 40)}, more than any model has. The "
                    f"limit is {BOUNDS[key]:,}. Use the model's own config."
                )


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens the model was made for at most, None if the config does not say."""
    value = text_config(config).get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def find_quantization_config(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return (place, quantization_config), the top level first; None if there is none under either of its names."""
    for place, holder in (("config.json", config), ("config.json text_config", config.get("text_config"))):
        if isinstance(holder, Mapping):
            for key in QUANTIZATION_KEYS:
                found = cast(Mapping[str, Any], holder).get(key)
                if isinstance(found, dict):
                    return place, cast(dict[str, Any], found)
    return None


def check_source_config(config: Mapping[str, Any], *, family: Family, where: str) -> None:
    """Refuse a quantization_config that states a different scheme (PlanError). Fields it leaves out are accepted."""
    for place, found, expected in _statements(config, family.source_format):
        for field, known in expected.items():
            stated = found.get(field)
            if stated is not None and stated != known:
                raise PlanError(
                    f"{where}: config.json: {place}.{field} is {quoted(stated)}, but only {known!r} can be converted. "
                    f"{family.source_hint}"
                )


def _statements(
    config: Mapping[str, Any], known: SourceFormat
) -> Iterator[tuple[str, dict[str, Any], Mapping[str, object]]]:
    """Yield (place, stated fields, known fields) for every part that describes the weights."""
    stated = {key: config.get(key) for key in QUANTIZATION_KEYS}
    if (inner := text_config(config)) is not config:
        stated |= {f"text_config.{key}": inner.get(key) for key in QUANTIZATION_KEYS}
    for place, value in stated.items():
        quantization = mapping_or_empty(value)
        yield place, quantization, known.known_config
        for name, group in mapping_or_empty(quantization.get("config_groups")).items():
            weights = mapping_or_empty(mapping_or_empty(group).get("weights"))
            yield f"{place}.config_groups.{shortened(name)}.weights", weights, known.known_weights
            if weights:
                yield f"{place}.config_groups.{shortened(name)}", mapping_or_empty(group), known.known_group
