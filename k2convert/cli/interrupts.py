"""Ctrl-C and SIGTERM, caught from the first moment: this module imports nothing that takes time."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

_signal = __import__("_signal")  # what `signal` is made of: `signal` itself takes milliseconds to import

_NUMBERS = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGALRM)  # SIGALRM is a delayed interrupt
_RETRY_SECONDS = 0.01
# Steps in which Python's threads take or give back a lock. An exception between the step and its caller would leave
# the lock as the caller does not expect it: held for ever, or released twice.
_LOCK_STEPS = {
    "threading": ("Condition.__enter__", "Condition.__exit__", "Condition._acquire_restore", "Condition._release_save"),
    "concurrent.futures._base": ("_AcquireFutures.__enter__", "_AcquireFutures.__exit__"),
}


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not a KeyboardInterrupt, which the argument parser would turn into exit code 1."""


def catch_interrupts() -> None:
    """Let Ctrl-C and SIGTERM raise Interrupted in the main thread."""
    for number in _NUMBERS:
        _signal.signal(number, _interrupt)


def release_interrupts() -> None:
    """From now on Ctrl-C and SIGTERM end the process at once."""
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    for number in _NUMBERS:
        _signal.signal(number, _signal.SIG_DFL)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Raise Interrupted, but not during an import or a step of a lock: try again 10 ms later.

    Compiled modules swallow an exception that ends one of their imports, and go on with half a module. A test in
    tests/job/test_resume.py shows it.
    """
    while frame is not None and (module := str(frame.f_globals.get("__name__"))) != "k2convert.cli.app":
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" or code.co_qualname in _LOCK_STEPS.get(module, ()):
            _signal.setitimer(_signal.ITIMER_REAL, _RETRY_SECONDS)
            return
        frame = frame.f_back
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    raise Interrupted


def report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """A sys.unraisablehook: try again soon if compiled code had nowhere to raise Interrupted."""
    if unraisable.exc_type is Interrupted:
        _signal.setitimer(_signal.ITIMER_REAL, _RETRY_SECONDS)
    else:
        sys.__unraisablehook__(unraisable)


def say_interrupted(state: str = "finished work is kept; the same command resumes", command: str = "") -> int:
    """Tell the person watching what is done, and the command that resumes it; returns the exit code."""
    release_interrupts()
    from contextlib import suppress

    from k2convert.errors import visible

    with suppress(OSError, ValueError):  # nobody is watching
        sys.stderr.write(f"interrupted: {visible(state)}\n" + (f"next: {visible(command)}\n" if command else ""))
        sys.stderr.flush()
    return 130
