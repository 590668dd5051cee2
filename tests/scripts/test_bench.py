"""The bench: what it computes from its measurements."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.table import markdown


def test_steps_of_rule_gptq_are_counted_and_add_up(tiny: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.gptq_steps", str(tiny), "--tokens", "4096"]
    shown = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown if line.startswith("|")][2:]
    assert len(rows) == 10
    assert sum(float(row[-1].removesuffix(" %")) for row in rows) == pytest.approx(100, abs=5), "rounded shares"
    assert "core-hours; " in shown[-2]
    assert shown[-1].startswith("One H200, from its data sheet: ")


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
