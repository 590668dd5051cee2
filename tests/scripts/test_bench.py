"""The bench: what it computes from its measurements."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_steps_of_rule_gptq_are_counted_and_add_up(tiny: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.gptq_steps", str(tiny), "--tokens", "4096"]
    shown = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown if line.startswith("|")]
    steps = rows[2:11]
    machines = rows[13:]
    assert sum(float(row[-1].removesuffix(" %")) for row in steps) == pytest.approx(100, abs=5), "rounded shares"
    assert any(" core-hours by rule gptq; " in line for line in shown)
    assert [row[0].split()[0] for row in machines] == ["16", "64", "192"]
