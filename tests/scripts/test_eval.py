"""The end-to-end evaluation uses transformers' models and gives the known figures."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.moe import Mlp
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


@pytest.mark.parametrize(("projection", "dimension"), [("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)])
def test_slices_of_an_mlp_are_its_weights(projection: str, dimension: int) -> None:
    shape = (64, 512) if dimension else (512, 64)
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul_(0.05).bfloat16()
    pieces = smollm2.as_moe(f"model.layers.1.mlp.{projection}.weight", weight)
    slices = [pieces[f"model.layers.1.mlp.shared_experts.{projection}.weight"].float()]
    for expert in range(smollm2.NUM_EXPERTS):
        module = f"model.layers.1.mlp.experts.{expert}.{projection}"
        codes = edges.unpack(pieces[f"{module}.weight_packed"]).float().unflatten(-1, (-1, 32))
        slices.append((codes * pieces[f"{module}.weight_scale"].float()[..., None]).flatten(-2))
    error = torch.cat(slices, dim=dimension) - weight
    assert error.square().sum() < 0.01 * weight.float().square().sum()  # the error of INT4
