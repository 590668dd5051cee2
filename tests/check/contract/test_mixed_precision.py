"""FP8 beside NVFP4: a right result passes, each planted fault is found, and engines find each format by names."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import Converted, Kind, change, change_tensor, on_bytes, verdicts

from k2convert.check.results import ValidationReport, Verdict
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.models import FAMILIES
from scripts.fixture_maker.folder import SmallCheckpoint, read_small

KEYS = {"layout": "compressed-tensors", "fp8": ("attention", "shared_experts", "dense_mlp")}
ROLES = [("attention",), ("shared_experts",), ("dense_mlp", "attention"), KEYS["fp8"]]


@pytest.fixture
def mixed(sources: dict[str, Path], convert_source: Callable[..., Path], tmp_path: Path) -> Converted:
    """A copy of a good result with FP8, to break."""
    source = sources["thinking"]
    shutil.copytree(convert_source(source, rule="mse", **KEYS), tmp_path / "copy")
    return Converted(Kind("compressed-tensors", "thinking", "w4a4", "mse"), tmp_path / "copy", source)


def validated(folder: Path, source: Path) -> ValidationReport:
    return validate_checkpoint(folder=folder, source=open_checkpoint(source))


@pytest.mark.quick(3)
@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("source", ["thinking", "k2.5", "reap"])
def test_a_right_result_passes(
    source: str, roles: tuple[str, ...], sources: dict[str, Path], convert_source: Callable[..., Path]
) -> None:
    folder = convert_source(sources[source], rule="mse", **KEYS | {"fp8": roles})
    report = validated(folder, sources[source])
    assert report.passed, [rule for rule in report.contract.rules if rule.verdict is Verdict.FAIL]
    assert verdicts(report.contract) == {}
    assert report.weights is not None
    assert report.weights.certificate.mismatches == {}
    assert report.weights.certificate.is_whole
    assert {*report.weights.roles.values()} == {"experts", *roles}
    assert validate_checkpoint(folder=folder, source=None).passed


def test_experts_have_the_same_bytes_with_and_without_fp8(
    sources: dict[str, Path], convert_source: Callable[..., Path]
) -> None:
    with_fp8 = read_small(convert_source(sources["thinking"], rule="mse", **KEYS)).tensors()
    without = read_small(convert_source(sources["thinking"], rule="mse", layout="compressed-tensors")).tensors()
    names = {name for name in without if ".experts." in name or "norm" in name or "kv_b" in name or "lm_head" in name}
    assert len(names) > 100
    for name in names:
        assert torch.equal(with_fp8[name].view(torch.uint8), without[name].view(torch.uint8)), name


ROW = 3


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(tensor: torch.Tensor) -> torch.Tensor:
        tensor[ROW] *= factor
        return tensor

    return apply


def off_by_one(codes: torch.Tensor) -> None:
    codes[ROW, 5] ^= 1


def other_sign(codes: torch.Tensor) -> None:
    codes[ROW, 5] ^= 0x80


def not_a_number(codes: torch.Tensor) -> None:
    codes[ROW, 5] = 0xFF


def swapped(codes: torch.Tensor) -> None:
    codes[[ROW, ROW + 1]] = codes[[ROW + 1, ROW]]


def halved(codes: torch.Tensor) -> None:
    codes[ROW] -= (codes[ROW] & 0x7F).clamp(max=0x10)


VALUES = {
    "scale": ("weight_scale", scaled(1.01)),
    "scale one step away": ("weight_scale", lambda t: (t.view(torch.int32) + 1).view(torch.float32)),
    "reciprocal": ("weight_scale", lambda t: 1 / t),
    "negative scale": ("weight_scale", scaled(-1)),
    "infinite scale": ("weight_scale", scaled(float("inf"))),
    "code off by one": ("weight", on_bytes(off_by_one)),
    "sign": ("weight", on_bytes(other_sign)),
    "code of NaN": ("weight", on_bytes(not_a_number)),
    "rows swapped": ("weight", on_bytes(swapped)),
    "half of the range": ("weight", on_bytes(halved)),
}
LAYERS = ["self_attn.kv_a_proj_with_mqa", "mlp.shared_experts.down_proj"]


@pytest.mark.quick(3)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("fault", VALUES)
def test_a_wrong_number_is_found(fault: str, layer: str, mixed: Converted) -> None:
    parameter, apply = VALUES[fault]
    module = f"model.layers.1.{layer}"
    change_tensor(mixed, f"{module}.{parameter}", apply)
    report = validated(mixed.folder, mixed.source)
    assert not report.passed
    assert report.weights is not None
    assert module in report.weights.certificate.mismatches
    alone = validate_checkpoint(folder=mixed.folder, source=None).contract
    is_seen = fault in ("reciprocal", "negative scale", "infinite scale", "code of NaN", "half of the range")
    assert verdicts(alone) == ({4: Verdict.FAIL} if is_seen else {})


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "none": lambda _: None,
    "flat": lambda codes: codes.reshape(-1),
    "no rows": lambda codes: codes[:0],
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("with_source", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_of_another_shape_is_named(shape: str, with_source: bool, mixed: Converted) -> None:
    """Its scales are right, and nothing is read of either."""
    module = f"model.layers.1.{LAYERS[0]}"
    change_tensor(mixed, f"{module}.weight", SHAPES[shape])
    source = open_checkpoint(mixed.source) if with_source else None
    report = validate_checkpoint(folder=mixed.folder, source=source).contract
    assert 3 in {rule.number for rule in report.rules if rule.verdict is Verdict.FAIL}


Q_A = "model.layers.1.self_attn.q_a_proj"
KV_B = "model.layers.1.self_attn.kv_b_proj"


def to_fp8(module: str) -> Callable[[SmallCheckpoint, SmallCheckpoint], None]:
    def apply(result: SmallCheckpoint, source: SmallCheckpoint) -> None:
        values = source.tensors()[f"{module}.weight"].float()
        scales = values.abs().amax(dim=1, keepdim=True) / 448
        members = result.shards[result.shard_of(f"{module}.weight")]
        members[f"{module}.weight"] = (values / scales).to(torch.float8_e4m3fn)
        members[f"{module}.weight_scale"] = scales

    return apply


def to_bf16(module: str) -> Callable[[SmallCheckpoint, SmallCheckpoint], None]:
    def apply(result: SmallCheckpoint, source: SmallCheckpoint) -> None:
        members = result.shards[result.shard_of(f"{module}.weight")]
        members[f"{module}.weight"] = source.tensors()[f"{module}.weight"]
        del members[f"{module}.weight_scale"]

    return apply


def replaced(name: str, apply: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda result, _: result.replace(name, apply(result.tensors()[name]))


def removed(name: str) -> Any:
    return lambda result, _: result.shards[result.shard_of(name)].pop(name)


FORMS = {
    "kv_b_proj in FP8": (to_fp8(KV_B), 1, "is FP8, but the recipe leaves it in BF16"),
    "router in FP8": (to_fp8("model.layers.1.mlp.gate"), 1, "is FP8, but the recipe leaves it in BF16"),
    "q_a of another form than kv_a": (to_bf16(Q_A), 1, "is BF16, but the recipe's fp8 names attention"),
    "no scales": (removed(f"{Q_A}.weight_scale"), 1, "missing"),
    "one scale": (replaced(f"{Q_A}.weight_scale", lambda t: t[:1]), 3, "expected F32"),
    "scales in BF16": (replaced(f"{Q_A}.weight_scale", lambda t: t.bfloat16()), 3, "expected F32"),
    "scales without columns": (replaced(f"{Q_A}.weight_scale", lambda t: t.flatten()), 3, "expected F32"),
    "codes as U8": (replaced(f"{Q_A}.weight", lambda t: t.view(torch.uint8)), 3, "expected F8_E4M3"),
    "a transposed weight": (replaced(f"{Q_A}.weight", lambda t: t.T.contiguous()), 3, "expected F8_E4M3"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", FORMS)
def test_a_wrong_form_is_found(fault: str, mixed: Converted) -> None:
    apply, number, problem = FORMS[fault]
    change(mixed, lambda result: apply(result, read_small(mixed.source)))
    contract = validated(mixed.folder, mixed.source).contract
    rule = contract.rules[number - 1]
    assert rule.verdict is Verdict.FAIL
    assert any(problem in offender.problem for offender in rule.offenders)


Config = dict[str, Any]


def linear_targets(config: Config) -> None:
    config["config_groups"]["group_0"]["targets"] = ["Linear"]


def no_group(config: Config) -> None:
    config["config_groups"]["group_1"]["targets"].pop()


def reciprocal_groups(config: Config) -> None:
    groups = config["config_groups"]
    groups["group_0"]["targets"], groups["group_1"]["targets"] = (
        groups["group_1"]["targets"],
        groups["group_0"]["targets"],
    )


def static_activations(config: Config) -> None:
    config["config_groups"]["group_1"]["input_activations"]["dynamic"] = False


def no_fused_name(config: Config) -> None:
    targets = config["config_groups"]["group_1"]["targets"]
    targets[0] = targets[0].replace("fused_qkv_a_proj(_with_mqa)?|", "")


def only_nvfp4(config: Config) -> None:
    config["format"] = "nvfp4-pack-quantized"


def without_group(config: Config) -> None:
    del config["config_groups"]["group_1"]


def kv_b_in_no_list(config: Config) -> None:
    config["ignore"].remove("re:.*kv_b_proj$")


def attention_ignored(config: Config) -> None:
    config["ignore"].append("re:.*self_attn.*")


CONFIGS = {
    linear_targets: 11,
    no_group: 11,
    reciprocal_groups: 11,
    static_activations: 11,
    no_fused_name: 11,
    only_nvfp4: 11,
    without_group: 11,
    kv_b_in_no_list: 14,
    attention_ignored: 14,
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("apply", CONFIGS, ids=lambda apply: apply.__name__)
def test_a_wrong_config_is_found(apply: Callable[[Config], None], mixed: Converted) -> None:
    path = mixed.folder / "config.json"
    config = json.loads(path.read_text())
    apply(config["quantization_config"])
    path.write_text(json.dumps(config))
    assert verdicts(mixed.check()) == {CONFIGS[apply]: Verdict.FAIL}


NVFP4, FP8 = "nvfp4-pack-quantized", "float-quantized"
ATTENTION = dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"), FP8) | {"kv_b_proj": None}
FUSED = {"vLLM": "fused_qkv_a_proj", "SGLang": "fused_qkv_a_proj_with_mqa"}


def engine_layers(prefix: str, engine: str) -> Iterator[tuple[str, str | None]]:
    """The linear layers that an engine makes, and the format that each must have: those of a checkpoint, and fused."""
    projections = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
    for layer in (0, 1, 10, 60):
        stem = f"{prefix}layers.{layer}"
        for name, kind in (ATTENTION | {FUSED[engine]: FP8}).items():
            yield f"{stem}.self_attn.{name}", kind
        if layer == 0:
            yield from ((f"{stem}.mlp.{name}", FP8) for name in projections)
            continue
        yield f"{stem}.mlp.gate", None
        yield from ((f"{stem}.mlp.shared_experts.{name}", FP8) for name in projections)
        yield from ((f"{stem}.mlp.experts.{number}.{name}", NVFP4) for number in (0, 383) for name in projections[1:])
    yield f"{prefix.removesuffix('model.')}lm_head", None
    yield "vision_tower.encoder.blocks.0.wqkv", None


def found_format(name: str, config: Config) -> str | None:
    """The format of a layer as both engines find it: ignored, else the first group with a name, else refused."""

    def matches(entries: list[str]) -> bool:
        return any(re.match(entry.removeprefix("re:"), name) for entry in entries)

    if matches(config["ignore"]):
        return None
    groups = config["config_groups"].values()
    assert not any("Linear" in group["targets"] for group in groups)
    return next(group["format"] for group in groups if matches(group["targets"]))


@pytest.mark.parametrize("engine", FUSED)
@pytest.mark.parametrize("source", ["thinking", "k2.5"])
def test_engines_find_the_format_of_every_layer_by_its_name(
    source: str, engine: str, sources: dict[str, Path], convert_source: Callable[..., Path]
) -> None:
    folder = convert_source(sources[source], rule="mse", **KEYS)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    family = next(f for f in FAMILIES if f.name == ("kimi-k2.5" if source == "k2.5" else "kimi-k2-thinking"))
    prefixes = {family.prefix, family.prefix.removeprefix(family.naming.wrapper)}
    for prefix in prefixes:
        for name, expected in engine_layers(prefix, engine):
            if name.startswith("vision") and not family.naming.wrapper:
                continue
            assert found_format(name, config) == expected, name
