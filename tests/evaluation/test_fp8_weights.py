"""FP8 layers are transformers' own layers with decoded weights, whose inputs are rounded to FP8 token by token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversions import convert
from safetensors.torch import load_file
from torch import Tensor, nn
from whole_models import whole_model

import k2convert
from k2convert.check.results import LayersRequest
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError
from k2convert.forward.moe import read_mlp
from k2convert.forward.weights import WeightReader, round_tokens_to_fp8
from scripts.evaluation.measure import scores_from
from scripts.fixture_maker.folder import read_small, write_small

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

KEYS = {"layout": "compressed-tensors", "fp8": ("attention", "shared_experts", "dense_mlp")}
WINDOW: dict[str, Any] = {"tokens": 128, "window": 32, "device": "cpu"}


@pytest.fixture(scope="module")
def mixed(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(cut, tmp_path_factory.mktemp("mixed") / "out", **KEYS)


def fp8_weights(folder: Path) -> dict[str, Tensor]:
    """The decoded FP8 weights of a checkpoint, f32 [N, K], by module."""
    tensors = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    codes = {name: t.float() for name, t in tensors.items() if name.endswith(".weight") and t.itemsize == 1}
    return {name.removesuffix(".weight"): t * tensors[f"{name}_scale"] for name, t in codes.items()}


def round_input(_layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """As vLLM's kernels: amax of each token over 448, E4M3, ties to even."""
    (x,) = inputs
    scale = x.abs().amax(dim=-1, keepdim=True) / 448
    return (torch.where(scale > 0, (x / scale).to(torch.float8_e4m3fn).float() * scale, x),)


def attention_in_fp8(source: Path, weights: dict[str, Tensor]) -> Any:
    """transformers' network of the source with the FP8 layers of attention, and nothing else, in FP8."""
    model = whole_model(source)
    layers = dict(model.network.named_modules())
    for module in (name for name in weights if ".self_attn." in name):
        layer: Any = layers[module]
        layer.weight = nn.Parameter(weights[module], requires_grad=False)
        layer.register_forward_pre_hook(round_input)
    return model


def test_attention_is_transformers_with_decoded_weights_and_rounded_inputs(
    cut: Path, mixed: Path, ids: Path, tmp_path: Path
) -> None:
    checkpoint, weights = read_small(cut), read_small(mixed)
    attention = {name for name in weights.tensors() if ".self_attn." in name}
    for members in checkpoint.shards.values():  # of the source, with the attention of the result
        for name in [name for name in members if name in attention]:
            members[name] = weights.tensors()[name]
            if f"{name}_scale" in attention:
                members[f"{name}_scale"] = weights.tensors()[f"{name}_scale"]
    folder = write_small(checkpoint, tmp_path / "attention")
    (row,) = k2convert.evaluate(cut, [folder], [ids], out=tmp_path / "out.json", **WINDOW).rows
    tokens = torch.as_tensor(np.load(ids))
    with torch.inference_mode():
        expected = attention_in_fp8(cut, fp8_weights(folder)).logits(tokens)
        scores = scores_from(whole_model(cut).logits(tokens), expected, tokens)
    assert row.figures.divergence.mean == pytest.approx(float(scores.divergence.mean()), rel=1e-3)
    assert row.figures.divergence.mean > 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("module", ["model.layers.0.mlp", "model.layers.1.mlp.shared_experts"])
def test_an_mlp_has_decoded_weights_and_rounded_inputs(module: str, mixed: Path) -> None:
    weights = fp8_weights(mixed)
    gate, up, down = (weights[f"{module}.{name}_proj"] for name in ("gate", "up", "down"))
    x = torch.randn(5, gate.shape[1], generator=torch.Generator().manual_seed(0))
    x[3] = 0
    (rounded,) = round_input(nn.Identity(), (x,))
    (inner,) = round_input(nn.Identity(), (nn.functional.silu(rounded @ gate.T) * (rounded @ up.T),))
    reader = WeightReader(open_checkpoint(mixed))
    for fp4_inputs in (False, True):
        output = read_mlp(reader, module, fp4_inputs=fp4_inputs)(x)
        torch.testing.assert_close(output, inner @ down.T, rtol=1e-4, atol=1e-5)
    reader.close()


