"""What there is to know about Kimi K2 checkpoints: prefixes, module names, roles, gate/up pairs, the INT4 triplet.

The only file that knows Kimi. Names are those of moonshotai's releases: K2-Thinking has the language model under
`model.`, K2.5, K2.6 and K2.7-Code under `language_model.model.` beside `vision_tower.` and `mm_projector.`.
"""

import re
from functools import lru_cache
from typing import Any, cast

from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import PlanError
from k2convert.models.names import Architecture, Family, Role, TensorName

TEXT_PREFIX = "model."
WRAPPED_PREFIX = "language_model.model."
LEGACY_PREFIX = "language_model.layers."


MAX_COUNT = 100_000  # no model comes near; the counts are enumerated, so a senseless one would take all memory


_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
_SHARED = re.compile(r"mlp\.shared_experts\.(gate|up|down)_proj")
_DENSE = re.compile(r"mlp\.(gate|up|down)_proj")


@lru_cache(maxsize=4096)  # a module's three or four tensors follow one another
def _classify_module(module: str, prefix: str) -> tuple[Role, int | None, int | None, str | None] | None:
    if module.startswith("vision_tower."):
        return Role.VISION_TOWER, None, None, None
    if module.startswith("mm_projector."):
        return Role.MM_PROJECTOR, None, None, None
    if module == prefix.removesuffix("model.") + "lm_head":
        return Role.LM_HEAD, None, None, None
    if not module.startswith(prefix):
        return None
    rest = module[len(prefix) :]
    if rest in ("embed_tokens", "norm"):
        return (Role.EMBEDDINGS if rest == "embed_tokens" else Role.NORM), None, None, None
    matched = _LAYER.fullmatch(rest)
    if matched is None:
        return None
    layer, inner = int(matched[1]), matched[2]
    if expert := _EXPERT.fullmatch(inner):
        return Role.EXPERTS, layer, int(expert[1]), expert[2]
    if shared := _SHARED.fullmatch(inner):
        return Role.SHARED_EXPERTS, layer, None, shared[1]
    if dense := _DENSE.fullmatch(inner):
        return Role.DENSE_MLP, layer, None, dense[1]
    if inner == "mlp.gate":
        return Role.ROUTER, layer, None, None
    if inner in ("input_layernorm", "post_attention_layernorm"):
        return Role.NORM, layer, None, None
    return (Role.ATTENTION, layer, None, None) if inner.startswith("self_attn.") else None


def parse_tensor_name(name: str, *, prefix: str) -> TensorName:
    """Take a tensor name apart; raises PlanError where no part of a Kimi K2 model has such a name."""
    module, _, parameter = name.rpartition(".")
    found = _classify_module(module, prefix)
    if found is None:
        raise PlanError(
            f"tensor {name}: not part of any Kimi K2 model known here (prefix {prefix}). Nothing is guessed about "
            "weights: start from Moonshot's INT4 release; a new member of the family needs its names added first."
        )
    return TensorName(module, parameter, *found)


def parse_tensor_names(checkpoint: Checkpoint, *, prefix: str) -> dict[str, TensorName]:
    """Take every tensor name of a checkpoint apart; raises PlanError naming shard and tensor."""
    names: dict[str, TensorName] = {}
    for name, tensor in checkpoint.tensors.items():
        try:
            names[name] = parse_tensor_name(name, prefix=prefix)
        except PlanError as error:
            raise PlanError(f"{tensor.shard}: {error}") from None
    return names


def detect_family(checkpoint: Checkpoint) -> tuple[Family, str]:
    """Tell family and tensor-name prefix from the names; raises PlanError where it is not a Kimi K2 checkpoint."""
    names = checkpoint.tensors
    if any(name.startswith(LEGACY_PREFIX) for name in names):
        raise PlanError(
            f"{checkpoint.folder}: tensors are named {LEGACY_PREFIX}*, an early NVFP4 naming that engines do not "
            "load. Start from Moonshot's own INT4 release."
        )
    for family, prefix in ((Family.K2_5, WRAPPED_PREFIX), (Family.K2_THINKING, TEXT_PREFIX)):
        if any(name.startswith(prefix + "layers.") for name in names):
            return family, prefix
    raise PlanError(
        f"{checkpoint.folder}: no tensor is named {TEXT_PREFIX}layers.* or {WRAPPED_PREFIX}layers.*: "
        "this is not a Kimi K2 checkpoint. Name one: K2-Thinking, K2.5, K2.6 or K2.7-Code in INT4."
    )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of config.json: `text_config` in the multimodal wrapper, else the whole."""
    inner = config.get("text_config")
    return cast(dict[str, Any], inner) if isinstance(inner, dict) else config


def read_architecture(config: dict[str, Any], *, where: str) -> Architecture:
    """Read the counts out of config.json; raises PlanError naming a missing or senseless field."""
    text = text_config(config)

    def count(key: str, default: int | None = None) -> int:
        value = text.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise PlanError(f"{where}: config.json: {key} is {value!r}, expected a count. Download config.json again.")
        if value > MAX_COUNT:
            raise PlanError(
                f"{where}: config.json: {key} is more than {MAX_COUNT:,}: no model has so many. "
                "Download config.json again."
            )
        return value

    num_layers, num_dense = count("num_hidden_layers"), count("first_k_dense_replace", 0)
    frequency = max(count("moe_layer_freq", 1), 1)
    moe_layers = tuple(i for i in range(num_dense, num_layers) if i % frequency == 0)
    return Architecture(
        num_layers=num_layers,
        num_dense_layers=num_dense,
        moe_layers=moe_layers,
        num_experts=count("n_routed_experts"),
        hidden_size=count("hidden_size"),
        moe_intermediate_size=count("moe_intermediate_size"),
    )


def find_quantization_config(config: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return (where it stands, the quantization_config), top level first; None where there is none."""
    for place, holder in (("config.json", config), ("config.json text_config", config.get("text_config"))):
        if isinstance(holder, dict):
            found = cast(dict[str, Any], holder).get("quantization_config")
            if isinstance(found, dict):
                return place, cast(dict[str, Any], found)
    return None
