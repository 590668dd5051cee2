"""Wraps a small K2 checkpoint in K2.5's form: the same language model beside a vision tower.

Names, prefixes, nesting of the config and order of shards are those of moonshotai/Kimi-K2.5. The vision tower and the
projector are small and random. vision_config has the sizes in both spellings, the Hub's (vt_*) and transformers', since
engines that know only the latter take the real tower's sizes otherwise.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from scripts.fixture_maker.config import write_json
from scripts.fixture_maker.folder import SmallCheckpoint, read_small, write_small
from scripts.fixture_maker.layouts import k25_shards

HIDDEN = 64
INNER = 128
BLOCKS = 2
HEADS = 4


def wrap_k25(source: Path, out: Path) -> Path:
    """Write the wrapped checkpoint; a finished one is kept."""
    if (out / "preprocessor_config.json").exists():
        return out
    shutil.rmtree(out, ignore_errors=True)
    checkpoint = read_small(source)
    text = checkpoint.config
    shards = k25_shards(checkpoint, HIDDEN, INNER, BLOCKS, positions=64)
    write_small(SmallCheckpoint(_config(text), shards, source), out)
    write_json(out / "preprocessor_config.json", {"media_proc_cfg": _media()})
    return out


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
