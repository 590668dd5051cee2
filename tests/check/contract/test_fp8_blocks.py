"""Kimi K3's attention in FP8: a right result passes, each planted fault is found, and configs are as NVIDIA's."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import RunCli
from conversions import convert
from converted import Converted, Kind, change, change_tensor, on_bytes, verdicts

from k2convert.check.results import ValidationReport, Verdict
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from scripts.fixture_maker.damage import edit_json
from scripts.fixture_maker.folder import SmallCheckpoint, read_small, write_small

KEYS: dict[str, Any] = {"fp8": ("attention",), "rule": "mse"}
LAYERS = "language_model.model.layers"
QUERY, GATE, LATENT = (f"{LAYERS}.{name}_proj" for name in ("1.self_attn.q", "3.self_attn.g", "3.self_attn.q_a"))
SMALL = {10: Verdict.WARN}
"""The small model's attention has fewer columns than a block."""


@pytest.fixture
def blocks(k3_tiny: Path, convert_source: Callable[..., Path], tmp_path: Path) -> Converted:
    """A copy of a good result, to break."""
    shutil.copytree(convert_source(k3_tiny, **KEYS), tmp_path / "copy")
    return Converted(Kind("modelopt", "k3", "w4a4", "mse"), tmp_path / "copy", k3_tiny)


def validated(converted: Converted) -> ValidationReport:
    return validate_checkpoint(folder=converted.folder, source=open_checkpoint(converted.source))


def test_a_right_result_passes(blocks: Converted) -> None:
    report = validated(blocks)
    assert report.passed, [rule for rule in report.contract.rules if rule.verdict is Verdict.FAIL]
    assert verdicts(report.contract) == SMALL
    assert report.weights is not None
    assert report.weights.certificate.mismatches == {}
    assert report.weights.certificate.is_whole
    assert {*report.weights.roles.values()} == {"experts", "attention"}
    assert validate_checkpoint(folder=blocks.folder, source=None).passed


def test_everything_else_has_the_bytes_of_a_result_without_fp8(
    blocks: Converted, k3_tiny: Path, convert_source: Callable[..., Path]
) -> None:
    with_fp8, without = read_small(blocks.folder).tensors(), read_small(convert_source(k3_tiny, rule="mse")).tensors()
    fp8 = {name for name, tensor in with_fp8.items() if ".self_attn." in name and tensor.dtype is torch.float8_e4m3fn}
    assert len(fp8) == 30
    for name in without.keys() - fp8:
        assert torch.equal(with_fp8[name].flatten().view(torch.uint8), without[name].flatten().view(torch.uint8)), name
    assert with_fp8.keys() - without.keys() == {f"{name}_scale" for name in fp8}


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(tensor: torch.Tensor) -> torch.Tensor:
        tensor[0, 0, 1, 0] *= factor
        return tensor

    return apply


def off_by_one(codes: torch.Tensor) -> None:
    codes[3, 200] ^= 1


def other_sign(codes: torch.Tensor) -> None:
    codes[3, 200] ^= 0x80


def not_a_number(codes: torch.Tensor) -> None:
    codes[3, 200] = 0x7F


def swapped(codes: torch.Tensor) -> None:
    codes[:, :256] = codes[:, 128:384].clone()


