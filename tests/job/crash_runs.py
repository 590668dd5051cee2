"""A command that is crashed at the calls that change files, by crash_driver.py with crash_shim.c."""

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
ALL = 1_000_000


def crash(folder: Path, *words: object, most: int = ALL) -> dict[str, Any]:
    """What the driver found: `calls` of a whole run in order, points `tried`, and what went `wrong`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    shim = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", shim, HERE / "crash_shim.c", "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "crash_driver.py", folder, most, *words]
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=7200, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found["calls"] = [line.replace(f"{folder}/whole", "DEST").replace(str(folder), "PARENT") for line in found["calls"]]
    return found
