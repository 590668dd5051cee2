"""The router is transformers' own DeepSeek-V3, to the last bit; test_decoder.py compares the whole network."""

from pathlib import Path
from typing import Any

import pytest
import torch

from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError
from k2convert.forward.moe import read_router_config, route

deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


@pytest.mark.parametrize(
    ("num_groups", "chosen_groups", "normalize"), [(1, 1, True), (4, 2, True), (8, 3, False), (2, 2, True)]
)
def test_router_equals_transformers(tiny: Path, num_groups: int, chosen_groups: int, normalize: bool) -> None:
    from transformers import DeepseekV3Config

    config = open_checkpoint(tiny).parse_config() | {
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "n_group": num_groups,
        "topk_group": chosen_groups,
        "norm_topk_prob": normalize,
    }
    left_out = ("quantization_config", "model_type", "architectures")
    theirs = DeepseekV3Config(**{key: value for key, value in config.items() if key not in left_out})
    module = deepseek.DeepseekV3TopkRouter(theirs)
    generator = torch.Generator().manual_seed(num_groups)
    weight = torch.randn(32, config["hidden_size"], generator=generator).mul_(0.05).bfloat16()
    bias = torch.randn(32, generator=generator).mul_(0.1)
    hidden = torch.randn(200, config["hidden_size"], generator=generator)
    with torch.inference_mode():
        module.weight.copy_(weight.float())
        module.e_score_correction_bias.copy_(bias)
        _, weights, experts = module(hidden)
    ours = route(hidden, weight, bias, read_router_config(config, where="test", num_experts=32))
    assert torch.equal(ours.experts, experts)
    assert torch.equal(ours.weights, weights)


def test_bias_takes_part_in_the_choice_but_not_in_the_weight(tiny: Path) -> None:
    config = read_router_config(open_checkpoint(tiny).parse_config(), where="test", num_experts=16)
    hidden = torch.randn(8, 256)
    weight = torch.randn(16, 256) * 0.05
    bias = torch.zeros(16)
    bias[5] = 10.0
    routing = route(hidden, weight, bias, config)
    assert bool((routing.experts == 5).any(dim=-1).all())
    assert torch.allclose(routing.weights.sum(dim=-1), torch.full((8,), config.scaling_factor))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": None}, "n_group is None"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok is True"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, but the router of 16 experts accepts 1 to 16"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17"),
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, .* accepts 1 to 8"),
        ({"n_group": 3}, "n_group is 3, which does not divide 16 experts"),
        ({"n_group": 0}, "n_group is 0"),
        ({"topk_group": 2}, "topk_group is 2"),
    ],
)
def test_a_router_that_cannot_be_computed_is_refused(tiny: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_router_config(open_checkpoint(tiny).config | change, where="here", num_experts=16)
