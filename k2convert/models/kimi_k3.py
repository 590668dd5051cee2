"""The Kimi K3 family: MXFP4 experts on latent columns, KDA and MLA attention. The only file that knows Kimi K3.

Names are those of moonshotai/Kimi-K3: the language model under `language_model.model.`, next to `vision_tower.` and
`mm_projector.`, its MoE in `block_sparse_moe` with the projections w1 (gate), w3 (up) and w2 (down). TensorRT-LLM reads
the experts' format from `quantized_layers` alone, and each engine asks for a layer's experts under names of its own, so
each bank is listed six times.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.errors import FitError
from k2convert.models.config import EXPERTS_KEY, LATENT_KEY, read_architecture, text_config
from k2convert.models.kimi import (
    UNSPLIT_MLA,
    below,
    classifier,
    expected_name,
    mla_tensors,
    mlp_tensors,
    outer_tensors,
    unconverted,
    vision_tensors,
    weights,
)
from k2convert.models.names import Architecture, AttentionKind, EngineNaming, Family, ModelCardFacts, Role
from k2convert.models.source_formats import MXFP4

_WRAPPER: Final = "language_model."
_PREFIX: Final = "language_model.model."
_ROLES: Final = {
    "block_sparse_moe.routed_expert_down_proj": Role.LATENT,
    "block_sparse_moe.routed_expert_up_proj": Role.LATENT,
    "block_sparse_moe.routed_expert_norm": Role.NORM,
    "self_attention_res_norm": Role.NORM,
    "mlp_res_norm": Role.NORM,
    "self_attention_res_proj": Role.RESIDUAL,
    "mlp_res_proj": Role.RESIDUAL,
}
_OUTER: Final = {"output_attn_res_norm": Role.NORM, "output_attn_res_proj": Role.RESIDUAL}
_WHOLE: Final = (
    "block_sparse_moe.gate",
    "mlp.gate",
    "routed_expert_down_proj",
    "routed_expert_up_proj",
    "_res_proj",
)


def _linear_layers(config: Mapping[str, Any], num_layers: int, where: str) -> frozenset[int]:
    """Return the layers of linear attention, from 0. Their lists in config.json count from 1."""
    linear = mapping_or_empty(text_config(config).get("linear_attn_config"))
    if not linear:
        return frozenset()
    kda, full = (linear.get(key) for key in ("kda_layers", "full_attn_layers"))
    numbers = cast(list[Any], [*kda, *full]) if isinstance(kda, list) and isinstance(full, list) and full else []
    if {*map(type, numbers)} != {int} or sorted(numbers) != [*range(1, num_layers + 1)]:
        raise FitError(
            f"{where}: config.json: linear_attn_config: kda_layers and full_attn_layers must have each of the layers "
            f"1 to {num_layers} once, and some of them in full_attn_layers. Use the model's own config."
        )
    return frozenset(number - 1 for number in cast(list[int], kda))


def _attention(config: Mapping[str, Any], layer: int) -> AttentionKind:
    full: Any = mapping_or_empty(text_config(config).get("linear_attn_config")).get("full_attn_layers")
    return "gated" if isinstance(full, list) and layer + 1 in full else "delta"


_A_LOG_UNIT: Final = 128  # the published A_log is padded with zeros to a multiple of it


def _kda_tensors(linear: Mapping[str, Any]) -> dict[str, str]:
    heads = "linear_attn_config.num_heads"
    size = "linear_attn_config.head_dim"
    width = f"{heads} * {size}"
    rows = dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), f"{width}, hidden_size")
    rows |= {"o_proj": f"hidden_size, {width}", "f_a_proj": f"{size}, hidden_size", "f_b_proj": f"{width}, {size}"}
    rows |= {"b_proj": f"{heads}, hidden_size", "o_norm": f"F32: {size}"}
    rows |= dict.fromkeys(
        ("q_conv1d", "k_conv1d", "v_conv1d"), f"F32: {width}, 1, linear_attn_config.short_conv_kernel_size"
    )
    num_heads: Any = linear.get("num_heads")
    padded = heads
    if isinstance(num_heads, int):
        padded = -(-num_heads // _A_LOG_UNIT) * _A_LOG_UNIT
    return weights(rows) | {"A_log": f"F32: {padded}", "dt_bias": f"F32: {width}"}


def _layer_tensors(config: Mapping[str, Any], layer: int, has_experts: bool) -> dict[str, str]:
    text = text_config(config)
    linear = mapping_or_empty(text.get("linear_attn_config"))
    norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
    rows: dict[str, str] = dict.fromkeys(norms, "hidden_size")
    rows |= dict.fromkeys(("self_attention_res_proj", "mlp_res_proj"), _RESIDUAL)
    is_mla = _attention(config, layer) == "gated"
    attention = mla_tensors(text, has_bias=False) if is_mla else _kda_tensors(linear)
    if is_mla and text.get("mla_use_output_gate", True):
        attention |= weights({"g_proj": "num_attention_heads * v_head_dim, hidden_size"})
    shapes = weights(rows) | below("self_attn", attention)
    if not has_experts:
        return shapes | mlp_tensors("mlp", "intermediate_size")
    moe = weights({"gate": f"{EXPERTS_KEY}, hidden_size"}) | {"gate.e_score_correction_bias": f"F32: {EXPERTS_KEY}"}
    if LATENT_KEY in text:
        latent = {"down": f"{LATENT_KEY}, hidden_size", "up": f"hidden_size, {LATENT_KEY}"}
        moe |= weights({f"routed_expert_{name}_proj": shape for name, shape in latent.items()})
        moe |= weights({"routed_expert_norm": LATENT_KEY} if text.get("latent_moe_use_norm", True) else {})
    moe |= mlp_tensors("shared_experts", "num_shared_experts * moe_intermediate_size")
    return shapes | below("block_sparse_moe", moe)


_RESIDUAL: Final = "1, hidden_size"


_FP8_FUSED: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), ("fused_qkvg_proj", "in_proj_qkvgfab")),
    **dict.fromkeys(("f_a_proj", "b_proj"), ("in_proj_qkvgfab",)),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")),
}
"""Layers of engines into which the linear layers of attention go, as NVIDIA's checkpoint lists them.

