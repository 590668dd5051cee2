"""The router and the whole MoE block are transformers' own DeepSeek-V3, to the last bit where nothing is reordered."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError
from k2convert.forward.hidden_states import draw_hidden_states
from k2convert.forward.moe import PROJECTIONS, Mlp, read_router, read_router_config, route
from k2convert.forward.weights import LinearLayer, WeightReader, exact_weight

deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


def transformers_config(config: dict[str, Any]) -> Any:
    from transformers import DeepseekV3Config

    left_out = ("quantization_config", "model_type", "architectures")
    return DeepseekV3Config(**{key: value for key, value in config.items() if key not in left_out})


@pytest.mark.parametrize(
    ("num_groups", "chosen_groups", "normalize"), [(1, 1, True), (4, 2, True), (8, 3, False), (2, 2, True)]
)
def test_router_equals_transformers(tiny: Path, num_groups: int, chosen_groups: int, normalize: bool) -> None:
    config = open_checkpoint(tiny).parse_config() | {
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "n_group": num_groups,
        "topk_group": chosen_groups,
        "norm_topk_prob": normalize,
    }
    module = deepseek.DeepseekV3TopkRouter(transformers_config(config))
    generator = torch.Generator().manual_seed(num_groups)
    weight = torch.randn(32, config["hidden_size"], generator=generator).mul_(0.05).bfloat16()
    bias = torch.randn(32, generator=generator).mul_(0.1)
    hidden = torch.randn(200, config["hidden_size"], generator=generator)
    with torch.inference_mode():
        module.weight.copy_(weight.float())
        module.e_score_correction_bias.copy_(bias)
        _, weights, experts = module(hidden)
    ours = route(hidden, weight, bias, read_router_config(config, where="test"))
    assert torch.equal(ours.experts, experts)
    assert torch.equal(ours.weights, weights)


def test_bias_takes_part_in_the_choice_but_not_in_the_weight(tiny: Path) -> None:
    config = read_router_config(open_checkpoint(tiny).parse_config(), where="test")
    hidden, weight = torch.randn(8, 256), torch.randn(16, 256) * 0.05
    bias = torch.zeros(16)
    bias[5] = 10.0
    routing = route(hidden, weight, bias, config)
    assert bool((routing.experts == 5).any(dim=-1).all())
    assert torch.allclose(routing.weights.sum(dim=-1), torch.full((8,), config.scaling_factor))


@pytest.mark.parametrize("layer", [1, 3])
def test_moe_block_equals_transformers(tiny: Path, layer: int) -> None:
    checkpoint = open_checkpoint(tiny)
    with closing(WeightReader(checkpoint)) as reader, torch.inference_mode():
        stem = f"model.layers.{layer}.mlp"
        norm = reader.read(f"model.layers.{layer}.post_attention_layernorm.weight")
        hidden = draw_hidden_states(norm, config=checkpoint.config, layer=layer, tokens=64, seed=1)
        mlps = [exact_mlp(reader, f"{stem}.experts.{expert}") for expert in range(16)]
        shared = exact_mlp(reader, f"{stem}.shared_experts")
        routing = read_router(reader, stem)(hidden)
        ours = shared(hidden)
        for expert, mlp in enumerate(mlps):
            tokens, weights = routing.tokens_of(expert)
            ours.index_add_(0, tokens, mlp(hidden[tokens]) * weights[:, None])
        theirs = transformers_block(checkpoint.parse_config(), reader, stem, mlps, shared)(hidden[None])[0]
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def exact_mlp(reader: WeightReader, stem: str) -> Mlp:
    return Mlp(*(LinearLayer(exact_weight(reader.read_source(f"{stem}.{name}"))) for name in PROJECTIONS))


def transformers_block(config: dict[str, Any], reader: WeightReader, stem: str, mlps: list[Mlp], shared: Mlp) -> Any:
    block = deepseek.DeepseekV3MoE(transformers_config(config)).float().eval()
    gate_up: list[Tensor] = [torch.cat([mlp.gate.weight.decode(), mlp.up.weight.decode()]) for mlp in mlps]
    state = {
        "gate.weight": reader.read(f"{stem}.gate.weight").float(),
        "gate.e_score_correction_bias": reader.read(f"{stem}.gate.e_score_correction_bias"),
        "experts.gate_up_proj": torch.stack(gate_up),
        "experts.down_proj": torch.stack([mlp.down.weight.decode() for mlp in mlps]),
        "shared_experts.gate_proj.weight": shared.gate.weight.decode(),
        "shared_experts.up_proj.weight": shared.up.weight.decode(),
        "shared_experts.down_proj.weight": shared.down.weight.decode(),
    }
    block.load_state_dict(state, strict=True)
    return block


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": None}, "n_group is None"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok is True"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ],
)
def test_a_router_that_cannot_be_computed_is_refused(tiny: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_router_config(open_checkpoint(tiny).config | change, where="here")
