"""The bench: what it computes from its measurements."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_steps_of_rule_gptq_are_counted_and_add_up(tiny: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.gptq_steps", str(tiny), "--tokens", "4096"]
    shown = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown if line.startswith("|")][2:]
    assert len(rows) == 10
    assert sum(float(row[-1].removesuffix(" %")) for row in rows) == pytest.approx(100, abs=5), "rounded shares"
    assert "core-hours; " in shown[-2]
    assert shown[-1].startswith("One H200, from its data sheet: ")
