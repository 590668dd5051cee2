"""Ctrl-C and SIGTERM at any moment after the interpreter's own start: one line, exit code 130 or 143."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from command import python, start_cli

CAUGHT = 1 << (signal.SIGTERM - 1)


def catches_signals(process: subprocess.Popen[str]) -> bool:
    """Whether the process has a handler for SIGTERM. Before that the interpreter has not reached our first line."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & CAUGHT)
    return False


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("seconds", "number"),
    [(seconds, (signal.SIGINT, signal.SIGTERM)[i % 2]) for i, seconds in enumerate((0, 0.02, 0.05, 0.1, 0.2, 0.4))],
)
def test_an_interrupt_during_the_start_is_one_line(seconds: float, number: int, tiny: Path, tmp_path: Path) -> None:
    process = start_cli("run", tiny, tmp_path / "out", "--device", "cpu", stderr=subprocess.PIPE)
    while process.poll() is None and not catches_signals(process):
        time.sleep(0.001)
    time.sleep(seconds)
    process.send_signal(number)
    errors = process.communicate()[1]
    assert "Traceback" not in errors
    assert process.returncode in (128 + number, 0), errors
    if process.returncode:  # before the verb begins, nothing is known of it
        (said,) = (line for line in errors.splitlines() if line.startswith("interrupted"))
        assert said == "interrupted." or said.endswith("The same command resumes")


def test_signals_are_caught_before_the_command_line_is_imported() -> None:
    code = (
        "import sys, k2convert.__main__ as entry\n"
        "slow = {'typing', 'dataclasses', 'typer', 'k2convert.errors', 'k2convert.cli.app'} & set(sys.modules)\n"
        "assert not slow, slow\n"
        "entry.catch_interrupts(); import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (143, "interrupted.\n")


INTERRUPTED_INSIDE_OPEN = """
import os, signal, sys, time
import k2convert.__main__ as entry
from k2convert.checkpoint import folders
real = os.open
def interrupted(path, flags, mode=0o777):
    descriptor = real(path, flags, mode)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)  # the thread that ends the process looks for temporary files now
    return descriptor
os.open = interrupted
entry.catch_interrupts()
folders.create_file(folders.Path(sys.argv[1]))
time.sleep(60)
"""


def test_a_file_that_is_being_created_at_an_interrupt_is_removed(tmp_path: Path) -> None:
    done = python(INTERRUPTED_INSIDE_OPEN, tmp_path / "shard.tmp")
    assert (done.returncode, list(tmp_path.iterdir())) == (130, []), done.stderr
