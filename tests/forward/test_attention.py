"""The attention that a published config describes, against the formulas of DeepSeek's published code."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from k2convert.forward import attention

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
    found: list[float] = []
    for pair in range(width // 2):
        frequency = base ** (-2 * pair / width)
        stretched = min(max((pair - low) / (high - low), 0), 1)
        found.append(frequency / rope["factor"] * stretched + frequency * (1 - stretched))
    return found


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
