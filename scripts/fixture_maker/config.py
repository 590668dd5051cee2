"""Builds config.json of both layouts and the small files that come with the weights."""

import json
from pathlib import Path
from typing import Any

from scripts.fixture_maker.inventory import K2Shape

# Sidecars must be copied and never run. Running one exits with an error.
_PYTHON_SIDECAR = (
    '"""Placeholder for {name} of the original repository."""\n\nraise SystemExit("{name} was executed")\n'
)
_TIKTOKEN = "".join(f"{token} {rank}\n" for rank, token in enumerate(["IQ==", "Ig==", "Iw==", "JA==", "IHRoZQ=="]))

K2_SIDECARS = {
    "chat_template.jinja": "{%- for message in messages %}<|im_{{ message.role }}|>{{ message.content }}{% endfor %}\n",
    "generation_config.json": '{\n  "eos_token_id": 163586,\n  "max_length": 262144\n}\n',
    "tiktoken.model": _TIKTOKEN,
    "tokenizer_config.json": '{\n  "model_max_length": 1000000000000000019884624838656,\n  "bos_token": "[BOS]"\n}\n',
    "LICENSE": "Modified MIT License\n\nPlaceholder for the original license text.\n",
    "THIRD_PARTY_NOTICES.md": "# Third-party notices\n\nPlaceholder for the original notices.\n",
    "configuration_deepseek.py": _PYTHON_SIDECAR.format(name="configuration_deepseek.py"),
    "modeling_deepseek.py": _PYTHON_SIDECAR.format(name="modeling_deepseek.py"),
    "tokenization_kimi.py": _PYTHON_SIDECAR.format(name="tokenization_kimi.py"),
}
K25_SIDECARS = K2_SIDECARS | {
    "preprocessor_config.json": '{\n  "patch_size": 14,\n  "merge_kernel_size": [2, 2]\n}\n',
    **{
        name: _PYTHON_SIDECAR.format(name=name)
        for name in (
            "configuration_kimi_k25.py",
            "modeling_kimi_k25.py",
            "kimi_k25_processor.py",
            "kimi_k25_vision_processing.py",
            "media_utils.py",
        )
    },
}


_PUBLISHED = Path(__file__).resolve().parents[2] / "tests" / "data" / "published-configs"


def published_config(name: str) -> dict[str, Any]:
    """Return config.json of a published checkpoint, "moonshotai/Kimi-K2.5" for example."""
    path = _PUBLISHED / f"{name.replace('/', '--')}_config.json"
    return json.loads(path.read_text(encoding="utf-8"))


QUANTIZATION_CONFIG: dict[str, Any] = published_config("moonshotai/Kimi-K2.5")["text_config"]["quantization_config"]


def complete_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a small K2 config with the fields that it lacks of the published ones, and with K2's positions."""
    published = published_config("moonshotai/Kimi-K2-Instruct")
    del published["torch_dtype"]  # older files have this in place of dtype
    del published["auto_map"]  # the tiny checkpoint has no code
    rope_scaling = published["rope_scaling"] | {"factor": 64.0}  # Kimi-K2-Thinking's
    return published | config | {"rope_scaling": rope_scaling, "max_position_embeddings": 262144}


def k2_config(shape: K2Shape) -> dict[str, Any]:
    """Return Kimi-K2-Thinking's config.json for a model of this shape. Other fields are Kimi-K2-Instruct's."""
    config = {
        "auto_map": published_config("moonshotai/Kimi-K2-Instruct")["auto_map"],
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "first_k_dense_replace": shape.dense_layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_intermediate,
        "kv_lora_rank": shape.kv_lora_rank,
        "moe_intermediate_size": shape.moe_intermediate,
        "n_routed_experts": shape.experts,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": min(8, shape.experts),
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_lora_rank,
        "qk_nope_head_dim": shape.qk_nope,
        "qk_rope_head_dim": shape.qk_rope,
        "quantization_config": QUANTIZATION_CONFIG,
        "rms_norm_eps": 1e-05,
        "v_head_dim": shape.v_head,
        "vocab_size": shape.vocabulary,
    }
    return complete_config(config)


def k25_config(text_config: dict[str, Any], *, vision: dict[str, int]) -> dict[str, Any]:
    """Wrap a language model's config as Kimi-K2.5 does: all of it, INT4 included, goes into text_config."""
    published = published_config("moonshotai/Kimi-K2.5")
    published["text_config"] |= text_config
    published["vision_config"] |= {"text_hidden_size": text_config["hidden_size"], **vision}
    return published


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, the form used in checkpoint folders."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_sidecars(folder: Path, sidecars: dict[str, str]) -> None:
    """Write the small text files of a checkpoint repository."""
    for name, text in sidecars.items():
        (folder / name).write_text(text, encoding="utf-8")
