"""Kimi K3 as a source: the published counts, what its tensors and config must be, and every refusal by its own line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import messages_of, run_here

from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import K2ConvertError
from k2convert.models import detect_family, parse_tensor_names
from k2convert.models.names import Role
from k2convert.plan.plan import action_counts, plan_conversion
from k2convert.plan.recipe import load_recipe
from scripts.fixture_maker.config import published_config
from scripts.fixture_maker.damage import edit_checkpoint, edit_config, edit_json, edit_tensor
from scripts.fixture_maker.folder import SmallCheckpoint
from scripts.fixture_maker.k3 import K3_SHAPE, k3_config, k3_parts

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
LAYER = "language_model.model.layers.1"


def plan(folder: Path, **keys: Any) -> Any:
    return plan_conversion(source=open_checkpoint(folder), recipe=load_recipe("kimi-k3-nvfp4", keys))


@pytest.fixture(scope="module")
def converted(k3_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("k3") / "result"
    run_here("run", k3_tiny, folder, "--device", "cpu", code=0)
    return folder


@pytest.mark.slow
def test_counts_and_bytes_are_those_of_the_published_repository() -> None:
    parts = k3_parts()
    specs = [spec for part in parts for spec in part]
    assert len(specs) == len({spec.name for spec in specs}) == 497_220
    assert sum(spec.num_bytes for spec in specs) == 1_560_860_324_864
    dtypes = {dtype: sum(spec.dtype == dtype for spec in specs) for dtype in ("U8", "BF16", "F32")}
    assert dtypes == {"U8": 494_592, "BF16": 2_122, "F32": 506}
    assert [len(part) for part in parts[:4]] == [23, 5_404, 5_404, 5_398]
    assert k3_config(K3_SHAPE) == published_config("moonshotai/Kimi-K3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activations", "tensors", "num_bytes"),
    [("w4a4", 991_812, 1_645_947_954_176), ("w4a16", 744_516, 1_645_946_964_992)],
)
def test_the_result_has_the_published_counts(activations: str, tensors: int, num_bytes: int, k3_headers: Path) -> None:
    conversion = plan(k3_headers, activations=activations)
    assert sum(len(job.outputs) for job in conversion.jobs) == tensors
    assert conversion.data_bytes == num_bytes
    assert len(conversion.projections) == 247_296
    assert action_counts(conversion)["copy"]["source_tensors"] == 2_628
    assert len(conversion.banks) == 92 * 6


def test_every_tensor_has_a_role(k3_tiny: Path) -> None:
    source = open_checkpoint(k3_tiny)
    family = detect_family(source)
    names = parse_tensor_names(source, family=family)
    assert family.name == "kimi-k3"
    assert {parts.role for parts in names.values()} == set(Role)
    assert names[f"{EXPERT}.weight_packed"].projection == "gate"
    assert names[f"{EXPERT[:-1]}3.weight_packed"].sharing_key == names[f"{EXPERT}.weight_scale"].sharing_key
    assert names[f"{EXPERT[:-1]}2.weight_packed"].sharing_key != names[f"{EXPERT}.weight_scale"].sharing_key
    assert names[f"{LAYER}.self_attn.A_log"].role is Role.ATTENTION
    assert names[f"{LAYER}.mlp_res_proj.weight"].role is Role.RESIDUAL


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], object]:
    return lambda folder: edit_tensor(folder, name, change)


def add(name: str, value: torch.Tensor) -> Callable[[Path], object]:
    def change(checkpoint: SmallCheckpoint) -> None:
        shard = checkpoint.shard_of(f"{EXPERT}.weight_packed")
        checkpoint.shards[shard][name] = value

    return lambda folder: edit_checkpoint(folder, change)


def in_text(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", lambda config: change(config["text_config"]))


def text(**fields: object) -> Callable[[Path], object]:
    return in_text(lambda config: config.update(fields))


def in_group(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return in_text(lambda config: change(config["quantization_config"]["config_groups"]["group_0"]))


def weights(**fields: object) -> Callable[[Path], object]:
    return in_group(lambda group: group["weights"].update(fields))


def renamed(old: str, new: str) -> Callable[[Path], object]:
    def change(checkpoint: SmallCheckpoint) -> None:
        for shard, members in checkpoint.shards.items():
            checkpoint.shards[shard] = {name.replace(old, new): value for name, value in members.items()}

    return lambda folder: edit_checkpoint(folder, change)


PACKED = torch.zeros(512, 128, dtype=torch.uint8)
SCALE = torch.zeros(512, 8, dtype=torch.uint8)

OTHER_ROLES = {
    "attention": f"{LAYER}.self_attn.o_proj",
    "latent": f"{LAYER}.block_sparse_moe.routed_expert_up_proj",
    "router": f"{LAYER}.block_sparse_moe.gate",
    "lm_head": "language_model.lm_head",
    "vision_tower": "vision_tower.encoder.blocks.0.wo",
}
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "block scales of NVFP4": (
        tensor(f"{EXPERT}.weight_scale", lambda t: torch.zeros(256, 16).to(torch.float8_e4m3fn)),
        "this checkpoint is already NVFP4",
    ),
    "a global scale": (add(f"{EXPERT}.weight_global_scale", torch.ones(1)), "this checkpoint is already NVFP4"),
    "too few scales": (tensor(f"{EXPERT}.weight_scale", lambda t: t[:, :4].clone()), "shape [256, 4], but"),
    "BF16 scales": (tensor(f"{EXPERT}.weight_scale", lambda t: t.bfloat16()), "expected U8 or F8_E8M0"),
    "odd columns": (tensor(f"{EXPERT}.weight_packed", lambda t: t[:, :120].clone()), "240 input columns are not a"),
    "a shape": (add(f"{EXPERT}.weight_shape", torch.tensor([256, 256])), "w1.weight_shape: not part of a symmetric"),
    "a zero point": (add(f"{EXPERT}.weight_zero_point", SCALE), "w1.weight_zero_point: not part of a symmetric MXFP4"),
    "an order": (add(f"{EXPERT}.weight_g_idx", torch.zeros(256, dtype=torch.int32)), "w1.weight_g_idx: not part of"),
    "an input scale": (add(f"{EXPERT}.input_global_scale", torch.ones(1)), "w1.input_global_scale: not part of"),
    "INT4 beside it": (
        tensor(f"{EXPERT}.weight_packed", lambda t: t.view(torch.int32)),
        "w1.weight_packed (I32) is INT4, but Kimi K3 is converted from MXFP4",
    ),
    **{
        f"MXFP4 in {role}": (add(f"{module}.weight_packed", PACKED), f"is MXFP4 in the role {role}")
        for role, module in OTHER_ROLES.items()
    },
    "another format": (
        in_text(lambda config: config["quantization_config"].update(format="nvfp4-pack-quantized")),
        "format is 'nvfp4-pack-quantized', but only 'mxfp4-pack-quantized' can be converted",
    ),
    "8 bits": (weights(num_bits=8), "weights.num_bits is 8, but only 4"),
    "integers": (weights(type="int"), "weights.type is 'int', but only 'float'"),
    "another group": (weights(group_size=16), "weights.group_size is 16, but only 32"),
    "asymmetric": (weights(symmetric=False), "weights.symmetric is False, but only True"),
    "zero points": (weights(zp_dtype="torch.int8"), "weights.zp_dtype is 'torch.int8', but only None"),
    "quantized inputs": (
        in_group(lambda group: group.update(input_activations={"num_bits": 4})), "is {'num_bits': 4}, but only None",
    ),
    "no number of experts": (in_text(lambda config: config.pop("num_experts")), "num_experts is None, expected a"),
    "another latent width": (text(routed_expert_hidden_size=384), "(routed_expert_hidden_size 384"),
    "another inner width": (text(moe_intermediate_size=512), "moe_intermediate_size 512"),
    "more experts in the config": (text(num_experts=5), "but config.json says num_experts = 5"),
    "an FP8 tensor": (
        tensor(f"{LAYER}.self_attn.o_proj.weight", lambda t: t.to(torch.float8_e4m3fn)), "an FP8 checkpoint",
    ),
    "Quark": (
        text(quantization_config={"quant_method": "quark"}), "quant_method is 'quark', but only 'compressed-tensors'",
    ),
    "Kimi-Linear": (lambda folder: edit_config(folder, model_type="kimi_linear"), "this is Kimi-Linear, which is not"),
    "DeepSeek-V4": (lambda folder: edit_config(folder, model_type="deepseek_v4"), "this is DeepSeek-V4, which is not"),
    "gpt-oss": (lambda folder: edit_config(folder, model_type="gpt_oss"), "this is gpt-oss, which is not converted"),
    "another model type": (
        lambda folder: edit_config(folder, model_type="kimi_k25"),
        "model_type is 'kimi_k25', but the tensors have the names of kimi-k3",
    ),
    "a draft": (renamed("language_model.model.layers", "draft.layers"), "no tensor is named"),
    "unknown names": (add(f"{LAYER}.self_attention.new.weight", SCALE), "not part of any known Kimi K3 model"),
}  # fmt: skip


@pytest.mark.quick(8)
@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_kimi_k3_in_mxfp4_is_refused_in_one_line(fault: str, k3_tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(k3_tiny, tmp_path / "source")
    change, expected = REFUSED[fault]
    change(folder)
    with pytest.raises(K2ConvertError) as refused:
        plan(folder)
    message = str(refused.value)
    assert expected in message
    assert "\n" not in message
    assert message.endswith((".", "NVFP4"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"roles": ["experts", "shared_experts"]},
            "converts shared_experts, but SGLang and TensorRT-LLM do not load it for Kimi K3",
        ),
        ({"kv_cache": "fp8"}, "most layers of Kimi K3 have no such cache"),
    ],
)
def test_recipes_that_not_every_engine_loads_are_refused(keys: dict[str, Any], expected: str, k3_tiny: Path) -> None:
    with pytest.raises(K2ConvertError, match=expected):
        plan(k3_tiny, **keys)


@pytest.mark.parametrize(
    ("byte", "expected"), [(255, r"is byte 255, which is NaN"), (254, r"is 2\*\*127, more than the 2\*\*125")]
)
def test_unusable_scales_stop_the_run_by_name(byte: int, expected: str, k3_tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(k3_tiny, tmp_path / "source")

    def change(scales: torch.Tensor) -> torch.Tensor:
        scales[3, 2] = byte
        return scales

    edit_tensor(folder, f"{EXPERT}.weight_scale", change)
    result = run_here("run", folder, tmp_path / "out", "--device", "cpu", code=1)
    assert re.search(expected, result.stderr)
    assert EXPERT in result.stderr


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "command",
    [
        ("run", "SOURCE", "OUT", "--calibrate", "TEXT"),
        ("run", "RESULT", "OUT", "--calibrate", "TEXT"),
        ("run", "SOURCE", "OUT", "--rule", "gptq"),
        ("run", "SOURCE", "OUT", "--set", "rule=gptq", "--dry-run"),
    ],
)
def test_a_calibration_is_refused(command: tuple[str, ...], k3_tiny: Path, converted: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps(list(range(64))) + "\n")
    paths = {"SOURCE": k3_tiny, "RESULT": converted, "OUT": tmp_path / "out"}
    paths |= {"TEXT": tmp_path / "text.jsonl"}
    line = messages_of(run_here(*(paths.get(word, word) for word in command), code=1).stderr)
    assert re.fullmatch(
        r"error: \S+: Kimi K3 is not calibrated on a text: .*\. Convert it without --calibrate and --rule; .*\n", line
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_a_remedy_is_one_that_kimi_k3_has(k3_tiny: Path, tmp_path: Path) -> None:
    line = messages_of(
        run_here("run", k3_tiny, tmp_path / "out", "--rule", "gptq", "--calibrate", "TEXT", code=1).stderr
    )
    assert "Convert it without --calibrate" in line
