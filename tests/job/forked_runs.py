"""The command in a real process that starts within milliseconds, for tests that kill it."""

import contextlib
import multiprocessing
import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from k2convert.cli.app import main
from k2convert.cli.interrupts import catch_interrupts

# A server that has imported everything and forks one real process a run: runs start in milliseconds, so that kills
# fall into the work and not into the imports.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["k2convert.cli.app", "k2convert.job.prepare", "k2convert.cli.job_view", "k2convert.quantize.quantizer"]
)


def _run(arguments: list[str], environment: dict[str, str]) -> None:
    catch_interrupts()
    os.environ.update(environment)
    with Path(os.devnull).open("w") as nothing:
        sys.stdout = sys.stderr = nothing
        main(arguments)


def start(*arguments: object, **environment: str) -> BaseProcess:
    process = _processes.Process(target=_run, args=([str(a) for a in arguments], environment))
    process.start()
    return process


def finish(*arguments: object) -> int | None:
    process = start(*arguments)
    process.join(120)
    return process.exitcode


def send(process: BaseProcess, number: signal.Signals) -> None:
    """Signal a run, which may just have ended by itself."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
