"""Checkpoints as other tools write them: changes of a result of our own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from converted import Converted, Kind, copy_of

from scripts.fixture_maker import damage
from scripts.fixture_maker.folder import SmallCheckpoint

MODELOPT = Kind("modelopt", "k2.5", "w4a4")
PACKED = Kind("compressed-tensors", "k2.5", "w4a4")
K3 = Kind("modelopt", "k3", "w4a4")
Change = Callable[[Path], object]
F8 = torch.float8_e4m3fn


def foreign(converted: Converted, folder: Path) -> Converted:
    """A copy without all that k2convert writes beside a checkpoint."""
    copied = copy_of(converted, folder)
    (copied.folder / "k2convert.json").unlink()
    shutil.rmtree(copied.folder / ".k2convert")
    if converted.kind.layout == "modelopt":
        quantization(lambda q: q.update(producer={"name": "modelopt", "version": "0.47"}))(copied.folder)
    return copied


def quantization(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: damage.edit_json(folder / "config.json", lambda c: change(c["quantization_config"]))


def in_both(change: Callable[[dict[str, Any], str], object]) -> Change:
    """Change the same lists in both configs; the second argument is the name of the exclude list."""

    def edit(folder: Path) -> None:
        quantization(lambda q: change(q, "ignore"))(folder)
        path = folder / "hf_quant_config.json"
        if path.exists():
            damage.edit_json(path, lambda document: change(document["quantization"], "exclude_modules"))

    return edit


def tensors(change: Callable[[str, torch.Tensor], dict[str, torch.Tensor] | None]) -> Change:
    """Replace tensors of a checkpoint by those that `change` returns for a name and a tensor; None keeps it."""

    def edit(checkpoint: SmallCheckpoint) -> None:
        for shard, members in checkpoint.shards.items():
            edited: dict[str, torch.Tensor] = {}
            for name, tensor in members.items():
                new = change(name, tensor)
                edited |= {name: tensor} if new is None else new
            checkpoint.shards[shard] = edited

    return lambda folder: damage.edit_checkpoint(folder, edit)


def is_attention(name: str) -> bool:
    return ".self_attn." in name and name.endswith(("_proj.weight", "_with_mqa.weight"))


def fp8_blocks(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """ModelOpt's FP8_PB_WO: F32 scales of blocks of 128 x 128, max |w| / 448, with four dimensions."""
    if not is_attention(name) or len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape
    padded = torch.nn.functional.pad(tensor.float(), (0, -columns % 128, 0, -rows % 128))
    scale = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).abs().amax(dim=(1, 3)) / 448
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {name: (padded / spread).to(F8)[:rows, :columns].clone(), f"{name}_scale": scale[:, None, :, None].clone()}


