"""Kimi K3 from folder to folder: values proven by both libraries, configs as documented, killed, in parts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run_here
from library_decoders import create_decoder, decoded_otherwise
from results import digest_of_shards, read_json
from safetensors.torch import load_file
from weight_makers import library_values

from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from scripts.fixture_maker.damage import edit_checkpoint, edit_json
from scripts.fixture_maker.folder import SmallCheckpoint

MOE = "language_model.model.layers.{}.block_sparse_moe"
BANKS = [
    f"{prefix}layers.{layer}.{moe}.experts"
    for prefix in ("language_model.model.", "model.", "")
    for layer in (1, 2, 3)
    for moe in ("block_sparse_moe", "mlp")
]
EXCLUDES = [
    "*self_attn*", "*shared_experts*", "*layers.0.mlp*", "*lm_head*", "*block_sparse_moe.gate", "*mlp.gate",
    "*routed_expert_down_proj", "*routed_expert_up_proj", "*_res_proj", "*vision_tower*", "*mm_projector*",
]  # fmt: skip
IGNORES = [
    "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*layers\\.0\\.mlp.*", "re:.*lm_head.*",
    "re:.*block_sparse_moe\\.gate$", "re:.*mlp\\.gate$", "re:.*routed_expert_down_proj$", "re:.*routed_expert_up_proj$",
    "re:.*_res_proj$", "re:.*vision_tower.*", "re:.*mm_projector.*",
]  # fmt: skip


@pytest.fixture(scope="module")
def result(k3_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("k3") / "result"
    run_here("run", k3_tiny, folder, "--device", "cpu", code=0)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("activations", ["w4a4", "w4a16"])
def test_every_value_is_the_sources(layout: str, activations: str, k3_tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_here("run", k3_tiny, out, "--layout", layout, "--activations", activations, "--device", "cpu", code=0)
    assert "cast: 36 of 36 tensors were converted without loss.\n" in done.stdout
    assert "0.00000" not in done.stdout, "nothing is 0"
    before = tensors_of(k3_tiny)
    after = tensors_of(out)
    decode = create_decoder(layout)
    codes, scale = ("weight", "weight_scale_2") if layout == "modelopt" else ("weight_packed", "weight_global_scale")
    inputs = {"modelopt": "input_scale", "compressed-tensors": "input_global_scale"}[layout]
    modules = [name.removesuffix(".weight_packed") for name in before if name.endswith(".weight_packed")]
    assert len(modules) == 36
    for module in modules:
        source = Mxfp4Weight(before[f"{module}.weight_packed"].numpy(), before[f"{module}.weight_scale"].numpy())
        assert torch.equal(after[f"{module}.{codes}"], before[f"{module}.weight_packed"])
        blocks = after[f"{module}.weight_scale"].view(torch.uint8).numpy()
        values = decode(after[f"{module}.{codes}"].numpy(), blocks, float(after[f"{module}.{scale}"]))
        assert torch.equal(values.float(), library_values(source).float())
        assert (f"{module}.{inputs}" in after) == (activations == "w4a4")
    copied = {name for name in before if name.rpartition(".")[0] not in modules}
    assert len(copied) == 124
    for name in copied:
        assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8))
    validated = json.loads(run_here("validate", out, "--source", k3_tiny, "--json", code=0).stdout)
    assert {rule["verdict"] for rule in validated["contract"]["rules"]} == {"pass"}
    assert decoded_otherwise(out)[1] == []


def test_the_bytes_do_not_change_by_accident(result: Path) -> None:
    assert digest_of_shards(result) == "296c6e7d2d130bf0d032d9fdfbf14fd5"


def test_configs_declare_every_bank_under_six_names(result: Path, k3_tiny: Path) -> None:
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    layers = {bank: {"quant_algo": "NVFP4", "group_size": 16} for bank in sorted(BANKS)}
    config = read_json(result)
    source = read_json(k3_tiny)
    declared = config.pop("quantization_config")
    del declared["producer"]
    assert declared == {
        "config_groups": {"group_0": {"input_activations": scheme, "weights": scheme, "targets": sorted(BANKS)}},
        "quantized_layers": layers,
        "ignore": EXCLUDES,
        "quant_algo": "MIXED_PRECISION",
        "group_size": 16,
        "quant_method": "modelopt_mixed",
    }
    del source["text_config"]["quantization_config"]
    assert config == source
    assert read_json(result, "hf_quant_config.json")["quantization"] == {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "quantized_layers": layers,
        "exclude_modules": EXCLUDES,
    }


def test_the_other_layout_ignores_the_same_modules(k3_tiny: Path, tmp_path: Path) -> None:
    run_here("run", k3_tiny, tmp_path / "out", "--layout", "compressed-tensors", "--quiet", code=0)
    declared = read_json(tmp_path / "out")["quantization_config"]
    assert (declared["ignore"], declared["format"]) == (IGNORES, "nvfp4-pack-quantized")
    assert declared["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


@pytest.mark.slow
def test_edges_are_counted_and_named(k3_edges: Path, tmp_path: Path) -> None:
    """Spreads of 18 and 30 octaves are below the window, those of 15 and 17 have subnormal scales."""
    output = run_here("run", k3_edges, tmp_path / "out", "--device", "cpu", code=0).stdout
    words = "27 of 36 tensors were converted without loss; 9 had codes rounded in"
    assert words in output
    total = read_json(tmp_path / "out", "k2convert.json")["totals"]["total"]
    assert (total["below_window_tensors"], total["subnormal_tensors"]) == (9, 9)
    assert "lossless_tensors" not in total
    assert (total["cast_tensors"], total["min_source_byte"], total["max_source_byte"]) == (36, 0, 252)
    validated = run_here("validate", tmp_path / "out", "--source", k3_edges, code=0).stdout
    assert decoded_otherwise(tmp_path / "out")[1] == []
    assert "of 36 tensors checked by the conditions of rule mse" in validated
    assert "rule 5 warn" in validated
    run_here("report", tmp_path / "out", "--source", k3_edges, code=0)
    assert words in (tmp_path / "out" / "report.md").read_text()


def test_the_report_of_an_exact_result_has_no_empty_chart(result: Path, k3_tiny: Path, tmp_path: Path) -> None:
    run_here("report", result, "--source", k3_tiny, "--out", tmp_path, code=0)
    page = (tmp_path / "report.html").read_text()
    assert "36 of 36 tensors" in page
    for absent in ("compared with max", "by layer and expert", "error of max", "Worst tensors", "1.00", "No map"):
        assert absent not in page


def test_a_rule_that_does_not_cast_says_so_of_no_tensor(k3_edges: Path, tmp_path: Path) -> None:
    """An expert of minus zeros has no error under any rule."""
    output = run_here("run", k3_edges, tmp_path / "out", "--rule", "max", "--device", "cpu", code=0).stdout
    assert "cast:" not in output
    assert "lossless" not in output
    assert "cast_tensors" not in read_json(tmp_path / "out", "k2convert.json")["totals"]["total"]
    assert "that were cast" not in run_here("validate", tmp_path / "out", "--source", k3_edges, code=0).stdout


def test_a_changed_code_is_found(result: Path, k3_tiny: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(result, tmp_path / "out"))

    def change(checkpoint: SmallCheckpoint) -> None:
        checkpoint.tensors()[f"{MOE.format(2)}.experts.1.w3.weight"][5, 6] ^= 1

    edit_checkpoint(out, change)
    output = run_here("validate", out, "--source", k3_tiny, COLUMNS="250").stdout
    assert "non-zero weights changed" in output
    assert "INT4 steps" not in output, "its source has none"
    assert re.search(
        r"rule 7 .*layers\.2\.block_sparse_moe\.experts\.1\.w3\.weight: 1 of 32,768 bytes of codes are", output
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda q: q["quantized_layers"].pop(BANKS[0]), "rule 11 fail"),
        (lambda q: q["quantized_layers"].update({"model.layers.9.mlp.experts": {}}), "no converted layer has this"),
        (lambda q: q["quantized_layers"][BANKS[3]].update(quant_algo="W4A16_NVFP4"), "rule 11 fail"),
        (lambda q: q.update(quant_method="modelopt"), "quant_method: 'modelopt', expected 'modelopt_mixed'"),
        (lambda q: q["ignore"].append("*.experts"), "is quantized, but *.experts excludes it"),
        (lambda q: q["ignore"].remove("*_res_proj"), "mlp_res_proj: is BF16, but no entry excludes it"),
        (lambda q: q["ignore"].remove("*self_attn*"), "in_proj_qkvgfab: is BF16, but no entry excludes it"),
        (lambda q: q["ignore"].remove("*routed_expert_up_proj"), "routed_expert_up_proj: is BF16, but no entry"),
    ],
)  # fmt: skip
def test_a_config_that_engines_misread_is_found(change: Any, problem: str, result: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(result, tmp_path / "out"))
    edit_json(out / "config.json", lambda config: change(config["quantization_config"]))
    assert problem in run_here("validate", out, COLUMNS="250").stdout


def test_the_bf16_copy_is_exact(k3_tiny: Path, tmp_path: Path) -> None:
    run_here("run", k3_tiny, tmp_path / "out", "--set", "target=bf16", code=0)
    before = tensors_of(k3_tiny)
    after = tensors_of(tmp_path / "out")
    module = f"{MOE.format(3)}.experts.2.w2"
    source = Mxfp4Weight(before[f"{module}.weight_packed"].numpy(), before[f"{module}.weight_scale"].numpy())
    assert torch.equal(after[f"{module}.weight"].float(), library_values(source).float())