def test_a_token_is_rounded_by_its_own_largest_number() -> None:
    x = torch.tensor([[448.0, 1.0, 1.0625, -3.3], [0.0, 0.0, 0.0, -0.0], [7e-8, 0.0, 1e-8, -7e-8]])
    rounded = round_tokens_to_fp8(x)
    assert rounded[0].tolist() == [448.0, 1.0, 1.0, -3.25]
    assert rounded[1].tolist() == [0.0] * 4
    assert rounded[2, 0] == pytest.approx(7e-8, rel=1e-6)


def test_a_result_is_evaluated_and_its_layers_are_measured(cut: Path, mixed: Path, ids: Path, tmp_path: Path) -> None:
    experts_only = convert(cut, tmp_path / "experts", layout="compressed-tensors")
    rows = k2convert.evaluate(cut, [experts_only, mixed], [ids], out=tmp_path / "out.json", **WINDOW).rows
    assert rows[1].figures.divergence.mean != rows[0].figures.divergence.mean
    report = validate_checkpoint(folder=mixed, source=open_checkpoint(cut), layers=LayersRequest((1,), None, tokens=32))
    assert report.layers is not None, report.layers_skipped
    shared = report.layers.layers[0].errors[0].shared_experts_sqnr_db
    assert shared is not None
    assert 22 < shared < 40


@pytest.mark.parametrize("form", ["one scale", "kv_b_proj"])
def test_fp8_of_another_form_is_refused(form: str, cut: Path, mixed: Path, ids: Path, tmp_path: Path) -> None:
    checkpoint = read_small(mixed)
    for members in checkpoint.shards.values():
        for name in [name for name in members if name.endswith(".self_attn.kv_b_proj.weight")]:
            if form == "kv_b_proj":
                members[name] = members[name].to(torch.float8_e4m3fn)
                members[f"{name}_scale"] = torch.ones(len(members[name]), 1)
        for name in [name for name in members if name.endswith(".self_attn.o_proj.weight_scale")]:
            if form == "one scale":
                members[name] = torch.ones(())
    folder = write_small(checkpoint, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"is F8_E4M3 .* Only FP8 as k2convert writes it"):
        k2convert.evaluate(cut, [folder], [ids], out=tmp_path / "out.json", **WINDOW)


@torch.inference_mode()
def test_a_weight_in_blocks_has_inputs_rounded_for_128_columns(k3_tiny: Path, tmp_path: Path) -> None:
    """As ModelOpt's FP8_PB_WO, which engines read: one scale for each block, and one for 128 inputs of a token."""
    folder = convert(k3_tiny, tmp_path / "out", fp8=("attention",))
    reader = WeightReader(open_checkpoint(folder))
    for name in ("1.self_attn.q_proj", "1.self_attn.o_proj", "3.self_attn.kv_a_proj_with_mqa"):
        module = f"language_model.model.layers.{name}"
        stored = read_small(folder).tensors()
        codes, scales = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
        rows, columns = codes.shape
        spread = scales[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        weight = reader.read_fp8(module)
        torch.testing.assert_close(weight.decode(), codes.float() * spread, rtol=0, atol=0)
        torch.testing.assert_close(weight.rows(7, 40), weight.decode()[7:40], rtol=0, atol=0)
        x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, columns)
        rounded = torch.cat([round_input(nn.Identity(), (part,))[0] for part in x.split(128, dim=1)], dim=1)
        torch.testing.assert_close(weight.linear(x), rounded @ weight.decode().T, rtol=1e-4, atol=1e-4)
    reader.close()
