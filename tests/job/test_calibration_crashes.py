"""`calibrate` and `run --calibrate` that crash, are interrupted or run out of disk continue to identical bytes."""

import re
import shlex
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def crashes(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the driver found at a call of each kind, by command, and the words of the command."""
    folder = tmp_path_factory.mktemp("crashes")
    chosen = [words(command, cut, folder) for command in COMMANDS]
    found = crash(folder, *chosen, points="spread")
    printed = [[str(word).replace("OUT", f"{folder}/{i}/out") for word in chosen[i]] for i in range(2)]
    return {command: found[i] | {"words": printed[i]} for i, command in enumerate(COMMANDS)}


@pytest.mark.parametrize("command", COMMANDS)
def test_crashes_and_full_disks_resume_to_identical_bytes(command: str, crashes: dict[str, dict[str, Any]]) -> None:
    assert crashes[command]["wrong"] == []
    assert crashes[command]["tried"] > 10


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_says_what_is_done_and_the_command_that_resumes(
    command: str, crashes: dict[str, dict[str, Any]]
) -> None:
    found, printed = crashes[command]["interrupted"], crashes[command]["words"]
    assert found["code"] == 130
    state, line = found["lines"][-2:]
    unit = "2 layers are done" if command == "calibrate" else "3 shards are converted"
    assert re.fullmatch(rf"interrupted: [12] of {unit}\. The same command resumes", state)
    assert line.startswith(f"next: k2convert {shlex.join(printed[:3])} ")
    assert sorted(shlex.split(line)[2:]) == sorted(printed), "in the order of the help"
    assert ("--set 'calibration={tokens: 128, window: 32}'" in line) == (command != "calibrate")


def test_a_lost_shard_whose_quantized_weights_are_gone_starts_the_walk_again(
    crashes: dict[str, dict[str, Any]],
) -> None:
    said = " ".join(crashes["run --calibrate"]["interrupted"]["again"])
    assert re.search(r"codes-001\.safetensors: missing: the calibration starts again at the beginning", said)


@pytest.mark.slow
def test_every_call_and_twenty_random_moments(short: Path, tmp_path: Path) -> None:
    for found in crash(tmp_path, *(words(command, short, tmp_path) for command in COMMANDS), points="every"):
        assert found["wrong"] == []
        assert found["tried"] > len(found["calls"]) > 80
        assert found["killed"] >= 10
