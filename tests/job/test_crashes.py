"""A run that crashes at any system call that changes a file is continued to identical bytes.

The calls are counted, and the process is killed at one of them, by crash_shim.c; crash_driver.py does the runs.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_runs import crash
from made_once import made_once

OPTIONS = ("--workers", "1", "--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def crashes(small: Path, checkpoints: Path) -> dict[str, Any]:
    def make(folder: Path) -> None:
        folder.mkdir()
        [report] = crash(folder, ["run", small, "OUT", *OPTIONS], points="few")
        (folder / "found.json").write_text(json.dumps(report))

    return json.loads((made_once(checkpoints / "crashes", make) / "found.json").read_text())


def test_crashes_resume_to_identical_bytes(crashes: dict[str, Any]) -> None:
    assert crashes["wrong"] == []
    assert len(crashes["calls"]) > 90
    assert crashes["tried"] > 5


@pytest.mark.slow
def test_crashes_of_a_cast_resume_to_identical_bytes(k3_tiny: Path, tmp_path: Path) -> None:
    [report] = crash(tmp_path, ["run", k3_tiny, "OUT", *OPTIONS], points="few")
    assert report["wrong"] == []
    assert report["tried"] > 5


@pytest.mark.slow
def test_a_crash_at_every_call_and_twenty_random_moments(small: Path, tmp_path: Path) -> None:
    [report] = crash(tmp_path, ["run", small, "OUT", *OPTIONS], points="every")
    assert report["wrong"] == []
    assert report["tried"] > len(report["calls"]), "every call, and some of the resumes"
    assert report["killed"] == 20


def test_no_change_of_a_file_escapes_the_count(crashes: dict[str, Any]) -> None:
    kinds = {line.split()[0] for line in crashes["calls"]}
    assert kinds >= {"mkdir", "open", "allocate", "truncate", "write", "sync", "rename", "unlink"}
    paths = {line.split()[1] for line in crashes["calls"] if line.startswith(("rename", "open"))}
    assert {f"DEST/{name}" for name in crashes["files"]} <= paths


def test_files_are_synced_before_their_rename_and_folders_after(crashes: dict[str, Any]) -> None:
    calls = crashes["calls"]
    renames = [i for i, line in enumerate(calls) if line.startswith("rename")]
    assert len(renames) > 10
    for i in renames:
        path = calls[i].split()[1]
        assert calls[i - 1] == f"sync {path}.tmp"
        assert calls[i + 1] == f"sync {path.rpartition('/')[0]}"


def test_the_parent_of_each_new_folder_is_synced(crashes: dict[str, Any]) -> None:
    """Also that of the destination itself: after a power cut the folder would be gone with all that is in it."""
    calls = crashes["calls"]
    for folder, parent in {"DEST": "PARENT", "DEST/.k2convert": "DEST", "DEST/extra": "DEST"}.items():
        assert calls[calls.index(f"mkdir {folder}") + 1] == f"sync {parent}"


USE = "calibration={tokens: 128, window: 32}"
CPU = ("--device", "cpu")


def words(source: Path, folder: Path) -> list[object]:
    ids = folder / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(0, 2048, (4, 32)))
    return ["run", source, "OUT", "--calibrate", ids, "--workers", "1", "--set", USE, *CPU]


@pytest.mark.slow
def test_calibrations_that_crash_resume_to_identical_bytes(cut: Path, tmp_path: Path) -> None:
    chosen = words(cut, tmp_path)
    [report] = crash(tmp_path, chosen, points="few")
    assert report["wrong"] == []
    assert report["tried"] > 5
    interrupted = report["interrupted"]
    printed = [str(word).replace("OUT", f"{tmp_path}/0/out") for word in chosen]
    assert interrupted["code"] == 130
    state, line = interrupted["lines"][-2:]
    shards = r"[1-3] of 3 shards are converted(, [12] of 2 layers are calibrated)?"
    assert re.fullmatch(rf"interrupted: {shards}\. The same command resumes", state)
    assert line.startswith(f"next: k2convert {shlex.join(printed[:3])} ")
    assert sorted(shlex.split(line)[2:]) == sorted(printed), "in the order of the help"
    assert "--set 'calibration={tokens: 128, window: 32}'" in line
    errors = " ".join(interrupted["again"])  # a shard was removed whose quantized weights are gone
    assert re.search(r"codes-001\.safetensors: missing: the calibration starts again at the beginning", errors)


@pytest.mark.slow
def test_calibrations_crash_at_every_call_and_twenty_random_moments(short: Path, tmp_path: Path) -> None:
    for report in crash(tmp_path, words(short, tmp_path), points="every"):
        assert report["wrong"] == []
        assert report["tried"] > len(report["calls"]) > 80
        assert report["killed"] == 20
