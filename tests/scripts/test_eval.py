"""The end-to-end evaluation uses transformers' models and gives the known figures."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.moe import Mlp
from k2convert.forward.weights import DenseWeight, LinearLayer
from scripts.evaluation import smollm2
from scripts.evaluation.measure import encode
from scripts.evaluation.models import build_model, source_mlps
from scripts.fixture_maker import edges

pytestmark = pytest.mark.usefixtures("one_thread")


def test_forward_equals_transformers_with_its_own_experts(tiny: Path) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    mlps = source_mlps(tiny)
    model = build_model(tiny)
    model.install(mlps)
    ids = encode(tiny, (tiny / "eval.txt").read_text(), tokens=256)
    config = open_checkpoint(tiny).parse_config()
    del config["quantization_config"], config["model_type"]
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**config)).float().eval()
    state = {k: v for k, v in model.network.state_dict().items() if ".mlp." not in k or ".gate." in k}
    state |= linear_weights("model.layers.0.mlp", mlps["model.layers.0.mlp"])
    for layer in (1, 2, 3):
        stem = f"model.layers.{layer}.mlp"
        experts = [mlps[f"{stem}.experts.{expert}"] for expert in range(16)]
        state |= linear_weights(f"{stem}.shared_experts", mlps[f"{stem}.shared_experts"])
        state[f"{stem}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([e.gate.weight.decode(), e.up.weight.decode()]) for e in experts]
        )
        state[f"{stem}.experts.down_proj"] = torch.stack([e.down.weight.decode() for e in experts])
    theirs.load_state_dict(state, strict=True)
    with torch.inference_mode():
        ours = model.logits(ids)
        expected = theirs(ids).logits
    assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-3)


def linear_weights(stem: str, mlp: Mlp) -> dict[str, torch.Tensor]:
    parts = {"gate_proj": mlp.gate, "up_proj": mlp.up, "down_proj": mlp.down}
    return {f"{stem}.{name}.weight": projection.weight.decode() for name, projection in parts.items()}


def test_slices_of_an_mlp_add_up_to_it() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (512, 64), "up_proj": (512, 64), "down_proj": (64, 512)}
    dense = {name: torch.randn(*shape, generator=generator).mul_(0.05).bfloat16() for name, shape in shapes.items()}
    pieces: dict[str, torch.Tensor] = {}
    for name, weight in dense.items():
        pieces |= smollm2.as_moe(f"model.layers.1.mlp.{name}.weight", weight)
    hidden = torch.randn(8, 64, generator=generator)
    whole = Mlp(*(LinearLayer(DenseWeight(weight)) for weight in dense.values()))(hidden)
    parts = [f"model.layers.1.mlp.experts.{expert}" for expert in range(smollm2.NUM_EXPERTS)]
    shared = "model.layers.1.mlp.shared_experts"
    total = Mlp(*(LinearLayer(DenseWeight(pieces[f"{shared}.{name}.weight"])) for name in shapes))(hidden)
    for part in parts:
        total += Mlp(*(LinearLayer(DenseWeight(unpack(pieces, f"{part}.{name}"))) for name in shapes))(hidden)
    error = float((total - whole).square().sum() / whole.square().sum())
    assert error < 0.05  # the error of INT4, -20 dB per projection


def unpack(pieces: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    codes = edges.unpack(pieces[f"{module}.weight_packed"]).float()
    return (codes.unflatten(-1, (-1, 32)) * pieces[f"{module}.weight_scale"].float()[..., None]).flatten(-2)
