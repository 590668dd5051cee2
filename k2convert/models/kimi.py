"""The Kimi K2 family: tensor names, prefixes, and how engines name its modules. The only file that knows Kimi K2.

Names are those of moonshotai's releases. K2-Thinking has the language model under `model.`. K2.5, K2.6 and K2.7-Code
have it under `language_model.model.`, next to `vision_tower.` and `mm_projector.`. All three state model_type kimi_k25;
the language model's own, in text_config, is kimi_k2 or deepseek_v3.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, cast

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.models.config import EXPERTS_KEY, is_tied, read_architecture, text_config
from k2convert.models.names import WEIGHT, Architecture, EngineNaming, Family, ModelCardFacts, ModulePlace, Role
from k2convert.models.source_formats import INT4

_TEXT_PREFIX: Final = "model."
_WRAPPER: Final = "language_model."
_WRAPPED_PREFIX: Final = _WRAPPER + _TEXT_PREFIX
_LEGACY_PREFIX: Final = "language_model.layers."
_LANGUAGE_PARTS: Final = ("layers.", "embed_tokens.", "norm.")

UNSPLIT_MLA: Final = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
"""Parts of multi-head latent attention that every GPU of tensor parallelism keeps whole."""

_PROJECTIONS: Final = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_NUMBER: Final = "(0|[1-9][0-9]{0,5})"  # no model has more layers or experts


def classifier(
    prefix: str, moe: str, projections: Mapping[str, str], *, inner: Mapping[str, Role], outer: Mapping[str, Role]
) -> Callable[[str], ModulePlace | None]:
    """Return the function that finds the place of a module of a family: `Family.classify`.

    prefix        of the language model
    moe           the MoE block in a layer
    projections   gate, up and down by the last part of an expert's modules
    inner         roles of other modules in a layer
    outer         roles of other modules below the prefix
    """
    layers = re.compile(rf"{re.escape(prefix)}layers\.{_NUMBER}\.(.+)")
    experts = re.compile(rf"{moe}\.experts\.{_NUMBER}\.({'|'.join(projections)})")
    mlps = re.compile(rf"(mlp|{moe}\.shared_experts)\.(gate|up|down)_proj")
    inside = {**inner, f"{moe}.gate": Role.ROUTER, "self_attn": Role.ATTENTION}  # scales of a KV cache are in the last
    inside |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), Role.NORM)
    outside = {f"{prefix}{name}": role for name, role in outer.items()}
    outside |= {f"{prefix}embed_tokens": Role.EMBEDDINGS, f"{prefix}norm": Role.NORM}
    outside[f"{prefix.removesuffix(_TEXT_PREFIX)}lm_head"] = Role.LM_HEAD

    @lru_cache(maxsize=4096)  # the three or four tensors of a module follow one another
    def classify(module: str) -> ModulePlace | None:
        if module in outside:
            return ModulePlace(outside[module])
        if module.startswith("vision_tower."):
            return ModulePlace(Role.VISION_TOWER)
        if module.startswith("mm_projector."):
            return ModulePlace(Role.MM_PROJECTOR)
        matched = layers.fullmatch(module)
        if matched is None:
            return None
        layer = int(matched[1])
        name = matched[2]
        if expert := experts.fullmatch(name):
            return ModulePlace(Role.EXPERTS, layer, int(expert[1]), projections[expert[2]])
        if mlp := mlps.fullmatch(name):
            return ModulePlace(Role.DENSE_MLP if mlp[1] == "mlp" else Role.SHARED_EXPERTS, layer, None, mlp[2])
        if name in inside:
            return ModulePlace(inside[name], layer)
        return ModulePlace(Role.ATTENTION, layer) if name.startswith("self_attn.") else None

    return classify


def expected_name(prefix: str, name: str) -> str:
    """Put a language-model name under `prefix`, whichever known prefix it has. Other names are kept."""
    body = name.removeprefix(_WRAPPER).removeprefix(_TEXT_PREFIX)
    if body.startswith(_LANGUAGE_PARTS):
        return prefix + body
    if body.startswith("lm_head."):
        return prefix.removesuffix(_TEXT_PREFIX) + body
    return name


def mla_tensors(text: Mapping[str, Any], *, has_bias: bool) -> dict[str, str]:
    """Return the shapes of multi-head latent attention, by names below `self_attn`."""
    query_rows = "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"
    biased = {
        "kv_a_proj_with_mqa": "kv_lora_rank + qk_rope_head_dim, hidden_size",
        "o_proj": "hidden_size, num_attention_heads * v_head_dim",
    }
    rows = {
        "kv_a_layernorm": "kv_lora_rank",
        "kv_b_proj": "num_attention_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank",
    }
    if text.get("q_lora_rank", 1) is None:
        rows["q_proj"] = f"{query_rows}, hidden_size"
    else:
        biased["q_a_proj"] = "q_lora_rank, hidden_size"
        rows |= {"q_a_layernorm": "q_lora_rank", "q_b_proj": f"{query_rows}, q_lora_rank"}
    return weights(rows) | weights(biased, has_bias=has_bias)


def _grouped_query_tensors(text: Mapping[str, Any], *, has_bias: bool) -> dict[str, str]:
    width = "head_dim" if "head_dim" in text else "v_head_dim"
    biased = {
        "q_proj": f"num_attention_heads * {width}, hidden_size",
        "k_proj": f"num_key_value_heads * {width}, hidden_size",
        "v_proj": f"num_key_value_heads * {width}, hidden_size",
    }
    norms = dict.fromkeys(("q_norm", "k_norm"), width) if text.get("use_qk_norm") else {}
    output = {"o_proj": f"hidden_size, num_attention_heads * {width}"}
    return weights(norms | output) | weights(biased, has_bias=has_bias)


def weights(module_shapes: Mapping[str, str], *, has_bias: bool = False) -> dict[str, str]:
    """Return the shapes of modules' weights, and of their biases: one number for each row."""
    shapes: dict[str, str] = {}
    for module, shape in module_shapes.items():
        shapes[f"{module}.{WEIGHT}"] = shape
        if has_bias:
            shapes[f"{module}.bias"] = shape.partition(",")[0]
    return shapes


