"""Router and attention of a config compute as transformers does, or are refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError
from k2convert.forward import attention
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


pytest.importorskip("transformers")

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "published-configs"


def yarn_frequencies(text: dict[str, Any]) -> list[float]:
    """The frequencies of each pair of rotary channels, as modeling_deepseek.py computes them."""
    rope = text["rope_scaling"]
    width = text["qk_rope_head_dim"]
    base = text["rope_theta"]

    def channel(rotations: float) -> float:
        length = rope["original_max_position_embeddings"]
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(channel(rope["beta_fast"])), 0)
    high = min(math.ceil(channel(rope["beta_slow"])), width - 1)
    high += 0.001 if low == high else 0
    frequencies: list[float] = []
    for pair in range(width // 2):
        frequency = base ** (-2 * pair / width)
        stretched = min(max((pair - low) / (high - low), 0), 1)
        frequencies.append(frequency / rope["factor"] * stretched + frequency * (1 - stretched))
    return frequencies


@pytest.mark.parametrize("name", ["moonshotai--Kimi-K2.5_config.json", "moonshotai--Kimi-K2-Instruct_config.json"])
def test_the_attention_of_published_configs(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    config = json.loads((CONFIGS / name).read_text())
    text = config.get("text_config", config)
    rotary, modules = attention.build_attention(config, where=name)
    assert rotary.inv_freq.tolist() == pytest.approx(yarn_frequencies(text), rel=1e-5)
    assert rotary.attention_scaling == 1, "mscale and mscale_all_dim are equal"
    mscale = 0.1 * math.log(text["rope_scaling"]["factor"]) + 1
    assert modules.self_attn.scaling == pytest.approx((128 + 64) ** -0.5 * mscale**2)
    shapes = {name: tuple(value.shape) for name, value in modules.state_dict().items()}
    assert shapes["self_attn.q_b_proj.weight"] == (64 * (128 + 64), 1536)
    assert shapes["self_attn.kv_a_proj_with_mqa.weight"] == (512 + 64, 7168)
    assert shapes["self_attn.kv_b_proj.weight"] == (64 * (128 + 128), 512)
    assert shapes["self_attn.o_proj.weight"] == (7168, 64 * 128)
    assert modules.input_layernorm.variance_epsilon == text["rms_norm_eps"]
    assert capfd.readouterr() == ("", ""), "transformers has nothing to warn of"


@pytest.mark.parametrize("mla", [{"kv_lora_rank": 512}, {}])
def test_a_small_vocabulary_is_nothing_to_warn_of(mla: dict[str, int], capfd: pytest.CaptureFixture[str]) -> None:
    attention.build_attention(
        {"vocab_size": 1, "bos_token_id": 163584, "eos_token_id": 163586, **mla}, where="config.json"
    )
    assert capfd.readouterr() == ("", "")
