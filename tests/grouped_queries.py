"""A small checkpoint whose attention is not MLA but grouped queries."""

from pathlib import Path

import torch

from scripts.fixture_maker.folder import read_small, write_small


def with_grouped_queries(source: Path, folder: Path) -> Path:
    """The first two layers of the tiny checkpoint with random grouped-query attention: biases, norms of q and k."""
    generator = torch.Generator().manual_seed(0)
    checkpoint = read_small(source)
    left_out = ("self_attn", "model.layers.2", "model.layers.3")
    tensors = {n: value for n, value in checkpoint.tensors().items() if not any(part in n for part in left_out)}
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn"
        for name, rows in (("q", 128), ("k", 64), ("v", 64)):
            weight = torch.randn(rows, 256, generator=generator) / 16
            tensors[f"{stem}.{name}_proj.weight"] = weight.bfloat16()
            tensors[f"{stem}.{name}_proj.bias"] = torch.randn(rows, generator=generator).bfloat16()
        tensors[f"{stem}.o_proj.weight"] = (torch.randn(256, 128, generator=generator) / 11).bfloat16()
        for name in ("q_norm", "k_norm"):
            tensors[f"{stem}.{name}.weight"] = (1 + torch.randn(32, generator=generator) / 8).bfloat16()
    mla = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rope_theta")
    checkpoint.config = {key: value for key, value in checkpoint.config.items() if key not in (*mla, "rope_scaling")}
    checkpoint.config |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32, "attention_bias": True}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    checkpoint.config |= {"use_qk_norm": True, "rope_parameters": rope}
    checkpoint.shards = {"model-00001-of-000001.safetensors": tensors}
    write_small(checkpoint, folder)
    return folder