VALUES = {
    "a doubled scale": (QUERY, "weight_scale", scaled(2)),
    "a code off by one": (QUERY, "weight", on_bytes(off_by_one)),
    "a halved scale": (QUERY, "weight_scale", scaled(0.5)),
    "a scale that is no power of two": (QUERY, "weight_scale", scaled(1.25)),
    "reciprocal scales": (QUERY, "weight_scale", lambda t: 1 / t),
    "a negative scale": (QUERY, "weight_scale", scaled(-1)),
    "an infinite scale": (QUERY, "weight_scale", scaled(float("inf"))),
    "a scale of another block": (QUERY, "weight_scale", lambda t: torch.cat((t[:, :, :3], 4 * t[:, :, :1]), dim=2)),
    "another scale in the gate": (GATE, "weight_scale", scaled(2)),
    "a sign": (QUERY, "weight", on_bytes(other_sign)),
    "a code of NaN": (QUERY, "weight", on_bytes(not_a_number)),
    "swapped blocks": (QUERY, "weight", on_bytes(swapped)),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", VALUES)
def test_a_wrong_value_is_found_by_the_certificate(fault: str, blocks: Converted) -> None:
    module, parameter, apply = VALUES[fault]
    change_tensor(blocks, f"{module}.{parameter}", apply)
    report = validated(blocks)
    assert not report.passed
    assert report.weights is not None
    assert [*report.weights.certificate.mismatches] == [module]


WITHOUT_SOURCE = {
    name: VALUES[name]
    for name in ("a scale that is no power of two", "a negative scale", "an infinite scale", "a code of NaN")
}


@pytest.mark.parametrize("fault", WITHOUT_SOURCE)
def test_a_number_that_no_result_has_is_found_without_the_source(fault: str, blocks: Converted) -> None:
    module, parameter, apply = WITHOUT_SOURCE[fault]
    change_tensor(blocks, f"{module}.{parameter}", apply)
    report = validate_checkpoint(folder=blocks.folder, source=None)
    assert report.contract.failed == [4]
    assert report.contract.rules[3].offenders[0].name == f"{module}.{parameter}"


def test_scales_that_vllm_would_mix_are_found_without_the_source(blocks: Converted) -> None:
    change_tensor(blocks, f"{GATE}.weight_scale", scaled(2))
    rule = validate_checkpoint(folder=blocks.folder, source=None).contract.rules[5]
    assert (rule.verdict, rule.count) == (Verdict.FAIL, 1)
    assert "vLLM 0.33.0 gives rows of g_proj those of a neighbor" in rule.offenders[0].problem


def to_bf16(result: SmallCheckpoint, source: SmallCheckpoint) -> None:
    members = result.shards[result.shard_of(f"{QUERY}.weight")]
    members[f"{QUERY}.weight"] = source.tensors()[f"{QUERY}.weight"]
    del members[f"{QUERY}.weight_scale"]


def router_to_fp8(result: SmallCheckpoint, _: SmallCheckpoint) -> None:
    name = f"{LAYERS}.1.block_sparse_moe.gate.weight"
    members = result.shards[result.shard_of(name)]
    members[name] = members[name].to(torch.float8_e4m3fn)
    members[f"{name}_scale"] = torch.ones(1, 1, 4, 1)


def replaced(name: str, apply: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda result, _: result.replace(name, apply(result.tensors()[name]))


def removed(name: str) -> Any:
    return lambda result, _: result.shards[result.shard_of(name)].pop(name)


FORMS = {
    "a linear layer in BF16": (to_bf16, 1, "is BF16, but the recipe's fp8 names attention"),
    "the router in FP8": (router_to_fp8, 1, "is FP8, but the recipe leaves it in BF16"),
    "no scales": (removed(f"{QUERY}.weight_scale"), 1, "missing"),
    "scales in two dimensions": (replaced(f"{QUERY}.weight_scale", lambda t: t[:, 0, :, 0].clone()), 3, "expected F32"),
    "scales of rows": (replaced(f"{QUERY}.weight_scale", lambda t: torch.ones(64, 1)), 3, "expected F32"),
    "too few scales": (replaced(f"{QUERY}.weight_scale", lambda t: t[:, :, :3].clone()), 3, "expected F32"),
    "scales in BF16": (replaced(f"{QUERY}.weight_scale", lambda t: t.bfloat16()), 3, "expected F32"),
    "codes as U8": (replaced(f"{QUERY}.weight", lambda t: t.view(torch.uint8)), 3, "expected F8_E4M3"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("fault", FORMS)
def test_a_wrong_form_is_found(fault: str, blocks: Converted) -> None:
    apply, number, problem = FORMS[fault]
    change(blocks, lambda result: apply(result, read_small(blocks.source)))
    rule = validated(blocks).contract.rules[number - 1]
    assert rule.verdict is Verdict.FAIL
    assert any(problem in offender.problem for offender in rule.offenders)


Config = dict[str, Any]


def no_fused_name(config: Config) -> None:
    del config["quantized_layers"]["model.layers.1.self_attn.fused_qkvg_proj"]


def another_algorithm(config: Config) -> None:
    config["quantized_layers"][QUERY]["quant_algo"] = "FP8_PER_CHANNEL_PER_TOKEN"


def a_layer_more(config: Config) -> None:
    config["quantized_layers"]["model.layers.1.block_sparse_moe.routed_expert_up_proj"] = {"quant_algo": "FP8_PB_WO"}


def no_group(config: Config) -> None:
    del config["config_groups"]["group_1"]


def attention_excluded(config: Config) -> None:
    config["ignore"].append("*self_attn*")


CONFIGS = {no_fused_name: 11, another_algorithm: 11, a_layer_more: 11, no_group: 11, attention_excluded: 14}


@pytest.mark.quick(3)
@pytest.mark.parametrize("apply", CONFIGS, ids=lambda apply: apply.__name__)
def test_a_wrong_config_is_found(apply: Callable[[Config], None], blocks: Converted) -> None:
    edit_json(blocks.folder / "config.json", lambda config: apply(config["quantization_config"]))
    assert verdicts(blocks.check()) == SMALL | {CONFIGS[apply]: Verdict.FAIL}


def spellings(name: str) -> Iterator[str]:
    """The names of a module as NVIDIA's checkpoint lists it: with the prefix of the language model, or a part of it."""
    tail = name.removeprefix("language_model.model.")
    for other in {tail, tail.replace("block_sparse_moe", "mlp")}:
        yield from (f"{prefix}{other}" for prefix in ("language_model.model.", "model.", ""))


def as_nvidia_lists(modules: set[str]) -> dict[str, Any]:
    """The map of NVIDIA's Kimi-K3-NVFP4, by ModelOpt's examples/kimi/kimi_k3/quantize_to_nvfp4.py."""
    layers: dict[str, Any] = {}
    for bank in {name.partition(".experts.")[0] + ".experts" for name in modules if ".experts." in name}:
        layers |= {name: {"quant_algo": "NVFP4", "group_size": 16} for name in spellings(bank)}
    fused = {
        "fused_qkvg_proj": {"q_proj", "k_proj", "v_proj", "g_proj"},
        "in_proj_qkvgfab": {"q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"},
        "fused_qkv_a_proj_with_mqa": {"q_a_proj", "kv_a_proj_with_mqa"},
        "fused_qkv_a_proj": {"q_a_proj", "kv_a_proj_with_mqa"},
    }
    for module in {name for name in modules if ".self_attn." in name}:
        stem, _, last = module.rpartition(".")
        own = {module} | {f"{stem}.{name}" for name, parts in fused.items() if last in parts}
        layers |= {name: {"quant_algo": "FP8_PB_WO"} for own_name in own for name in spellings(own_name)}
    return layers


def test_configs_are_those_of_nvidia_s_checkpoint_field_by_field(blocks: Converted) -> None:
    """The map is NVIDIA's, and config.json is what ModelOpt makes of hf_quant_config.json, but for three fields."""
    stated = json.loads((blocks.folder / "config.json").read_text())
    hf = json.loads((blocks.folder / "hf_quant_config.json").read_text())
    quantization = stated["quantization_config"]
    quantized = {n.rpartition(".")[0] for n in read_small(blocks.folder).tensors() if n.endswith(".weight_scale")}
    assert quantization["quantized_layers"] == as_nvidia_lists(quantized)
    assert "quantization_config" not in stated["text_config"]
    modelopt = pytest.importorskip("modelopt.torch.export.convert_hf_config")
    with pytest.warns(UserWarning, match="Unsupported quantization algorithm 'FP8_PB_WO'"):
        wanted = modelopt.convert_hf_quant_config_format(hf)
    own = {"producer", "quant_method", "group_size"}
    assert {k: v for k, v in quantization.items() if k not in own} == {k: v for k, v in wanted.items() if k not in own}
    assert quantization["quant_method"] == "modelopt_mixed", "as NVIDIA's script sets it"
    assert hf["quantization"].keys() == {
        "quant_algo", "kv_cache_quant_algo", "group_size", "quantized_layers", "exclude_modules"
    }  # fmt: skip


VLLM_PACKED = {
    "in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_g_proj": ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
}
"""packed_modules_mapping of vLLM 0.33.0's KimiK3ForConditionalGeneration."""


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.", ""])
def test_engines_find_the_form_of_every_layer_by_its_name(prefix: str, blocks: Converted) -> None:
    config = json.loads((blocks.folder / "config.json").read_text())["quantization_config"]
    layers = config["quantized_layers"]
    kda = ("fused_qkvg_proj", "in_proj_qkvgfab", "q_proj", "g_proj", "f_a_proj", "f_b_proj", "b_proj", "o_proj")
    mla = ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_g_proj", "q_b_proj", "kv_b_proj", "g_proj", "o_proj")
    for layer, names in ((1, kda), (3, mla)):
        for name in names:
            stem = f"{prefix}layers.{layer}.self_attn"
            parts = [f"{stem}.{part}" for part in VLLM_PACKED.get(name, (name,))]
            own = [f"{stem}.{name}"] if f"{stem}.{name}" in layers else parts
            assert {layers[part]["quant_algo"] for part in own} == {"FP8_PB_WO"}, name
        for name in ("mlp.gate", "mlp.shared_experts.gate_up_proj", "block_sparse_moe.routed_expert_up_proj"):
            assert f"{prefix}layers.{layer}.{name}" not in layers


@pytest.fixture
def apart(k3_tiny: Path, tmp_path: Path) -> Path:
    """The source with the gate of its MLA layer in another shard."""
    checkpoint = read_small(k3_tiny)
    checkpoint.move(f"{GATE}.weight", next(iter(checkpoint.shards)))
    write_small(checkpoint, tmp_path / "apart")
    return tmp_path / "apart"


def test_layers_that_share_scales_may_be_in_different_shards(apart: Path, blocks: Converted, tmp_path: Path) -> None:
    result = convert(apart, tmp_path / "result", **KEYS)
    separate, together = read_small(result).tensors(), read_small(blocks.folder).tensors()
    assert separate.keys() == together.keys()
    for name, tensor in separate.items():
        assert torch.equal(tensor.flatten().view(torch.uint8), together[name].flatten().view(torch.uint8)), name
    report = validate_checkpoint(folder=result, source=open_checkpoint(apart))
    assert report.passed
    assert report.weights is not None
    assert report.weights.certificate.mismatches == {}


@pytest.mark.parametrize("exponent", [-110, -127])
def test_a_block_of_the_smallest_weights_has_the_least_scale(k3_tiny: Path, tmp_path: Path, exponent: int) -> None:
    """Below 2^-126 there is no scale, so codes of a good block may be small."""
    checkpoint = read_small(k3_tiny)
    (shard,) = (tensors for tensors in checkpoint.shards.values() if f"{QUERY}.weight" in tensors)
    shard[f"{QUERY}.weight"][:128, :128] *= 2.0**exponent
    write_small(checkpoint, tmp_path / "source")
    result = convert(tmp_path / "source", tmp_path / "result", **KEYS)
    scales = read_small(result).tensors()[f"{QUERY}.weight_scale"]
    assert (scales[0, 0, 0, 0].item() == 2.0**-126) == (exponent < -118)
    report = validate_checkpoint(folder=result, source=open_checkpoint(tmp_path / "source"))
    assert report.passed, [rule for rule in report.contract.rules if rule.verdict is Verdict.FAIL]


def test_a_lost_shard_is_converted_again_to_the_same_bytes(k3_tiny: Path, tmp_path: Path, run_cli: RunCli) -> None:
    words = ("run", k3_tiny, tmp_path / "out", "--recipe", "kimi-k3-nvfp4-fp8")
    planned = json.loads(run_cli(*words, "--dry-run", "--json", code=0).stdout)
    run_cli(*words, code=0)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    before = {path.name: path.read_bytes() for path in shards}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert planned["bytes_to_write"] == index["metadata"]["total_size"]
    shards[3].unlink()
    run_cli(*words, code=0)
    assert {path.name: path.read_bytes() for path in shards} == before


def test_inspect_says_what_it_is(blocks: Converted, run_cli: RunCli) -> None:
    document = json.loads(run_cli("inspect", blocks.folder, "--json", code=0).stdout)
    attention = {entry["form"]: entry["num_tensors"] for entry in document["holdings"] if entry["role"] == "attention"}
    assert attention["FP8"] == 60
