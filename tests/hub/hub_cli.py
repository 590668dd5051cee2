"""The real command: in this process, which is fast, or in a separate one, which can be killed."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]


class HubCli(Protocol):
    """`hub_cli("run", "hf://moon/tiny", "hf://me/out", "--yes", HF_HUB_OFFLINE="1")` in the test's own folder."""

    def __call__(self, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]: ...


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "k2convert", *map(str, args)]


def cli_environment() -> dict[str, str]:
    """This process's environment, with its PYTHONPATH, so that the command uses the same library versions."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def run_here(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command's entry point in this process."""
    from k2convert.cli.app import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    with _environment(env), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in args])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(list(map(str, args)), code, out.getvalue(), err.getvalue())


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
