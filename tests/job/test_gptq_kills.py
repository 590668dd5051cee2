"""`run --calibrate` that is killed is continued to the same result, byte for byte, and never looks finished before."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def drive(short: Path, folder: Path, number: int) -> dict[str, Any]:
    """What gptq_driver.py found."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    text = folder / "text.txt"
    text.write_text((short / "calibration.txt").read_text()[:6000])
    command = [sys.executable, HERE / "gptq_driver.py", short, text, folder, str(number)]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def kills(short: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Kills at a random moment and at every layer boundary, a run without room, an interrupt, and a lost shard."""
    return drive(short, tmp_path_factory.mktemp("kills"), 1)


def test_a_killed_run_resumes_to_the_same_bytes_and_never_looks_finished(kills: dict[str, Any]) -> None:
    assert kills["wrong"] == []
    assert kills["kills"] >= 3
    assert len(kills["done"]) >= 3, "it was killed after different layers"
    assert kills["swept"] == [], "work that is left of a finished run"


def test_a_full_disk_is_one_line_and_the_run_resumes(kills: dict[str, Any]) -> None:
    full = kills["full"]
    assert full["code"] == 1
    line = full["text"].splitlines()[-1]
    assert line.startswith("error: ")
    assert "writing failed (File too large). Finished work is kept:" in line


def test_ctrl_c_says_what_is_done_and_the_command_that_resumes(kills: dict[str, Any]) -> None:
    interrupted = kills["interrupted"]
    assert interrupted["code"] == 130
    state, command = interrupted["text"].splitlines()[-2:]
    assert re.fullmatch(r"interrupted: [1-3] of 4 shards are converted\. The same command resumes", state)
    assert command.startswith("next: k2convert run ")
    assert command.endswith(" --device cpu")


def test_a_lost_shard_whose_codes_are_gone_starts_the_walk_again(kills: dict[str, Any]) -> None:
    assert kills["interrupted"]["done"] >= 2
    assert re.search(
        r"codes-001\.safetensors: missing: the calibration starts again at the beginning",
        kills["again"],
    )


@pytest.mark.slow
def test_killed_at_twenty_random_moments_with_gptq(short: Path, tmp_path: Path) -> None:
    found = drive(short, tmp_path, 20)
    assert found["wrong"] == []
    assert found["kills"] >= 15
