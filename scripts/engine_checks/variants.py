"""The checkpoints that engines load: layouts, activation modes, rules and forms of the tiny ones.

Copies of the small Kimi K3 have one defect each, which the checks must find.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from safetensors.torch import load_file, save_file

from scripts.fixture_maker.config import write_json
from scripts.fixture_maker.folder import SmallCheckpoint, read_small, write_small
from scripts.fixture_maker.k3 import make_k3_tiny
from scripts.fixture_maker.layouts import k25_shards
from scripts.fixture_maker.shards import INDEX_NAME

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "k2-tiny"
K2 = "K2"
K25 = "K2.5"
K3 = "K3"
COMPRESSED_TENSORS = "compressed-tensors"
MSE = "mse"
WEIGHT_ONLY = "w4a16"
RULES = (MSE, "max")
RENAMED = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale_2"
BANK_MISSING = "bank-missing"
TENSOR_RENAMED = "tensor-renamed"
NOT_REACHED = """
Kimi K3 is loaded only. Its attention (KDA and MLA) and the experts' kernels with SiTU need a GPU. So does what vLLM
makes of kv_b_proj, and what SGLang makes for Marlin (W4A16). TensorRT-LLM has no wheel for CPUs: only its function that
reads exclude lists is run, by `python -m scripts.engine_checks.questions`.
"""
# What an engine says, or which check fails. SGLang skips a name that it does not know.
FOUND_BY = {
    ("vllm-0.33", BANK_MISSING): "not supported for unquantized MoE",
    ("vllm-0.33", TENSOR_RENAMED): f"KeyError: .*w13_{RENAMED.rsplit('.', 1)[1]}_renamed",
    ("sglang", BANK_MISSING): r"RuntimeError: The size of tensor a \(256\) must match the size of tensor b \(128\)",
    ("sglang", TENSOR_RENAMED): "every part of every expert was written once: 143 of 144",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of converted checkpoint."""

    form: str
    layout: str
    activations: str
    rule: str

    @property
    def name(self) -> str:
        return "-".join((self.form, self.layout, self.activations, self.rule)).lower()


VARIANTS = tuple(
    Variant(form, layout, activations, rule)
    for form, layout, activations, rule in product(
        (K2, K25, K3), ("modelopt", COMPRESSED_TENSORS), ("w4a4", WEIGHT_ONLY), RULES
    )
    if form != K3 or rule == MSE
)


def wrap_k25(source: Path, out: Path) -> Path:
    """Write a small K2 checkpoint in the form of moonshotai/Kimi-K2.5: its language model beside a vision tower.

    Tower and projector are small and random. k25.json has the tower's sizes in both spellings, the Hub's (vt_*) and
    transformers', since engines that know only the latter take the real tower's sizes otherwise. A finished checkpoint
    is kept.
    """
    if (out / "preprocessor_config.json").exists():
        return out
    shutil.rmtree(out, ignore_errors=True)
    checkpoint = read_small(source)
    form = json.loads(Path(__file__).with_name("k25.json").read_text(encoding="utf-8"))
    vision = form["config"]["vision_config"]
    vision["text_hidden_size"] = checkpoint.config["hidden_size"]
    form["config"]["text_config"] = checkpoint.config
    sizes = (vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["vt_num_hidden_layers"])
    shards = k25_shards(checkpoint, *sizes, positions=vision["init_pos_emb_height"])
    write_small(SmallCheckpoint(form["config"], shards, source), out)
    write_json(out / "preprocessor_config.json", form["preprocessor_config"])
    return out


def convert(variant: Variant, folder: Path) -> Path:
    """Run `k2convert run`; a finished result is kept."""
    source = TINY
    destination = folder / variant.name
    if variant.form == K25:
        source = wrap_k25(TINY, folder / "k2.5-int4")
    elif variant.form == K3:
        source = folder / "k3-mxfp4"
        if not (source / "config.json").exists():
            make_k3_tiny(source)
    options = ["--layout", variant.layout, "--activations", variant.activations, "--rule", variant.rule]
    command = [sys.executable, "-m", "k2convert", "run", str(source), str(destination), "--json", *options]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return destination


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
        write_json(out / "config.json", config)
        write_json(out / "hf_quant_config.json", stated)
    else:
        index = json.loads((out / INDEX_NAME).read_text(encoding="utf-8"))
        shard = index["weight_map"].pop(RENAMED)
        tensors = load_file(out / shard)
        tensors[f"{RENAMED}_renamed"] = tensors.pop(RENAMED)
        save_file(tensors, out / shard, metadata={"format": "pt"})
        index["weight_map"][f"{RENAMED}_renamed"] = shard
        write_json(out / INDEX_NAME, index)
    return out
