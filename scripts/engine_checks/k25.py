"""Wraps a small K2 checkpoint in K2.5's form: the same language model beside a vision tower.

Names, prefixes, nesting of the config and order of shards are those of moonshotai/Kimi-K2.5. The vision tower and the
projector are small and random. vision_config has the sizes in both spellings, the Hub's (vt_*) and transformers', since
engines that know only the latter take the real tower's sizes otherwise.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN = 64
INNER = 128
BLOCKS = 2
HEADS = 4
INDEX = "model.safetensors.index.json"


def wrap_k25(source: Path, out: Path) -> Path:
    """Write the wrapped checkpoint, config last; a finished one is kept."""
    if (out / "config.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name not in ("config.json", INDEX):
            shutil.copy(file, out)
    text = json.loads((source / "config.json").read_text(encoding="utf-8"))
    shards = [_prefixed(load_file(shard)) for shard in sorted(source.glob("*.safetensors"))]
    generator = torch.Generator().manual_seed(0)
    shards += [_projector(text["hidden_size"], generator), _tower(generator)]
    index: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):06}.safetensors"
        save_file(tensors, out / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    size = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    _write(out / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    _write(out / "preprocessor_config.json", {"media_proc_cfg": _media()})
    _write(out / "config.json", _config(text))
    return out


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def _small(generator: torch.Generator, *shape: int) -> Tensor:
    return (torch.randn(shape, generator=generator) * 0.02).bfloat16()


def _linear(name: str, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {f"{name}.weight": _small(generator, rows, columns), f"{name}.bias": _small(generator, rows)}


def _norm(name: str, generator: torch.Generator) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16), f"{name}.bias": _small(generator, HIDDEN)}


def _tower(generator: torch.Generator) -> dict[str, Tensor]:
    tensors = {
        "vision_tower.patch_embed.proj.weight": _small(generator, HIDDEN, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": _small(generator, HIDDEN),
        "vision_tower.patch_embed.pos_emb.weight": _small(generator, 64, 64, HIDDEN),
        **_norm("vision_tower.encoder.final_layernorm", generator),
    }
    for number in range(BLOCKS):
        block = f"vision_tower.encoder.blocks.{number}"
        tensors |= _norm(f"{block}.norm0", generator) | _norm(f"{block}.norm1", generator)
        tensors |= _linear(f"{block}.wqkv", 3 * HIDDEN, HIDDEN, generator)
        tensors |= _linear(f"{block}.wo", HIDDEN, HIDDEN, generator)
        tensors |= _linear(f"{block}.mlp.fc0", INNER, HIDDEN, generator)
        tensors |= _linear(f"{block}.mlp.fc1", HIDDEN, INNER, generator)
    return tensors


def _projector(text_hidden: int, generator: torch.Generator) -> dict[str, Tensor]:
    merged = 4 * HIDDEN
    return (
        _norm("mm_projector.pre_norm", generator)
        | _linear("mm_projector.proj.0", merged, merged, generator)
        | _linear("mm_projector.proj.2", text_hidden, merged, generator)
    )


def _config(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": 5,
        "image_token_id": 5,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "projection_hidden_size": HIDDEN,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": text,
        "vision_config": _vision(text["hidden_size"]),
    }


def _vision(text_hidden: int) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS,
        "pos_emb_height": 64, "pos_emb_width": 64, "pos_emb_time": 4,
        "vt_hidden_size": HIDDEN, "vt_intermediate_size": INNER, "vt_num_hidden_layers": BLOCKS,
        "vt_num_attention_heads": HEADS, "init_pos_emb_height": 64, "init_pos_emb_width": 64, "init_pos_emb_time": 4,
        "patch_size": 14, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "pos_emb_type": "divided_fixed",
        "mm_hidden_size": HIDDEN, "mm_projector_type": "patchmerger", "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5, "text_hidden_size": text_hidden, "video_attn_type": "spatial_temporal",
    }  # fmt: skip


def _media() -> dict[str, Any]:
    return {
        "in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 4096, "in_patch_limit_video": None, "sample_fps": 2.0,
        "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
    }  # fmt: skip