def below(stem: str, shapes: Mapping[str, str]) -> dict[str, str]:
    return {f"{stem}.{name}": shape for name, shape in shapes.items()}


def mlp_tensors(module: str, width: str) -> dict[str, str]:
    wide = f"{width}, hidden_size"
    return below(module, weights({"gate_proj": wide, "up_proj": wide, "down_proj": f"hidden_size, {width}"}))


def _layer_tensors(config: Mapping[str, Any], _layer: int, has_experts: bool) -> dict[str, str]:
    text = text_config(config)
    attention = _grouped_query_tensors
    if "kv_lora_rank" in text:
        attention = mla_tensors
    shapes = weights(dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "hidden_size"))
    shapes |= below("self_attn", attention(text, has_bias=bool(text.get("attention_bias"))))
    if not has_experts:
        return shapes | mlp_tensors("mlp", "intermediate_size")
    shapes[f"mlp.gate.{WEIGHT}"] = f"{EXPERTS_KEY}, hidden_size"
    if text.get("topk_method", "noaux_tc") == "noaux_tc":
        shapes["mlp.gate.e_score_correction_bias"] = f"F32: {EXPERTS_KEY}"
    if text.get("n_shared_experts", 1):
        shapes |= mlp_tensors("mlp.shared_experts", "n_shared_experts * moe_intermediate_size")
    return shapes


