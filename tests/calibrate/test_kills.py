"""A pass that is killed is continued to the same statistics file, byte for byte."""

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


def drive(tiny: Path, folder: Path, number: int) -> dict[str, Any]:
    """What kill_driver.py found."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    text = folder / "text.txt"
    text.write_text((tiny / "calibration.txt").read_text()[:4000])
    command = [sys.executable, HERE / "kill_driver.py", tiny, text, folder, str(number)]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def kills(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Kills at a random moment and at every layer boundary, an interrupt, and a run without room."""
    return drive(tiny, tmp_path_factory.mktemp("kills"), 1)


def test_a_killed_pass_resumes_to_the_same_file(kills: dict[str, Any]) -> None:
    assert kills["wrong"] == []
    assert kills["kills"] >= 3
    assert len(kills["done"]) >= 3, "it was killed after different layers"


def test_a_full_disk_is_one_line_and_the_pass_resumes(kills: dict[str, Any]) -> None:
    full = kills["full"]
    assert full["code"] == 1
    [line] = full["text"].splitlines()
    assert line.startswith("error: ")
    assert "hidden-001.safetensors: writing failed (File too large). Finished work is kept:" in line


def test_ctrl_c_says_what_is_done_and_the_command_that_resumes(kills: dict[str, Any]) -> None:
    interrupted = kills["interrupted"]
    assert interrupted["code"] == 130
    state, command = interrupted["text"].splitlines()
    assert re.fullmatch(r"interrupted: [1-4] of 4 layers are done\. The same command resumes", state)
    assert command.startswith("next: k2convert calibrate ")
    assert command.endswith(" --tokens 256 --window 64 --device cpu --quiet")


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tiny: Path, tmp_path: Path) -> None:
    found = drive(tiny, tmp_path, 20)
    assert found["wrong"] == []
    assert found["kills"] >= 15
