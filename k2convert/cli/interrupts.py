"""Ctrl-C and SIGTERM, caught from the first moment: this module imports nothing that takes time."""

import signal
import sys
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)  # SIGALRM is a delayed interrupt


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not a KeyboardInterrupt, which the argument parser would turn into exit code 1."""


def catch_interrupts() -> None:
    """Let Ctrl-C and SIGTERM raise Interrupted in the main thread."""
    for number in _NUMBERS:
        signal.signal(number, _interrupt)


def release_interrupts() -> None:
    """From now on Ctrl-C and SIGTERM end the process at once."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_DFL)


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    """Raise Interrupted, but not during an import: try again 10 ms later.

    Compiled modules swallow an exception that ends one of their imports, and go on with half a module. A test in
    tests/job/test_resume.py shows it.
    """
    while frame is not None and frame.f_globals.get("__name__") != "k2convert.cli.app":
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise Interrupted


def say_interrupted() -> int:
    """Tell the person watching that the work is kept; returns the exit code."""
    release_interrupts()
    if sys.stderr is not None:  # type: ignore[reportUnnecessaryComparison]  # the caller may have closed it
        try:
            sys.stderr.write("interrupted: finished shards are kept; the same command resumes\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass
    return 130