def outer_tensors(prefix: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the shapes of embedding, last norm and output head. Tied embeddings need no head."""
    modules = {"embed_tokens": "vocab_size, hidden_size", "norm": "hidden_size"}
    shapes = below(prefix.removesuffix("."), weights(modules))
    if not is_tied(config):
        shapes[f"{prefix.removesuffix(_TEXT_PREFIX)}lm_head.{WEIGHT}"] = "vocab_size, hidden_size"
    return shapes


def vision_tensors(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the shapes of vision tower and projector; none if config.json does not describe them."""
    vision = mapping_or_empty(config.get("vision_config"))
    num_blocks: Any = vision.get("vt_num_hidden_layers")
    if not isinstance(num_blocks, int):
        return {}
    hidden, inner, patch = (f"vision_config.{key}" for key in ("vt_hidden_size", "vt_intermediate_size", "patch_size"))
    width = hidden
    if "qkv_hidden_size" in vision:
        width = "vision_config.qkv_hidden_size"
    attention = {"wqkv": f"3 * {width}, {hidden}", "wo": f"{hidden}, {width}"}
    linears = {"mlp.fc0": f"{inner}, {hidden}", "mlp.fc1": f"{hidden}, {inner}"}
    has_norm_bias = vision.get("norm_type") != "rmsnorm"
    block = weights(dict.fromkeys(("norm0", "norm1"), hidden), has_bias=has_norm_bias)
    block |= weights(attention, has_bias=vision.get("attn_bias", True))
    block |= weights(linears, has_bias=vision.get("linear_bias", True))
    positions = f"vision_config.init_pos_emb_height, vision_config.init_pos_emb_width, {hidden}"
    tower = weights({"proj": f"{hidden}, 3, {patch}, {patch}"}, has_bias=vision.get("patch_embed_proj_bias", True))
    tower = below("patch_embed", tower | weights({"pos_emb": positions}))
    for number in range(num_blocks):
        tower |= below(f"encoder.blocks.{number}", block)
    tower |= weights({"encoder.final_layernorm": hidden}, has_bias=has_norm_bias)
    return below("vision_tower", tower) | below("mm_projector", _projector_tensors(vision))


def _projector_tensors(vision: Mapping[str, Any]) -> dict[str, str]:
    kernel: Any = vision.get("merge_kernel_size")
    is_known = isinstance(kernel, list) and all(isinstance(size, int) for size in cast(list[object], kernel))
    merged = f"{math.prod(cast(list[int], kernel)) if is_known else 4} * vision_config.mm_hidden_size"
    linears = {"proj.0": f"{merged}, {merged}", "proj.2": f"hidden_size, {merged}"}
    if vision.get("mm_projector_type") == "patchmergerv2":
        return weights(linears | {"post_norm": "hidden_size"})
    return weights(linears | {"pre_norm": "vision_config.mm_hidden_size"}, has_bias=True)


def unconverted(
    whole: Sequence[str], kept_attention: str, has_vision: bool, roles: Sequence[str], architecture: Architecture
) -> list[tuple[str, bool]]:
    """Return the modules left in BF16: `Family.unconverted`. Nothing may follow after the name parts in `whole`.

    `kept_attention` are those of attention if its linear layers are converted.
    """
    names = [] if Role.ATTENTION in roles else ["self_attn"]
    if Role.SHARED_EXPERTS not in roles:
        names.append("shared_experts")
    if Role.DENSE_MLP not in roles:
        names += [f"layers.{layer}.mlp" for layer in range(architecture.num_dense_layers)]
    vision = ("vision_tower", "mm_projector") if has_vision else ()
    if Role.ATTENTION in roles:
        whole = (kept_attention, *whole)
    entries = [(name, True) for name in (*names, "lm_head")] + [(name, False) for name in whole]
    return entries + [(name, True) for name in vision]


_KEPT_ATTENTION: Final = "kv_b_proj"  # engines decode with its BF16 values, whatever the checkpoint has


def _linear_patterns(roles: Sequence[str], architecture: Architecture) -> list[str]:
    """Return the names of linear layers by role: `Family.linear_patterns`.

    SGLang refuses a fused layer that matches nothing, so the names of fused layers are here too.
    """
    mlp = r"(gate_up|gate|up|down)_proj"
    dense = "|".join(map(str, range(architecture.num_dense_layers)))
    dense = f"({dense})" if architecture.num_dense_layers > 1 else dense
    attention = "fused_qkv_a_proj(_with_mqa)?|q_a_proj|kv_a_proj_with_mqa|q_b_proj|o_proj"
    names = {
        Role.EXPERTS: r"mlp\.experts\.\d+\.(gate|up|down)_proj",
        Role.ATTENTION: rf"self_attn\.({attention})",
        Role.SHARED_EXPERTS: rf"mlp\.shared_experts\.{mlp}",
        Role.DENSE_MLP: rf"layers\.{dense}\.mlp\.{mlp}",
    }
    return [f".*{pattern}$" for role, pattern in names.items() if role in roles]


def _family(name: str, *, prefix: str, has_vision: bool, naming: EngineNaming) -> Family:
    # K2.5's chat template opens the reasoning, in K2 the model does.
    model_type = "kimi_k25" if has_vision else "kimi_k2"
    return Family(
        name=name,
        title="Kimi K2",
        source_hint="Use Moonshot's INT4 release of K2-Thinking, K2.5, K2.6 or K2.7-Code.",
        recipe=f"{name}-nvfp4",
        prefix=prefix,
        layer=prefix + "layers.{layer}",
        router=prefix + "layers.{layer}.mlp.gate",
        experts=prefix + "layers.{layer}.mlp.experts",
        mlp_norm=prefix + "layers.{layer}.post_attention_layernorm",
        classify=classifier(
            prefix, "mlp", {f"{kind}_proj": kind for kind in ("gate", "up", "down")}, inner={}, outer={}
        ),
        expected_name=partial(expected_name, prefix),
        read_architecture=read_architecture,
        unconverted=partial(unconverted, ("mlp.gate",), _KEPT_ATTENTION, has_vision),
        kept_attention=_KEPT_ATTENTION,
        linear_patterns=_linear_patterns,
        model_types=(model_type,),
        model_class="KimiK25ForConditionalGeneration" if has_vision else "DeepseekV3ForCausalLM",
        source_format=INT4,
        card=ModelCardFacts(
            model_kind="a Kimi K2 model",
            unquantized=("attention", "router", "embeddings and output head"),
            unquantized_attention="`kv_b_proj` of attention",
            tags=("kimi-k2",),
            vllm_options="--enable-auto-tool-choice --tool-call-parser kimi_k2 --reasoning-parser kimi_k2",
            sglang_options="--tool-call-parser kimi_k2 --reasoning-parser kimi_k2",
            tensorrt_llm_options=f"--tool_parser kimi_k2 --reasoning_parser {model_type}",
            has_vision=has_vision,
            draft_heads={
                "Kimi-K2.5": ("lightseekorg/kimi-k2.5-eagle3-mla",),
                "Kimi-K2.6": ("lightseekorg/kimi-k2.6-eagle3-mla", "nvidia/Kimi-K2.6-Eagle3"),
                "Kimi-K2.7-Code": ("nvidia/Kimi-K2.7-Code-DFlash",),
            },
        ),
        unsplit_attention=UNSPLIT_MLA,
        usual_num_experts=384,
        naming=naming,
        outer_tensors=partial(outer_tensors, prefix),
        layer_tensors=_layer_tensors,
        vision_tensors=vision_tensors,
    )


K2_THINKING: Final = _family("kimi-k2-thinking", prefix=_TEXT_PREFIX, has_vision=False, naming=EngineNaming())
_RENAMED: Final = ((_LEGACY_PREFIX, _WRAPPED_PREFIX + "layers."),)
_RENAMED_PROJECTOR: Final = {
    "mm_projector.proj.0": "mm_projector.linear_1",
    "mm_projector.proj.2": "mm_projector.linear_2",
}
K2_5: Final = _family(
    "kimi-k2.5",
    prefix=_WRAPPED_PREFIX,
    has_vision=True,
    naming=EngineNaming(
        wrapper=_WRAPPER,
        renamed_prefixes=_RENAMED,
        vllm_renamed_prefixes=(*_RENAMED, *_RENAMED_PROJECTOR.items()),
        renamed_modules=_RENAMED_PROJECTOR,
    ),
)
"""K2.6 and K2.7-Code have the same form."""