vLLM 0.33.0 puts g_proj of an MLA layer behind kv_a_proj_with_mqa, in the middle of a block, and gives half of its rows
the scale of the block before. So that all engines compute the same, these two have one scale for each column of blocks.
"""


def _linear_patterns(roles: Sequence[str], _architecture: Architecture) -> list[str]:
    names = {
        Role.EXPERTS: r"block_sparse_moe\.experts\.\d+\.w[123]",
        Role.ATTENTION: r"self_attn\.((q|k|v|g|o|f_a|f_b|b|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa)",
    }
    return [f".*{pattern}$" for role, pattern in names.items() if role in roles]


def _outer_tensors(config: Mapping[str, Any]) -> dict[str, str]:
    shapes = {f"{_PREFIX}output_attn_res_norm": "hidden_size", f"{_PREFIX}output_attn_res_proj": _RESIDUAL}
    return outer_tensors(_PREFIX, config) | weights(shapes)


K3: Final = Family(
    name="kimi-k3",
    title="Kimi K3",
    source_hint="Use moonshotai/Kimi-K3, in MXFP4.",
    recipe="kimi-k3-nvfp4",
    prefix=_PREFIX,
    layer=_PREFIX + "layers.{layer}",
    router=_PREFIX + "layers.{layer}.block_sparse_moe.gate",
    experts=_PREFIX + "layers.{layer}.block_sparse_moe.experts",
    mlp_norm=_PREFIX + "layers.{layer}.post_attention_layernorm",
    classify=classifier(
        _PREFIX, "block_sparse_moe", {"w1": "gate", "w3": "up", "w2": "down"}, inner=_ROLES, outer=_OUTER
    ),
    expected_name=partial(expected_name, _PREFIX),
    read_architecture=read_architecture,
    unconverted=partial(unconverted, _WHOLE, "_conv1d", True),
    fp8_layout="modelopt",
    fp8_roles=(Role.ATTENTION,),
    has_fp8_blocks=True,
    fp8_partners={"g_proj": "kv_a_proj_with_mqa", "kv_a_proj_with_mqa": "g_proj"},
    fp8_fused=_FP8_FUSED,
    linear_patterns=_linear_patterns,
    refused_configs={
        ("kimi_linear", LATENT_KEY): "this is the language model of Kimi K3 alone, without the model around it"
    },
    linear_layers=_linear_layers,
    card=ModelCardFacts(
        model_kind="a Kimi K3 model",
        unquantized=("attention", "router", "latent and residual projections", "embeddings and output head"),
        unquantized_attention="convolutions and decay rates of attention",
        tags=("kimi-k3",),
        vllm_options="--enable-auto-tool-choice --tool-call-parser kimi_k3 --reasoning-parser kimi_k3",
        sglang_options="--tool-call-parser kimi_k3 --reasoning-parser kimi_k3",
        tensorrt_llm_options="--tool_parser kimi_k3 --reasoning_parser kimi_k3",
        sglang_blackwell="flashinfer_trtllm",
        has_vision=True,
        notes=("The model needs about 2 TB of GPU memory.",),
        refusals=(
            (
                "sglang",
                "compressed-tensors",
                "SGLang 0.5.23 does not load the layout compressed-tensors for this model: it skips the experts' "
                "tensors without a message. Use the layout modelopt.",
            ),
            ("tensorrt-llm", "w4a16", "TensorRT-LLM needs input scales for this model, so it loads W4A4 only."),
            ("tensorrt-llm", "pipeline", "TensorRT-LLM has no pipeline parallelism for this model."),
        ),
    ),
    model_types=("kimi_k3",),
    model_class="KimiK3ForConditionalGeneration",
    activation="situ",
    attention=_attention,
    source_format=MXFP4,
    roles=(Role.EXPERTS,),
    projections={"gate": "w1", "up": "w3", "down": "w2"},
    unsplit_attention=(*UNSPLIT_MLA, "f_a_proj", "o_norm"),
    usual_num_experts=896,
    naming=EngineNaming(
        wrapper=_WRAPPER,
        vllm_fused=dict.fromkeys(("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"), "in_proj_qkvgfab"),
        sglang_fused=dict.fromkeys(("q_proj", "k_proj", "v_proj"), "fused_qkvg_proj"),
        banks={
            "vLLM": "language_model.model.layers.{layer}.block_sparse_moe.experts",
            "SGLang": "model.layers.{layer}.mlp.experts",
        },
    ),
    banks=tuple(
        f"{prefix}layers.{{layer}}.{block}.experts"
        for prefix in (_PREFIX, "model.", "")
        for block in ("block_sparse_moe", "mlp")
    ),
    tensor_parallel_sizes=(1, 2, 4, 8, 16, 32),
    least_expert_piece=256,
    not_calibrated="rule mse casts its MXFP4 weights, and rule gptq gained nothing over that in W4A4",
    has_kv_scheme=False,
    outer_tensors=_outer_tensors,
    layer_tensors=_layer_tensors,
    vision_tensors=vision_tensors,
)
