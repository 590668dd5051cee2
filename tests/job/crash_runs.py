"""A command that is crashed at the calls that change files, by crash_driver.py with crash_shim.c."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def crash(folder: Path, *commands: list[object], points: str) -> list[dict[str, Any]]:
    """For each command: the `calls` of a whole run in order, the number of points `tried`, and what went `wrong`."""
    shim = folder / "shim.so"
    subprocess.run(
        [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-o", shim, HERE / "crash_shim.c", "-ldl"], check=True
    )
    environment = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = json.dumps([list(map(str, command)) for command in commands])
    done = subprocess.run(
        [sys.executable, HERE / "crash_driver.py", folder, points, words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=7200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    for number, report in enumerate(reports):
        own = folder / str(number)
        report["calls"] = [line.replace(f"{own}/whole", "DEST").replace(str(own), "PARENT") for line in report["calls"]]
    return reports


def assert_resumed(report: dict[str, Any]) -> None:
    """A command that was killed and interrupted ends with the same bytes."""
    assert report["wrong"] == []
    assert report["tried"] > 15
    interrupted = report["interrupted"]
    last = "interrupted: finished work is kept. The same command resumes"
    assert (interrupted["code"], interrupted["lines"][-1]) == (130, last), interrupted["lines"]
