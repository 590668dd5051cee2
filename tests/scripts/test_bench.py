"""The bench: what it computes from its measurements."""

import pytest

from scripts.bench.__main__ import GPTQ_SIZES, extrapolate
from scripts.bench.table import markdown


def test_time_of_a_layer_of_k2_is_extrapolated_from_a_step_of_experts_and_a_step_of_tokens() -> None:
    seconds = {(experts, tokens): 40 + 7 * experts + 0.004 * tokens for experts, tokens in GPTQ_SIZES}
    found = extrapolate(seconds, experts=384, tokens=131_072)
    assert found["seconds"] == pytest.approx(40 + 7 * 384 + 0.004 * 131_072)
    assert found["other_seconds"] == pytest.approx(40)
    text = markdown({"extrapolated gptq": found})
    assert "384 experts with 131,072 tokens would take 0.9 h: 7.0 s an expert, 4.0 ms a token" in text
