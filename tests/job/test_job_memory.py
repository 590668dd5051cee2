"""The memory of a job: it plans with what its cgroup gives it, and stays below that."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import command, run_here
from fake_system import limit_by_version_1, limit_by_version_2, write

from k2convert import machine
from scripts.fixture_maker import K2Shape, make_k2_shaped, make_k2_thinking_headers
from scripts.fixture_maker.inventory import K2_SHAPE

SHAPE = K2Shape(
    hidden=2048, moe_intermediate=512, dense_intermediate=4096, experts=8, moe_layers=1, dense_layers=1,
    vocabulary=1024, heads=16, q_lora_rank=256, kv_lora_rank=128,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_k2_is_planned_in_a_cgroup(system: Path, tmp_path: Path, version: int, k2_headers: Path) -> None:
    write(system, "proc/self/cgroup", "0::/job" if version == 2 else "2:cpu,cpuacct:/job\n4:memory:/job")
    if version == 2:
        limit_by_version_2(system, "job", cpus="100000 100000", memory=1 << 30, used=100 << 20, cached=0)
    else:
        limit_by_version_1(system, "job", quota=100_000, memory=1 << 30, used=100 << 20, cached=0)
    planned = planned_memory(k2_headers, tmp_path / "out")
    # Only what the process has in this test counts beside the plan: it is not the command alone.
    assert 0 < planned["needed"] - machine.peak_bytes() < 0.5e9
    assert planned["available"] == 924 << 20
    plan = planned["plan"]
    assert (plan["num_tensors_out"], plan["tensor_bytes_out"]) == (277_335, 594_205_904_896)
    assert plan["actions"]["convert"]["projections"] == 69_120
    assert plan["shards"][0]["name"] == "model-00001-of-000062.safetensors"


@pytest.mark.slow
def test_memory_bounds_the_plan_on_many_cores(system: Path, tmp_path: Path, tiny: Path) -> None:
    source = make_k2_thinking_headers(tmp_path / "k2", shape=replace(K2_SHAPE, moe_layers=2))
    before = planned_memory(source, tmp_path / "out")
    write(system, "proc/self/cgroup", "0::/job")
    limit_by_version_2(system, "job", cpus="max 100000", memory=1 << 30, used=100 << 20, cached=0)
    after = planned_memory(source, tmp_path / "out")
    assert before["needed"] - machine.peak_bytes() > 20e9
    assert after["needed"] - machine.peak_bytes() < 924 << 20
    limit_by_version_2(system, "job", cpus="max 100000", memory=200 << 20, used=150 << 20, cached=0)
    for more, remedy in (((), "a"), (("--dry-run",), "a"), (("--workers", "2"), "fewer --workers, a")):
        refused = run_here("run", tiny, tmp_path / "out", *more, code=1)
        words = rf"needs about [\d.]+ MB of memory, but [\d.]+ MB is available\. Use {remedy} "
        assert re.search(words, refused.stderr)


@pytest.mark.parametrize("cpus", ["4", ""])
def test_a_task_of_slurm(system: Path, tmp_path: Path, tiny: Path, cpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task of the guide has 4 CPUs and 4 GB. Its machine has 192 and 256 GB."""
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "4096")
    planned = planned_memory(tiny, tmp_path / "out")
    assert planned["needed"] < planned["available"] < 4096 << 20


def planned_memory(source: Path, out: Path) -> dict[str, Any]:
    done = run_here("run", source, out, "--dry-run", "--json")  # it may be refused for lack of disk in the end
    plan = json.loads(done.stdout)
    note = "".join(line for line in done.stderr.splitlines() if "memory is available" in line)
    return {"needed": plan["memory_needed"], "available": plan["memory_available"], "note": note, "plan": plan}


@contextmanager
def cgroup(*, memory: int, cores: int) -> Generator[Callable[[], None]]:
    """Make a cgroup; yields the call by which a new process enters it. Skips the test where none can be made."""
    top = Path("/sys/fs/cgroup")
    name = f"k2convert-test-{os.getpid()}"
    settings: dict[Path, dict[str, object]] = {
        top / "memory" / name: {"memory.limit_in_bytes": memory},
        top / "cpu" / name: {"cpu.cfs_quota_us": 100_000 * cores, "cpu.cfs_period_us": 100_000},
    }
    if (top / "cgroup.controllers").exists():
        settings = {top / name: {"memory.max": memory, "cpu.max": f"{100_000 * cores} 100000"}}
    cgroups: list[Path] = []

    def enter() -> None:
        for folder in cgroups:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    try:
        try:
            for folder, values in settings.items():
                folder.mkdir()
                cgroups.append(folder)
                for file, value in values.items():
                    (folder / file).write_text(str(value))
        except OSError as error:
            pytest.skip(f"no cgroup can be made here: {error}")
        yield enter
    finally:
        for folder in cgroups:
            folder.rmdir()


@pytest.mark.quick(1)
@pytest.mark.parametrize(("memory", "experts"), [(500_000_000, 8), (1 << 30, 32)])
def test_a_conversion_finishes_in_a_real_cgroup_of_one_core(memory: int, experts: int, tmp_path: Path) -> None:
    """The slow one has 2 GB of weights and the memory of a small container."""
    shape = replace(SHAPE, experts=experts)
    if experts > 8:
        shape = replace(shape, hidden=7168, moe_intermediate=2048, dense_intermediate=18432, heads=64)
    source = make_k2_shaped(tmp_path / "source", shape=shape)
    words = command("run", source, tmp_path / "out", "--device", "cpu")
    with cgroup(memory=memory, cores=1) as enter:
        dry = subprocess.run([*words, "--dry-run", "--json"], capture_output=True, check=True, preexec_fn=enter)
        document = json.loads(dry.stdout)
        done = subprocess.run([*words, "--quiet"], capture_output=True, text=True, check=False, preexec_fn=enter)
    assert document["memory_needed"] < memory
    assert document["memory_available"] < memory
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_fp8_needs_the_memory_of_a_run_without(tmp_path: Path) -> None:
    """Of K2's width: its dense MLP has matrices of 264 MB. The dry run's figure is right within a quarter for both."""
    shape = K2Shape(experts=16, moe_layers=1, vocabulary=1024)
    source = make_k2_shaped(tmp_path / "source", shape=shape)
    peaks = list[int]()
    for recipe in ("kimi-k2-thinking-nvfp4", "kimi-k2-thinking-nvfp4-fp8"):
        words = command("run", source, tmp_path / recipe, "--recipe", recipe, "--device", "cpu")
        dry = subprocess.run([*words, "--dry-run", "--json"], capture_output=True, check=True)
        done = subprocess.run([sys.executable, "-c", PEAK, *words, "--quiet"], capture_output=True, check=True)
        peaks.append(int(done.stdout.split()[-1]) * 1024)
        assert peaks[-1] < 1.25 * json.loads(dry.stdout)["memory_needed"]
    assert peaks[1] < 1.1 * peaks[0]


PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
