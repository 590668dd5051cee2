"""The CUDA kernels without a device: equal to `formats` under triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from int4_makers import MAKERS

pytest.importorskip("triton")

TASKS = ("trained-minus-eight", "columns-trained-minus-eight", "ends")
"""Each kernel once, and what its launch alone decides. PTX is executed on every corner: see ptx/test_ptx_kernels.py."""
MAKER_TASKS = {*MAKERS, *(f"columns-{maker}" for maker in MAKERS)}
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


def test_interpreted_kernels_equal_formats() -> None:
    assert interpret(*TASKS) == "equal\n" * len(TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted({*MAKER_TASKS, "scales", "tiny"} - set(TASKS)))
def test_interpreted_kernels_equal_formats_on_every_corner(task: str) -> None:
    assert interpret(task) == "equal\n"
