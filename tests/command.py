"""The real command: in this process, which is fast, or in one of its own, which can be killed."""

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]


class RunCli(Protocol):
    """`run_cli("inspect", folder, code=0, COLUMNS="200")`: arguments by position, environment by keyword."""

    def __call__(self, *args: object, code: int | None = None, **env: str) -> subprocess.CompletedProcess[str]: ...


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "k2convert", *map(str, args)]


def cli_environment() -> dict[str, str]:
    """This process's environment, with its PYTHONPATH, so that the command uses the same library versions."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def python(code: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    words = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def run_cli(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        command(*args), capture_output=True, text=True, env=cli_environment() | env, timeout=1200, check=False
    )


def start_cli(*args: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command in a process of its own, without its output unless the options of Popen ask for it."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command(*args), **({"env": cli_environment(), "text": True} | quiet | options))


_MEASURED = """
import sys
from k2convert.__main__ import main
from k2convert.machine import peak_bytes
sys.argv[0] = "k2convert"
try:
    main()
finally:
    print(peak_bytes(), file=sys.stderr)
"""


def peak_of(*args: object) -> int:
    """Run the command in a process of its own, and return the bytes of its peak memory.

    The process reads its own VmHWM: `ru_maxrss` begins with the peak of the process that started it.
    """
    done = python(_MEASURED, *args, env=cli_environment())
    assert done.returncode == 0, done.stderr
    return int(done.stderr.splitlines()[-1])


def run_here(*args: object, code: int | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process; its exit code must be `code` if that is given."""
    out = io.StringIO()
    err = io.StringIO()
    with patch.dict(os.environ, env), redirect_stdout(out), redirect_stderr(err):
        ended = run(*args)
    assert code in (None, ended), err.getvalue()
    return subprocess.CompletedProcess(list(map(str, args)), ended, out.getvalue(), err.getvalue())


def messages_of(errors: str) -> str:
    """Return stderr without its lines of progress, which begin with a time: their number depends on the machine."""
    return re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ .*\n?", "", errors, flags=re.MULTILINE)


def assert_refused(done: subprocess.CompletedProcess[str], says: str) -> None:
    """Refused in one line."""
    assert (done.returncode, done.stdout, messages_of(done.stderr).count("\n")) == (1, "", 1), done.stderr
    assert says in done.stderr


def run(*args: object) -> int:
    """Run the command in this process and return its exit code."""
    from k2convert.cli.app import main

    words = [str(argument) for argument in args]
    before = sys.argv
    sys.argv = ["k2convert", *words]
    try:
        main(words)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    finally:
        sys.argv = before
