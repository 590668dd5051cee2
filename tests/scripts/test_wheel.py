"""The wheel as a user gets it: built, installed where no compiler is, and run. `scripts/wheel` checks all of that."""

import platform
import subprocess

import pytest

from scripts.fixture_maker import TINY

ROOT = TINY.parents[2]


@pytest.mark.slow
def test_the_wheel_runs_the_main_job_without_a_compiler_and_without_torch() -> None:
    done = subprocess.run([ROOT / "scripts" / "wheel"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"manylinux_2_34_{platform.machine()}.whl: built, installed and run")
