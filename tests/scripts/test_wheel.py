"""The wheel as a user gets it: built, installed where no compiler is, and run. `scripts/wheel` checks all of that."""

import subprocess

import pytest

from scripts.fixture_maker import TINY

ROOT = TINY.parents[2]


@pytest.mark.slow
def test_the_wheel_runs_the_main_job_without_a_compiler_and_without_torch() -> None:
    done = subprocess.run([ROOT / "scripts" / "wheel"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("manylinux_2_34_x86_64.whl: built, installed and run")
