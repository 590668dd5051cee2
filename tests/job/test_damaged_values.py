"""Values that no training writes: run and validate refuse NaN and infinity, and name zeros and codes of -8."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import RunCli

from k2convert.checkpoint.reader import is_finite
from scripts.fixture_maker.damage import edit_checkpoint, edit_json, edit_tensor
from scripts.fixture_maker.folder import SmallCheckpoint

LAYER = "model.layers.1"
NAN = float("nan")
INFINITY = float("inf")
COPIED = {
    "the last norm": "model.norm.weight",
    "embeddings": "model.embed_tokens.weight",
    "the head": "lm_head.weight",
    "attention": f"{LAYER}.self_attn.o_proj.weight",
    "a router": f"{LAYER}.mlp.gate.weight",
    "a router's bias in F32": f"{LAYER}.mlp.gate.e_score_correction_bias",
    "a shared expert": f"{LAYER}.mlp.shared_experts.up_proj.weight",
}


def put(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return change


@pytest.mark.quick(10)
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("name", COPIED.values(), ids=COPIED)
def test_nan_stops_a_run(name: str, value: float, source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    edit_tensor(source, name, put(value))
    shown = run_cli("run", source, tmp_path / "out", "--rule", "max", code=1)
    assert f"{name}: has NaN or infinite values" in shown.stderr
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    assert not (tmp_path / "out" / index[name]).exists()
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("parameter", ["weight_scale", "weight"])
def test_so_does_one_in_what_is_converted(parameter: str, source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    module = f"{LAYER}.mlp.experts.0.up_proj" if parameter == "weight_scale" else f"{LAYER}.mlp.shared_experts.up_proj"
    edit_tensor(source, f"{module}.{parameter}", put(NAN))
    shown = run_cli("run", source, tmp_path / "out", "--recipe", "kimi-k2-thinking-nvfp4-mlp", code=1)
    assert module in shown.stderr
    assert "nan" in shown.stderr.lower()


@pytest.mark.parametrize("value", [NAN, INFINITY], ids=["nan", "inf"])
@pytest.mark.parametrize("with_source", [False, True])
def test_nan_is_not_valid(value: float, source: Path, tmp_path: Path, run_cli: RunCli, *, with_source: bool) -> None:
    out = tmp_path / "out"
    run_cli("run", source, out, "--rule", "max", code=0)
    for folder in (source, out):
        edit_tensor(folder, "model.norm.weight", put(value))
    # The source was written again, with other headers.
    edit_json(out / "k2convert.json", lambda ledger: ledger["source"].update(headers={}))
    given = ("--source", source) if with_source else ()
    shown = run_cli("validate", out, *given, "--json", code=3)
    rule = json.loads(shown.stdout)["contract"]["rules"][6]
    assert rule["verdict"] == "fail"
    assert {"name": "model.norm.weight", "problem": "has NaN or infinite values"} in rule["offenders"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2])
def test_every_float_type_is_looked_at(dtype: torch.dtype) -> None:
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "float8_e5m2": "F8_E5M2"}
    name = names[str(dtype).removeprefix("torch.")]
    largest = torch.finfo(dtype).max
    for value, wanted in ((largest, True), (-largest, True), (NAN, False), (INFINITY, False), (-INFINITY, False)):
        values = torch.zeros(100, dtype=torch.float64)
        values[41] = value
        data = values.to(dtype).view(torch.uint8).numpy()
        assert is_finite(data, name) is wanted, value
    for byte in torch.arange(256, dtype=torch.uint8):
        wanted = bool(byte.reshape(1).view(torch.float8_e4m3fn).float().isfinite())
        assert is_finite(byte.reshape(1).numpy(), "F8_E4M3") is wanted


def zero_layer(checkpoint: SmallCheckpoint) -> None:
    for name, tensor in checkpoint.tensors().items():
        if name.startswith(f"{LAYER}.") and not name.endswith("weight_shape"):
            checkpoint.replace(name, codes_of_zero(tensor) if name.endswith("packed") else torch.zeros_like(tensor))


def codes_of_zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor.view(torch.uint8), 0x88).view(torch.int32)


def test_a_layer_of_zeros_is_named(source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    edit_checkpoint(source, zero_layer)
    out = tmp_path / "out"
    shown = run_cli("run", source, out, code=0)
    (warning,) = [line for line in shown.stderr.splitlines() if line.startswith("warning: ")]
    assert f"({LAYER}." in warning
    assert warning.endswith("all weights are zero")
    document = json.loads(run_cli("validate", out, "--source", source, "--json", code=0).stdout)
    copies = document["contract"]["rules"][6]
    weights = document["contract"]["rules"][17]
    assert (copies["verdict"], weights["verdict"]) == ("warn", "warn")
    assert {"name": f"{LAYER}.input_layernorm.weight", "problem": "all weights are zero"} in copies["offenders"]
    assert weights["count"] == 12  # four experts
    without = json.loads(run_cli("validate", out, "--json", code=0).stdout)["contract"]["rules"][17]
    assert (without["verdict"], without["count"]) == ("warn", 12)


def as_twos_complement(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.view(torch.uint8) ^ 0x88).view(torch.int32)


def a_quarter_minus_eight(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.view(torch.uint8).clone()
    changed[: len(changed) // 4] = 0
    return changed.view(torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (torch.zeros_like, "100 % of the codes are -8"),
        (a_quarter_minus_eight, "a range of zeros in the file?"),
        (as_twos_complement, "two's complement?"),
    ],
)
def test_codes_of_minus_eight_are_named(
    change: Callable[[torch.Tensor], torch.Tensor], words: str, source: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    expert = f"{LAYER}.mlp.experts.2."
    for kind in ("gate", "up", "down"):
        edit_tensor(source, f"{expert}{kind}_proj.weight_packed", change)
    out = tmp_path / "out"
    shown = run_cli("run", source, out, "--json", code=0)
    (warning,) = json.loads(shown.stdout)["warnings"]
    assert expert in warning
    assert words in warning
    rule = json.loads(run_cli("validate", out, "--source", source, "--json", code=0).stdout)["contract"]["rules"][17]
    assert (rule["verdict"], rule["count"]) == ("warn", 3)
    assert words in rule["offenders"][0]["problem"]


@pytest.mark.parametrize("kind", ["tiny", "k3_tiny"])
def test_no_warning_if_sound(kind: str, request: pytest.FixtureRequest, tmp_path: Path, run_cli: RunCli) -> None:
    shown = run_cli("run", request.getfixturevalue(kind), tmp_path / "out", "--json", code=0)
    assert json.loads(shown.stdout)["warnings"] == []
