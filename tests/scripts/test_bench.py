"""The bench: what it computes from its measurements."""

import json
import subprocess
import sys

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


def test_gpu_kernels_leave_registers_for_four_programs_and_spill_none() -> None:
    """An SM has 65,536 registers, and a program has 128 lanes."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-m", "scripts.bench.registers", "90"], capture_output=True, check=True)
    figures = json.loads(done.stdout)["90"]
    assert set(figures) == {"max_kernel", "mse_kernel", "channels_kernel"}
    for kernel, found in figures.items():
        assert found["registers"] < 128, kernel
        assert found["spilled"] == found["stack"] == 0, kernel
    row = markdown({f"{kernel}, sm_90": found for kernel, found in figures.items()}).splitlines()[4]
    assert row == f"| max_kernel, sm_90 | {figures['max_kernel']['registers']} | 0 | 0 |"
