"""The CUDA kernels without a device: equal to `formats` under triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from int4_makers import MAKERS

pytest.importorskip("triton")

TASKS = (("trained-minus-eight", "wide-spread"), ("scales", "columns"))
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def interpret(*tasks: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(HERE)])
    finished = subprocess.run(
        [sys.executable, HERE / "interpreted.py", *tasks],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("tasks", TASKS, ids="-".join)
def test_interpreted_kernels_equal_formats(tasks: tuple[str, ...]) -> None:
    assert interpret(*tasks) == "equal\n" * len(tasks)


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted({*MAKERS, *(f"columns-{maker}" for maker in MAKERS)} - set(TASKS[0])))
def test_interpreted_kernels_equal_formats_on_every_corner(task: str) -> None:
    assert interpret(task) == "equal\n"
