"""The small Kimi K3, and copies of a result with one defect each, which the checks must find."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from scripts.fixture_maker.k3 import make_k3_tiny

INDEX = "model.safetensors.index.json"
RENAMED = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale_2"
BANK_MISSING = "bank-missing"
TENSOR_RENAMED = "tensor-renamed"
NOT_REACHED = """
Kimi K3 is loaded only. Its attention (KDA and MLA) and the experts' kernels with SiTU need a GPU. So does what vLLM
makes of kv_b_proj, and what SGLang makes for Marlin (W4A16). TensorRT-LLM has no wheel for CPUs: only its function that
reads exclude lists is run, by `python -m scripts.engine_matchers`.
"""
# What an engine says, or which check fails. SGLang skips a name that it does not know.
FOUND_BY = {
    ("vllm-0.33", BANK_MISSING): "not supported for unquantized MoE",
    ("vllm-0.33", TENSOR_RENAMED): f"KeyError: .*w13_{RENAMED.rsplit('.', 1)[1]}_renamed",
    ("sglang", BANK_MISSING): r"RuntimeError: The size of tensor a \(256\) must match the size of tensor b \(128\)",
    ("sglang", TENSOR_RENAMED): "every part of every expert was written once: 143 of 144",
}


def k3_source(out: Path) -> Path:
    """Write the fixture k3-tiny; a finished one is kept."""
    return out if (out / "config.json").exists() else make_k3_tiny(out)


def copy_with_defect(checkpoint: Path, defect: str) -> Path:
    """Write a copy of a result in layout modelopt, next to it: without layer 1's experts in the config, or with one
    tensor under another name."""
    out = checkpoint.with_name(f"{checkpoint.name}-{defect}")
    shutil.copytree(checkpoint, out, dirs_exist_ok=True)
    if defect == BANK_MISSING:
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        stated = json.loads((out / "hf_quant_config.json").read_text(encoding="utf-8"))
        for layers in (config["quantization_config"]["quantized_layers"], stated["quantization"]["quantized_layers"]):
            for name in [name for name in layers if "layers.1." in name]:
                del layers[name]
        _write(out / "config.json", config)
        _write(out / "hf_quant_config.json", stated)
    else:
        index = json.loads((out / INDEX).read_text(encoding="utf-8"))
        shard = index["weight_map"].pop(RENAMED)
        tensors = load_file(out / shard)
        tensors[f"{RENAMED}_renamed"] = tensors.pop(RENAMED)
        save_file(tensors, out / shard, metadata={"format": "pt"})
        index["weight_map"][f"{RENAMED}_renamed"] = shard
        _write(out / INDEX, index)
    return out


def _write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