def channels(dtype: torch.dtype, largest: int) -> Change:
    """Attention but for kv_b_proj in FP8 or INT8, with a scale for each output channel."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not is_attention(name) or "kv_b_proj" in name:
            return None
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / largest
        return {name: (tensor.float() / scale).to(dtype), f"{name}_scale": scale}

    return tensors(change)


def nvidia_k3(folder: Path) -> None:
    """nvidia/Kimi-K3-NVFP4: attention in FP8_PB_WO, listed in the map beside the banks, not excluded."""
    tensors(fp8_blocks)(folder)
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    linears = {name.rpartition(".")[0] for name in names if is_attention(name)}
    entries = {name: {"quant_algo": "FP8_PB_WO"} for name in sorted(linears)}

    def change(config: dict[str, Any], excludes: str) -> None:
        config["quantized_layers"] = entries | config["quantized_layers"]
        config[excludes].remove("*self_attn*")

    in_both(change)(folder)
    group = {"quant_algo": "FP8_PB_WO", "targets": sorted(linears)}
    quantization(lambda q: q["config_groups"].update(group_1=group))(folder)


def mixed_precision(folder: Path) -> None:
    """unsloth's form: experts in NVFP4 and attention in FP8 per channel, both by regular expressions."""
    channels(F8, 448)(folder)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}

    def change(config: dict[str, Any]) -> None:
        experts = config["config_groups"]["group_0"]
        experts |= {"format": config["format"], "targets": [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"]}
        attention = {"format": "float-quantized", "weights": weights, "input_activations": inputs}
        attention["targets"] = [
            r"re:.*self_attn\.(fused_qkv_a_proj(_with_mqa)?|q_a_proj|kv_a_proj_with_mqa|q_b|o_proj)"
        ]
        config["config_groups"]["group_1"] = attention
        config["format"] = "mixed-precision"
        config["ignore"] = ["re:.*kv_b_proj$", *(entry for entry in config["ignore"] if "self_attn" not in entry)]

    quantization(change)(folder)


def nvfp4_of(*endings: str) -> Change:
    """NVFP4 in modules that k2convert leaves in BF16, and their names out of the exclude lists."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not name.endswith(tuple(f"{ending}.weight" for ending in endings)):
            return None
        rows, columns = tensor.shape
        blocks = tensor.float().reshape(rows, columns // 16, 16)
        scales = (blocks.abs().amax(dim=2) / 6 * 1024).to(F8)
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        sizes = (blocks.abs() / (scales.float() / 1024).clamp(min=1e-9)[..., None])[..., None]
        codes = (sizes - grid).abs().argmin(dim=-1) + 8 * (blocks < 0)
        codes = codes.reshape(rows, columns // 2, 2).to(torch.uint8)
        return {
            name: codes[..., 0] | codes[..., 1] << 4,
            f"{name}_scale": scales,
            f"{name}_scale_2": torch.tensor(1 / 1024),
        }

    def lists(config: dict[str, Any], excludes: str) -> None:
        parts = ("_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "lm_head")
        patterns = [f"*{part}*" for part in parts if part not in endings]
        config[excludes] = [e for e in config[excludes] if "self_attn" not in e and "lm_head" not in e] + patterns

    def edit(folder: Path) -> None:
        tensors(change)(folder)
        in_both(lists)(folder)

    return edit


def kv_scales(suffix: str, *, declared: bool = True) -> Change:
    """Scales of an FP8 KV cache in each layer, under one tool's names."""

    def add(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not name.endswith(".self_attn.o_proj.weight"):
            return None
        stem = name.removesuffix("o_proj.weight")
        names = [suffix.format(kind) for kind in "kv"]
        return {name: tensor} | {f"{stem}{part}": torch.tensor(0.5) for part in names}

    def edit(folder: Path) -> None:
        tensors(add)(folder)
        if declared:
            scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
            quantization(lambda q: q.update(kv_cache_scheme=scheme))(folder)
            damage.edit_json(
                folder / "hf_quant_config.json", lambda d: d["quantization"].update(kv_cache_quant_algo="FP8")
            )

    return edit


def other_cache(algorithm: str, bits: int, kind: str, *, dynamic: bool = False) -> Change:
    """Scales of a KV cache that is not FP8, or whose own scales are computed while serving."""

    def edit(folder: Path) -> None:
        kv_scales("{0}_proj.{0}_scale")(folder)
        quantization(lambda q: q["kv_cache_scheme"].update(num_bits=bits, type=kind, dynamic=dynamic))(folder)
        damage.edit_json(
            folder / "hf_quant_config.json", lambda d: d["quantization"].update(kv_cache_quant_algo=algorithm)
        )

    return edit


def shared(dtype: torch.dtype) -> Change:
    """Shared experts in INT8 with a scale for each row, or in MXFP4."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if ".shared_experts." not in name or not name.endswith(".weight"):
            return None
        rows, columns = tensor.shape
        if dtype is torch.int8:
            return {name: torch.ones(rows, columns, dtype=dtype), f"{name}_scale": torch.ones(rows, 1)}
        scales = torch.full((rows, columns // 32), 120, dtype=dtype)
        return {f"{name}_packed": torch.full((rows, columns // 2), 17, dtype=dtype), f"{name}_scale": scales}

    return tensors(change)


def integers(part: str) -> Change:
    """The matrices of a part in INT8, with a scale for each row."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if part not in name or not name.endswith(".weight") or len(tensor.shape) != 2:
            return None
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        return {name: (tensor.float() / scale).to(torch.int8), f"{name}_scale": scale}

    return tensors(change)


def packed_integers(part: str) -> Change:
    """The matrices of a part in INT4, as compressed-tensors packs them."""

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if part not in name or not name.endswith(".weight") or len(tensor.shape) != 2 or tensor.shape[1] % 32:
            return None
        rows, columns = tensor.shape
        scales = torch.ones(rows, columns // 32, dtype=torch.bfloat16)
        codes = torch.ones(rows, columns // 8, dtype=torch.int32)
        return {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_shape": torch.tensor([rows, columns])}

    return tensors(change)


def one_kind(kind: str) -> Change:
    """Scales of keys or of values alone."""

    def edit(folder: Path) -> None:
        kv_scales("{0}_scale")(folder)
        tensors(lambda name, _: {} if name.endswith("_scale") and name.endswith(kind) else None)(folder)

    return edit


def declared_in(*configs: str) -> Change:
    """An FP8 KV cache that only some configs declare."""

    def edit(folder: Path) -> None:
        if "config.json" in configs:
            quantization(lambda q: q.update(kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"}))(folder)
        algorithm = "FP8" if "hf_quant_config.json" in configs else None
        damage.edit_json(
            folder / "hf_quant_config.json", lambda d: d["quantization"].update(kv_cache_quant_algo=algorithm)
        )

    return edit


def config_beside(folder: Path) -> None:
    """ModelOpt's form of 2025: nothing in config.json."""
    damage.edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))


def flat_config(folder: Path) -> None:
    quantization(lambda q: (q.pop("config_groups"), q.update(quant_method="modelopt_fp4")))(folder)
    (folder / "hf_quant_config.json").unlink()


def other_habits(folder: Path) -> None:
    """What engines do not read: the size in the index, a left-over file, versions, and how files were saved."""
    damage.edit_json(folder / "model.safetensors.index.json", lambda index: index["metadata"].update(total_size=1.0))
    (folder / "model.safetensors.part").write_bytes(b"")
    damage.edit_config(folder, transformers_version="5.0.0", use_cache=False)
    (folder / "modeling_extra.py").write_text("")
    damage.edit_json(folder / "hf_quant_config.json", lambda d: d["quantization"].pop("kv_cache_quant_algo"))


def plain_k3(folder: Path) -> None:
    def change(config: dict[str, Any], _: str) -> None:
        del config["quantized_layers"]
        config["quant_algo"] = "NVFP4"

    in_both(change)(folder)
    quantization(
        lambda q: (q["config_groups"]["group_0"].update(targets=["Linear"]), q.update(quant_method="modelopt"))
    )(folder)


def runs_of_names(folder: Path) -> None:
    """Entries without wildcards: vLLM and SGLang find them inside a name, TensorRT-LLM compares whole names."""
    in_both(lambda q, excludes: q.update({excludes: [entry.strip("*") for entry in q[excludes]]}))(folder)
