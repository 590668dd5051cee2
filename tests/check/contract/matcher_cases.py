"""Exclude lists from published checkpoints or that caused trouble, and the modules they are for."""

import json
from collections.abc import Sequence
from pathlib import Path

PUBLISHED_CONFIGS = Path(__file__).resolve().parents[2] / "data" / "published-configs"
PUBLISHED = ("Kimi-K2.5-NVFP4", "Kimi-K2.6-NVFP4", "Kimi-K2.7-Code-NVFP4")
DENSE, MOE, LAST = 0, (1, 5, 10, 12), 12  # layer numbers with one and two digits

OURS = [
    "*self_attn*", "*shared_experts*", "*layers.0.mlp*", "*lm_head*", "*mlp.gate", "*vision_tower*", "*mm_projector*",
]  # fmt: skip
OURS_PACKED = [
    "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*layers\\.0\\.mlp.*", "re:.*lm_head.*", "re:.*mlp\\.gate$",
    "re:.*vision_tower.*", "re:.*mm_projector.*",
]  # fmt: skip
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def _by_layer(prefix: str, head: str) -> list[str]:
    """ModelOpt's own style: a glob a module, layer by layer."""
    entries = [f"{prefix}layers.{layer}.self_attn*" for layer in (DENSE, *MOE)]
    entries += [f"{prefix}layers.{DENSE}.mlp*", head, "vision_tower*", "mm_projector*"]
    for layer in MOE:
        entries += [f"{prefix}layers.{layer}.mlp.shared_experts*", f"{prefix}layers.{layer}.mlp.gate"]
    return entries


def _literal(prefix: str, head: str) -> list[str]:
    """Every BF16 layer by its name in the checkpoint."""
    return [name for name in modules_of("checkpoint", wrapped=prefix != "model.") if ".experts" not in name] + [head]


def modules_of(engine: str, *, wrapped: bool, moe: Sequence[int] = MOE) -> list[str]:
    """Linear layers and experts as an engine (or the checkpoint) names them."""
    keeps_wrapper = engine in ("vLLM", "checkpoint") and wrapped
    prefix, head = ("language_model.model.", "language_model.lm_head") if keeps_wrapper else ("model.", "lm_head")
    fused_attention = {
        "checkpoint": ATTENTION,
        "vLLM": ("fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"),
        "SGLang": ("fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"),
    }.get(engine, ("kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"))
    unfused = engine in ("checkpoint", "TensorRT-LLM, unfused")
    mlp = MLP if unfused else ("gate_up_proj", "down_proj")
    names = [head]
    for layer in (DENSE, *moe):
        stem = f"{prefix}layers.{layer}"
        names += [f"{stem}.self_attn.{part}" for part in fused_attention]
        if layer == DENSE:
            names += [f"{stem}.mlp.{part}" for part in mlp]
        else:
            names += [f"{stem}.mlp.shared_experts.{part}" for part in mlp]
            names += [f"{stem}.mlp.gate", f"{stem}.mlp.experts", f"{stem}.mlp.experts.7.up_proj"]
    if wrapped:
        renamed = engine in ("vLLM", "SGLang")
        names += [f"mm_projector.{n}" for n in (("linear_1", "linear_2") if renamed else ("proj.0", "proj.2"))]
        names += [f"vision_tower.encoder.blocks.{i}.{n}" for i in (0, 11) for n in ("wqkv", "wo", "mlp.fc0", "mlp.fc1")]
    return names


def published_list(name: str) -> list[str]:
    """The exclude list of a release by NVIDIA, from its config.json."""
    config = json.loads((PUBLISHED_CONFIGS / f"nvidia--{name}_config.json").read_text())
    entries: list[str] = config["quantization_config"]["ignore"]
    return entries


LISTS: dict[str, list[str]] = {
    "ours": OURS,
    "ours, compressed-tensors": OURS_PACKED,
    "ModelOpt's style": _by_layer("model.", "lm_head"),
    "ModelOpt's style, K2.5": _by_layer("language_model.model.", "language_model.lm_head"),
    "legacy K2.5 names": _by_layer("language_model.", "language_model.lm_head"),
    "the source's list": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "literal": _literal("model.", "lm_head"),
    "literal, K2.5": _literal("language_model.model.", "language_model.lm_head"),
    "one expert": ["model.layers.5.mlp.experts.7.up_proj"],
    "one expert, K2.5": ["language_model.model.layers.5.mlp.experts.7.up_proj"],
    "layers.1*": [*OURS, "model.layers.1*"],
    "half of a fused layer": ["model.layers.0.mlp.gate_proj", "model.layers.5.self_attn.q_a_proj"],
    "mlp": ["*mlp*"],
    "no list": [],
    **{f"nvidia/{name}": published_list(name) for name in PUBLISHED},
}  # fmt: skip
