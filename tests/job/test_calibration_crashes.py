"""`calibrate` and `run --calibrate` that crash, are interrupted or run out of disk continue to identical bytes."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from crash_runs import crash

USE = "calibration={tokens: 128, window: 32}"
CPU = ("--device", "cpu")
COMMANDS = ("calibrate", "run --calibrate")


def words(command: str, source: Path, folder: Path) -> list[object]:
    """A calibration on 128 tokens."""
    ids = folder / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(0, 2048, (4, 32)))
    if command == "calibrate":
        return ["calibrate", source, "OUT/statistics", "--text", ids, "--tokens", "128", "--window", "32", *CPU]
    return ["run", source, "OUT", "--calibrate", ids, "--workers", "1", "--set", USE, *CPU]


@pytest.mark.parametrize("command", COMMANDS)
def test_crashes_full_disks_and_ctrl_c_resume_to_identical_bytes(command: str, cut: Path, tmp_path: Path) -> None:
    chosen = words(command, cut, tmp_path)
    [found] = crash(tmp_path, chosen, points="spread")
    assert found["wrong"] == []
    assert found["tried"] > 10
    interrupted, printed = found["interrupted"], [str(word).replace("OUT", f"{tmp_path}/0/out") for word in chosen]
    assert interrupted["code"] == 130
    state, line = interrupted["lines"][-2:]
    unit = "2 layers are done" if command == "calibrate" else "3 shards are converted"
    assert re.fullmatch(rf"interrupted: [12] of {unit}\. The same command resumes", state)
    assert line.startswith(f"next: k2convert {shlex.join(printed[:3])} ")
    assert sorted(shlex.split(line)[2:]) == sorted(printed), "in the order of the help"
    assert ("--set 'calibration={tokens: 128, window: 32}'" in line) == (command != "calibrate")
    if command != "calibrate":  # a shard was removed whose quantized weights are gone
        said = " ".join(interrupted["again"])
        assert re.search(r"codes-001\.safetensors: missing: the calibration starts again at the beginning", said)


@pytest.mark.slow
def test_every_call_and_twenty_random_moments(short: Path, tmp_path: Path) -> None:
    for found in crash(tmp_path, *(words(command, short, tmp_path) for command in COMMANDS), points="every"):
        assert found["wrong"] == []
        assert found["tried"] > len(found["calls"]) > 80
        assert found["killed"] >= 10
