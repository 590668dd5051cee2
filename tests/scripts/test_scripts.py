"""Scripts that need another machine, a compiler or a device: what they compute, refuse and report."""

import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.gpu_day import Step, run_day, steps
from scripts.fixture_maker import TINY

ROOT = TINY.parents[2]


@pytest.mark.slow
def test_the_day_of_a_gpu_is_refused_in_one_line_without_a_device(tmp_path: Path) -> None:
    """By the script, before it installs anything, and by the module, if torch finds no device."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    hidden = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    for command in ([ROOT / "scripts" / "gpu_day"], [sys.executable, "-m", "scripts.bench.gpu_day"]):
        done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert "CUDA" in line
        assert "Use a machine with an NVIDIA GPU" in line


def test_a_failed_step_of_the_day_stops_no_other_and_stands_in_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    todo = [
        Step("First", ["sh", "-c", "echo what the step printed; exit 3"]),
        Step("Second", ["sh", "-c", "echo more"]),
    ]
    assert not run_day(todo, report, "Some GPU, sm_90")
    text = report.read_text()
    assert text.startswith("# Some GPU, sm_90\n")
    assert "| First | failed with code 3 |" in text
    assert "| Second | succeeded |" in text
    assert "\nwhat the step printed\n" in text
    assert run_day(todo[1:], report, "Some GPU, sm_90")


@pytest.mark.slow
def test_every_step_but_the_benchmarks_succeeds_on_a_cpu_too(tmp_path: Path) -> None:
    """With a layer of eight experts. The tests on a GPU are skipped there; the benchmarks of rule gptq need one."""
    (tmp_path / "results").mkdir()
    benchmarks = ("Speed", "FP8 layers", "Rule gptq", "Rule gptq, kernel by kernel")
    todo = [step for step in steps(tmp_path, device="cpu", experts=8) if step.title not in benchmarks]
    assert run_day(todo, tmp_path / "report.md", "no GPU"), (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_the_wheel_runs_the_main_job_without_a_compiler_and_without_torch() -> None:
    done = subprocess.run([ROOT / "scripts" / "wheel"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"manylinux_2_34_{platform.machine()}.whl: built, installed and run")


def test_the_hubs_command_takes_the_line_for_its_jobs(tmp_path: Path) -> None:
    line = re.search(
        r"^    (hf jobs uv run .*)$", (ROOT / "k2convert" / "guide" / "cluster.md").read_text(), flags=re.MULTILINE
    )
    assert line is not None
    words = shlex.split(line[1].replace("WHEEL", "https://example.org/k2convert-0.2.0-cp312-cp312-linux_x86_64.whl"))
    done = subprocess.run(
        [Path(sys.executable).with_name("hf"), *words[1:4], "--dry-run", *words[4:]],
        env={"HF_TOKEN": "hf_x", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_UPDATE_CHECK": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    job = words[words.index("k2convert") + 1 :]
    assert re.search(rf"script\s+k2convert\n\s+args\s+{re.escape(' '.join(job))}\n", done.stdout), done.stdout
    assert job[0] == "run"
    assert job[-1] == "--yes"
