"""Sources that other people made: what they are is said by its name, and with the remedy that helps."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import messages_of, run_here

from k2convert.models import FAMILIES, family_of
from scripts.fixture_maker.damage import edit_checkpoint, edit_json, edit_tensor
from scripts.fixture_maker.folder import SmallCheckpoint

Change = Callable[[Path], object]


@pytest.fixture
def source(cut: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut, tmp_path / "source"))


def method(name: str, suffixes: dict[str, torch.Tensor]) -> Change:
    """Experts as a tool stores them, under its quant_method."""

    def change(checkpoint: SmallCheckpoint) -> None:
        checkpoint.config["quantization_config"] = {"quant_method": name, "bits": 4}
        for shard, members in checkpoint.shards.items():
            others = {n: t for n, t in members.items() if ".experts." not in n}
            modules = {n.rpartition(".")[0] for n in members if ".experts." in n}
            quantized = {
                f"{module}.{suffix}": t.clone() for module in sorted(modules) for suffix, t in suffixes.items()
            }
            checkpoint.shards[shard] = others | quantized

    return lambda folder: edit_checkpoint(folder, change)


def int_quantized(folder: Path) -> None:
    method("compressed-tensors", {"weight": torch.ones(8, 8).char(), "weight_scale": torch.ones(8, 1)})(folder)
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(format="int-quantized"))


def drop_experts(checkpoint: SmallCheckpoint, count: int, *, numbers: Callable[[int], int], rows: bool = True) -> None:
    """Keep the first experts, under other numbers, and their rows of the router."""
    for shard, members in checkpoint.shards.items():
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in members.items():
            stem, is_expert, rest = name.partition(".experts.")
            number, _, end = rest.partition(".")
            if is_expert and int(number) < count:
                tensors[f"{stem}.experts.{numbers(int(number))}.{end}"] = tensor
            elif not is_expert:
                tensors[name] = tensor[:count].clone() if rows and ".mlp.gate." in name else tensor
        checkpoint.shards[shard] = tensors


def pruned(**options: Any) -> Change:
    return lambda folder: edit_checkpoint(folder, lambda c: drop_experts(c, 3, **options))


PACKED = {"qweight": torch.ones(8, 8).int(), "qzeros": torch.ones(1, 8).int(), "scales": torch.ones(1, 8).half()}
FP8 = {"weight": torch.ones(8, 8).char(), "weight_scale_inv": torch.ones(8, 1).to(torch.float8_e4m3fn)}


def nameless(folder: Path) -> None:
    method("gptq", PACKED)(folder)
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))


def as_bytes(folder: Path) -> None:
    def change(checkpoint: SmallCheckpoint) -> None:
        for name, tensor in checkpoint.tensors().items():
            if name.endswith(".weight_packed"):
                checkpoint.replace(name, tensor.view(torch.uint8))

    edit_checkpoint(folder, change)


def as_gguf(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink()
    (folder / "Kimi-K2-Q4_K_M.gguf").write_bytes(b"GGUF")


DIAGNOSES: dict[str, tuple[Change, str]] = {
    "awq": (method("awq", PACKED), "quant_method is 'awq', which is not converted"),
    "gptq": (method("gptq", PACKED), "quant_method is 'gptq', which is not converted"),
    "w4afp8": (method("w4afp8", FP8), "quant_method is 'w4afp8', which is not converted"),
    "w4a8": (method("w4a8", FP8), "quant_method is 'w4a8', which is not converted"),
    "int8": (method("int8", FP8), "quant_method is 'int8', which is not converted"),
    "gptq that config.json does not name": (nameless, "nothing is INT4 (experts have qweight, qzeros, scales)"),
    "codes of INT4 as bytes": (as_bytes, "weight_packed is U8, and its scales are those of neither NVFP4 nor MXFP4."),
    "weights in GGUF": (as_gguf, "or this is not a safetensors checkpoint (there is Kimi-K2-Q4_K_M.gguf)"),
    "integers of compressed-tensors": (int_quantized, "config.json says 'int-quantized'"),
    "fewer experts": (pruned(numbers=int), "Set n_routed_experts to 3 in config.json."),
    "gaps between experts": (
        pruned(numbers=lambda i: 5 * i),
        "Renumber the experts of each layer 0..2 in the order of the router's rows, and set n_routed_experts to 3",
    ),
    "experts without their shard": (pruned(numbers=int, rows=False), "hf download"),
    "early names": (
        lambda folder: edit_checkpoint(folder, early_names),
        "tensors are named language_model.layers.*, an early naming. Engines rename them",
    ),
}


def early_names(checkpoint: SmallCheckpoint) -> None:
    for shard, members in checkpoint.shards.items():
        new = {n.replace("model.layers.", "language_model.layers."): t for n, t in members.items()}
        checkpoint.shards[shard] = new


@pytest.mark.parametrize("name", DIAGNOSES)
def test_a_diagnosis_names_what_is_there_and_what_helps(name: str, source: Path, tmp_path: Path) -> None:
    change, words = DIAGNOSES[name]
    change(source)
    message = messages_of(run_here("run", source, tmp_path / "out", "--dry-run", code=1).stderr)
    assert words in message
    assert "a BF16 copy?" not in message
    assert ("hf download" in message) == (words == "hf download" or name == "weights in GGUF")


def test_packed_codes_as_i8_convert_as_those_of_u8(k3_tiny: Path, tmp_path: Path) -> None:
    def as_i8(checkpoint: SmallCheckpoint) -> None:
        for name, tensor in checkpoint.tensors().items():
            if name.endswith(".weight_packed"):
                checkpoint.replace(name, tensor.view(torch.int8))

    source = Path(shutil.copytree(k3_tiny, tmp_path / "source"))
    edit_checkpoint(source, as_i8)
    for folder, out in ((source, tmp_path / "signed"), (k3_tiny, tmp_path / "plain")):
        run_here("run", folder, out, "--quiet", code=0)
        run_here("validate", out, "--source", folder, code=0)
    assert "MXFP4" in run_here("inspect", source, code=0).stdout
    for shard in (tmp_path / "plain").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "signed" / shard.name).read_bytes()


SCHEME = {"dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["k_proj.k_scale", "k_scale", "k_proj.output_scale"])
def test_scales_of_a_cache_are_copied_and_a_lost_scheme_is_said_with_what_keeps_it(
    name: str, source: Path, tmp_path: Path
) -> None:
    def add(checkpoint: SmallCheckpoint) -> None:
        for members in checkpoint.shards.values():
            stems = [n.removesuffix("o_proj.weight") for n in members if n.endswith(".o_proj.weight")]
            names = [f"{stem}{part}" for stem in stems for part in (name, name.replace("k_", "v_"))]
            members |= {n: torch.tensor(0.25, dtype=torch.bfloat16) for n in names}

    edit_checkpoint(source, add)
    edit_json(source / "config.json", lambda c: c["quantization_config"].update(kv_cache_scheme=SCHEME))
    out = tmp_path / "out"
    lost = "declares a KV cache in FP8, and the result will not: "
    assert f"{lost}--set kv_cache=fp8 keeps it" in run_here("run", source, out, "--dry-run", code=0).stderr
    packed = run_here("run", source, out, "--layout", "compressed-tensors", "--dry-run", code=0)
    assert f"{lost}serve with --kv-cache-dtype fp8" in packed.stderr
    shown = run_here("run", source, out, "--set", "kv_cache=fp8", code=0)
    assert "KV cache" not in shown.stderr
    shown = run_here("validate", out, "--source", source, code=0, COLUMNS="200")
    assert "2 layers with scales of an FP8 cache" in shown.stdout
    assert "rule 15 warn" not in shown.stdout
    edit_tensor(out, f"model.layers.0.self_attn.{name}", lambda _: None)
    edit_tensor(out, f"model.layers.0.self_attn.{name.replace('k_', 'v_')}", lambda _: None)
    assert "engines use 1.0 in 1 layer" in run_here("validate", out).stdout


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, ("--set", "target=bf16"), "FP8, and the result will not: serve with --kv-cache-dtype fp8"),
        ({"type": "int"}, (), "INT8, and the result will not: no option keeps it"),
        ({"dynamic": True}, (), "dynamic FP8, and the result will not: no option keeps it"),
        ({"num_bits": 4}, ("--set", "target=bf16"), "FP4, and the result will not: no option keeps it"),
    ],
)
def test_a_cache_that_is_lost_is_named_by_its_form(
    change: dict[str, object], options: tuple[str, ...], words: str, source: Path, tmp_path: Path
) -> None:
    edit_json(source / "config.json", lambda c: c["quantization_config"].update(kv_cache_scheme=SCHEME | change))
    shown = run_here("run", source, tmp_path / "out", "--dry-run", *options, code=0).stderr
    assert f"declares a KV cache in {words}" in shown
    cache = "fp8" if "FP8" in words else "bf16"
    assert f"KV cache in {cache}\n" in run_here("fit", source, code=0).stdout


def test_the_family_follows_from_tensors_and_config() -> None:
    """Experts tell K3 from K2; model_type, or else the prefix, tells K2.5 from K2-Thinking."""
    by_name = {family.name: family for family in FAMILIES}
    experts = {
        "kimi-k3": "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight",
        "kimi-k2.5": "language_model.model.layers.1.mlp.experts.0.up_proj.weight",
        "kimi-k2-thinking": "model.layers.1.mlp.experts.0.up_proj.weight",
    }
    for name, tensor in experts.items():
        for config in ({}, None, {"model_type": "something"}, {"text_config": {}}):
            assert family_of(config, [tensor]) is by_name[name]
        assert family_of({"model_type": by_name[name].model_types[0]}, []) is by_name[name]
    assert family_of({"model_type": "kimi_k25"}, [experts["kimi-k3"]]) is by_name["kimi-k3"]
    assert family_of({"model_type": "kimi_k25"}, [experts["kimi-k2-thinking"]]) is by_name["kimi-k2.5"]
    assert family_of(None, ["language_model.layers.1.mlp.experts.0.up_proj.weight"]) is by_name["kimi-k2.5"]
