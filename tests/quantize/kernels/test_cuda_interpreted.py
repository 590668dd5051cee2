"""The CUDA kernels without a device: equal to `formats` under triton's interpreter, and accepted by the compiler."""

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


def run(script: str, *arguments: str, **environment: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(HERE)])
    finished = subprocess.run(
        [sys.executable, HERE / script, *arguments],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("tasks", TASKS, ids="-".join)
def test_interpreted_kernels_equal_formats(tasks: tuple[str, ...]) -> None:
    assert run("interpreted.py", *tasks) == "equal\n" * len(tasks)


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted({*MAKERS, *(f"columns-{maker}" for maker in MAKERS)} - set(TASKS[0])))
def test_interpreted_kernels_equal_formats_on_every_corner(task: str) -> None:
    assert run("interpreted.py", task) == "equal\n"


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    printed = run("compiled_for_hopper.py", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0").split()
    assert printed[0::3] == ["max_kernel", "mse_kernel", "channels_kernel"]
    # 16 weights in some 300 instructions: what keeps `max` within reach of the memory's speed.
    assert int(printed[1]) < 400
