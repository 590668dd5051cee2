"""config.json of DeepSeek-V3-like models: the language model's part, its counts, its quantization_config."""

from collections.abc import Mapping
from typing import Any, Final, cast

from k2convert.checkpoint.layouts import QUANTIZATION_KEYS
from k2convert.errors import PlanError, quoted
from k2convert.models.names import Architecture

EXPERTS_KEY: Final = "n_routed_experts"
MAX_COUNT: Final = 100_000  # layers and experts are enumerated, so an absurd count would take all memory


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of config.json: `text_config` of a multimodal model, else the whole."""
    inner = config.get("text_config")
    return cast(dict[str, Any], inner) if isinstance(inner, dict) else config


def read_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Read the counts of config.json; raises PlanError naming `where` and a missing or invalid field."""
    text = text_config(config)

    def count(key: str, default: int | None = None) -> int:
        value = text.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise PlanError(
                f"{where}: config.json: {key} is {quoted(value)}, expected a count. Use the model's own config."
            )
        if value > MAX_COUNT:
            raise PlanError(
                f"{where}: config.json: {key} is more than {MAX_COUNT:,}, which no model has. "
                "Use the model's own config."
            )
        return value

    num_layers, num_dense = count("num_hidden_layers"), count("first_k_dense_replace", 0)
    frequency = max(count("moe_layer_freq", 1), 1)
    return Architecture(
        num_layers=num_layers,
        num_dense_layers=num_dense,
        moe_layers=tuple(i for i in range(num_dense, num_layers) if i % frequency == 0),
        num_experts=count(EXPERTS_KEY),
        hidden_size=count("hidden_size"),
        moe_intermediate_size=count("moe_intermediate_size"),
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
