"""A run that crashes at any system call that changes a file is continued to identical bytes.

The calls are counted, and the process is killed at one of them, by crash_shim.c; crash_driver.py does the runs.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def crashes(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver found: `calls` of a whole run in order, crash points `tried`, and what went `wrong`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    shim, folder = tmp_path_factory.mktemp("shim") / "shim.so", tmp_path_factory.mktemp("crashes")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", shim, HERE / "crash_shim.c", "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "crash_driver.py"), str(small), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found["calls"] = [line.replace(f"{folder}/whole", "DEST").replace(str(folder), "PARENT") for line in found["calls"]]
    return found


def test_crash_at_every_call_resumes_to_identical_bytes(crashes: dict[str, Any]) -> None:
    assert crashes["wrong"] == []
    assert len(crashes["calls"]) > 90
    assert crashes["tried"] > len(crashes["calls"]), "every call, and some of the resumes"


def test_no_change_of_a_file_escapes_the_count(crashes: dict[str, Any]) -> None:
    kinds = {line.split()[0] for line in crashes["calls"]}
    assert kinds >= {"mkdir", "open", "allocate", "truncate", "write", "sync", "rename", "unlink"}
    made = {line.split()[1] for line in crashes["calls"] if line.startswith(("rename", "open"))}
    assert {f"DEST/{name}" for name in crashes["files"]} <= made


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
