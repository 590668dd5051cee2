"""Recipes with FP8: the sizes of results to the byte, and every refused combination in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import plan_job

from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import K2ConvertError
from k2convert.plan.plan import Fp8Step, action_counts, plan_conversion
from k2convert.plan.recipe import load_recipe
from scripts.fixture_maker.folder import read_small, write_small
from scripts.fixture_maker.headers import make_k25_headers

ALL = ("attention", "shared_experts", "dense_mlp")
K2 = {ALL: 585_518_533_888, ("attention",): 588_554_427_648, ALL[1:]: 591_170_011_136}


@pytest.mark.slow
def test_k2_thinking_has_the_known_sizes(k2_headers: Path) -> None:
    source = open_checkpoint(k2_headers)
    for roles, size in K2.items():
        plan = plan_conversion(source=source, recipe=load_recipe("kimi-k2-thinking-nvfp4-fp8", {"fp8": list(roles)}))
        assert plan.data_bytes == size, roles
    counts = action_counts(plan_conversion(source=source, recipe=load_recipe("kimi-k2-thinking-nvfp4-fp8")))
    assert counts["fp8"]["source_tensors"] == 4 * 61 + 3 * 60 + 3
    assert counts["fp8"]["tensors"] == 2 * counts["fp8"]["source_tensors"]
    assert counts["convert"]["projections"] == 69_120


@pytest.mark.slow
def test_k25_has_the_known_size(tmp_path: Path) -> None:
    source = open_checkpoint(make_k25_headers(tmp_path / "k2.5"))
    assert plan_conversion(source=source, recipe=load_recipe("kimi-k2.5-nvfp4-fp8")).data_bytes == 586_460_821_728


def test_every_linear_layer_of_attention_but_kv_b_becomes_fp8(tiny: Path) -> None:
    plan = plan_conversion(source=open_checkpoint(tiny), recipe=load_recipe("kimi-k2-thinking-nvfp4-fp8"))
    steps = [step for job in plan.jobs for step in job.steps if isinstance(step, Fp8Step)]
    names = {step.module.partition("layers.1.")[2] for step in steps} - {""}
    attention = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj")
    shared = ("gate_proj", "up_proj", "down_proj")
    assert names == {*(f"self_attn.{n}" for n in attention), *(f"mlp.shared_experts.{n}" for n in shared)}


FP8: dict[str, Any] = {"fp8": ["attention"], "layout": "compressed-tensors"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a role twice": (FP8 | {"fp8": ["attention", "attention"]}, "a role is repeated"),
    "the output head": (FP8 | {"fp8": ["lm_head"]}, "must be 'attention', 'shared_experts' or 'dense_mlp'"),
    "the router": (FP8 | {"fp8": ["router"]}, "must be 'attention', 'shared_experts' or 'dense_mlp'"),
    "experts": (FP8 | {"fp8": ["experts"]}, "must be 'attention', 'shared_experts' or 'dense_mlp'"),
    "a word": (FP8 | {"fp8": "attention"}, "must be a list, as in `fp8: [attention]`"),
    "both lists": (
        FP8 | {"roles": ["experts", "dense_mlp"], "fp8": ["dense_mlp"]},
        "dense_mlp is in roles and in fp8. Remove it from one of the two.",
    ),
    "the layout modelopt": (FP8 | {"layout": "modelopt"}, "Use --layout compressed-tensors, or remove fp8"),
    "target bf16": ({"fp8": ["attention"], "target": "bf16"}, "target bf16 converts nothing to FP8. Leave out fp8."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_fp8_is_refused_in_a_line(case: str, tiny: Path, tmp_path: Path) -> None:
    keys, problem = REFUSED[case]
    with pytest.raises(K2ConvertError) as caught:
        plan_job(tiny, tmp_path / "out", **keys)
    message = str(caught.value)
    assert problem in message
    assert "\n" not in message


@pytest.mark.slow
def test_k3_has_the_size_of_nvidia_s(k3_headers: Path) -> None:
    plan = plan_conversion(source=open_checkpoint(k3_headers), recipe=load_recipe("kimi-k3-nvfp4-fp8"))
    assert plan.data_bytes == 1_609_777_087_808
    counts = action_counts(plan)["fp8"]
    assert (counts["source_tensors"], counts["tensors"]) == (696, 2 * 696)
    steps = [step for job in plan.jobs for step in job.steps if isinstance(step, Fp8Step)]
    assert sum(step.partner is not None for step in steps) == 2 * 24
    assert len(plan.fp8_layers) == 3 * (696 + 2 * 93 + 2 * 24)


def test_every_linear_layer_of_k3_s_attention_becomes_fp8(k3_tiny: Path) -> None:
    plan = plan_conversion(source=open_checkpoint(k3_tiny), recipe=load_recipe("kimi-k3-nvfp4-fp8"))
    steps = {s.module.rpartition("layers.")[2]: s for job in plan.jobs for s in job.steps if isinstance(s, Fp8Step)}
    kda = {"q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "f_a_proj", "f_b_proj", "b_proj"}
    mla = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj"}
    assert steps.keys() == {*(f"{n}.self_attn.{p}" for n in (0, 1, 2) for p in kda), *(f"3.self_attn.{p}" for p in mla)}
    joined = {name for name, step in steps.items() if step.partner is not None}
    assert joined == {"3.self_attn.g_proj", "3.self_attn.kv_a_proj_with_mqa"}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"layout": "compressed-tensors"},
            "SGLang does not load FP8 for Kimi K3 in the layout compressed-tensors. Use",
        ),
        ({"fp8": ["attention", "shared_experts"]}, "fp8 names shared_experts, but SGLang and TensorRT-LLM do not load"),
        ({"fp8": ["dense_mlp"]}, "fp8 names dense_mlp, but SGLang and TensorRT-LLM do not load it in FP8 for Kimi K3"),
    ],
)
def test_what_engines_do_not_load_for_kimi_k3_is_refused(
    keys: dict[str, Any], problem: str, k3_tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(K2ConvertError) as caught:
        plan_job(k3_tiny, tmp_path / "out", **{"fp8": ["attention"], **keys})
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_attention_of_kimi_k3_that_is_quantized_already_is_refused(
    dtype: torch.dtype, k3_tiny: Path, tmp_path: Path
) -> None:
    name = "language_model.model.layers.1.self_attn.o_proj.weight"

    def quantize(members: dict[str, torch.Tensor]) -> None:
        if name in members:
            members[name] = members[name].to(dtype)
            members[f"{name}_scale"] = torch.ones(4, 1, 1, 1)

    with pytest.raises(K2ConvertError, match=r"o_proj\.weight|an FP8 checkpoint"):
        plan_job(changed(k3_tiny, tmp_path / "quantized", quantize), tmp_path / "out", fp8=["attention"])


def changed(tiny: Path, folder: Path, change: Any) -> Path:
    checkpoint = read_small(tiny)
    for members in checkpoint.shards.values():
        change(members)
    return write_small(checkpoint, folder)


def test_attention_that_is_not_in_bf16_is_refused(tiny: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"

    def to_int8(members: dict[str, torch.Tensor]) -> None:
        if name in members:
            members[name] = members[name].to(torch.int8)

    with pytest.raises(K2ConvertError, match=r"o_proj\.weight"):
        plan_job(changed(tiny, tmp_path / "int8", to_int8), tmp_path / "out", **FP8)


def test_attention_of_other_layers_than_k2_s_is_refused(tiny: Path, tmp_path: Path) -> None:
    def to_plain_query(members: dict[str, torch.Tensor]) -> None:
        for name in [name for name in members if "q_a_" in name or "q_b_" in name]:
            weight = members.pop(name)
            if "q_b_proj" in name:
                members[name.replace("q_b_proj", "q_proj")] = weight.new_zeros(weight.shape[0], 256)

    folder = changed(tiny, tmp_path / "plain", to_plain_query)
    config = json.loads((folder / "config.json").read_text()) | {"q_lora_rank": None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(K2ConvertError, match=r"q_proj.weight: FP8 is known .* Kimi K2 only, .* Remove attention from"):
        plan_job(folder, tmp_path / "out", **FP8)
    plan_job(folder, tmp_path / "out", **FP8 | {"fp8": ["dense_mlp"]})


def test_a_role_without_weights_is_refused(tiny: Path, tmp_path: Path) -> None:
    def without_shared(members: dict[str, torch.Tensor]) -> None:
        for name in [name for name in members if "shared_experts" in name]:
            del members[name]

    folder = changed(tiny, tmp_path / "plain", without_shared)
    config = json.loads((folder / "config.json").read_text()) | {"n_shared_experts": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(K2ConvertError, match="fp8 names the role shared_experts, but no tensor has it"):
        plan_job(folder, tmp_path / "out", fp8=["shared_experts"], layout="compressed-tensors")
