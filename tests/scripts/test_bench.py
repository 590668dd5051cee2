"""The bench: what it computes from its measurements."""

import subprocess
import sys
from pathlib import Path

import pytest

from k2convert.calibration.cost import PassSize, Time, read_sizes, walk_steps
from k2convert.checkpoint.index import open_checkpoint
from k2convert.fit.gpus import find_gpu
from scripts.bench.gptq_steps import PANEL_FLOPS, Flops, GpuWork, gpu_steps, gpu_time, pass_work, walk_work


@pytest.mark.slow
def test_steps_of_rule_gptq_are_counted_and_add_up(tiny: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.gptq_steps", str(tiny), "--tokens", "4096"]
    shown = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown if line.startswith("|")]
    steps = rows[2:11]
    machines = rows[13:]
    assert sum(float(row[-1].removesuffix(" %")) for row in steps) == pytest.approx(100, abs=5), "rounded shares"
    assert any(" core-hours by rule gptq; " in line for line in shown)
    assert [row[0].split()[0] for row in machines] == ["16", "64", "192", "1", "8"]
    assert all("H200, from its data sheet" in row[0] and " to " in row[2] for row in machines[3:])


def test_the_time_on_a_gpu_follows_from_its_rates() -> None:
    gpu = find_gpu("h200")
    flops = Flops(tf32=1e12, fp32=1e11, fp64=1e10)
    assert gpu.bandwidth is not None
    found = gpu_time(GpuWork(tf32=7e11, fp32=7e10, fp64=7e9), gpu, flops, search=5)
    assert found == Time(pytest.approx(3 * 0.7 / 0.7 + 5), pytest.approx(3 * 0.7 / 0.2 + 5))
    found = gpu_time(GpuWork(moved=gpu.bandwidth, kernels=1e6, read=5e9), gpu, flops, search=0)
    assert found == Time(pytest.approx(4 + 1), pytest.approx(12 + 10)), "starting kernels takes longer than moving"


def test_the_work_of_a_walk_on_gpus_is_that_of_its_steps(tiny: Path) -> None:
    model = read_sizes(open_checkpoint(tiny))
    size = PassSize(16, 256, 16, ("cuda:0",), 4, 4)
    one = pass_work(model, size)
    counted = walk_steps(model, size)
    walk, many = (walk_work(model, size, gpus=gpus) for gpus in (1, 8))
    steps = gpu_steps(model, size)
    for name in ("experts, converted", "codes of gate and up"):
        assert steps[name].tf32 == counted[name].fp32
    products = sum(step.fp32 for name, step in counted.items() if not steps[name].tf32)
    panels = PANEL_FLOPS * 3 * model.num_experts * model.hidden * model.width
    assert walk.fp32 == pytest.approx(3 * (products + panels)), "three layers have experts"
    assert walk.fp64 == pytest.approx(3 * sum(step.fp64 for step in counted.values()))
    assert (one.fp32, one.fp64) == (0, 0)
    assert walk.read > one.read
    assert walk.kernels > one.kernels
    codes = 3 * steps["codes of gate and up"].kernels
    assert many.kernels == pytest.approx(walk.kernels - (one.kernels + codes) * 7 / 8), "the rest is not dealt out"
    assert many.read == walk.read
