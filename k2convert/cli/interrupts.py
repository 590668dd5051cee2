"""Ctrl-C and SIGTERM, caught from the first moment: this module imports nothing that takes time.

The main thread gets Interrupted when it next runs Python. A thread of its own sees a signal at once, also while the
main thread waits for compiled code: it says that the command stops, and ends the process if the main thread has not
done so after GRACE_SECONDS, or at a second signal.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

_signal = __import__("_signal")  # what `signal` is made of: `signal` itself takes milliseconds to import
_thread = __import__("_thread")  # the same for `threading`

GRACE_SECONDS = 6.0
STOPPING = "stopping after this step; a second interrupt ends it at once"
_REQUESTS = (_signal.SIGTERM, _signal.SIGINT)
_NUMBERS = (*_REQUESTS, _signal.SIGALRM)  # SIGALRM is a delayed interrupt
_RETRY_SECONDS = 0.01
_SHOW_CURSOR = "\x1b[?25h"
# Steps in which Python's threads take or give back a lock. An exception between the step and its caller would leave
# the lock as the caller does not expect it: held for ever, or released twice.
_LOCK_STEPS = {
    "threading": ("Condition.__enter__", "Condition.__exit__", "Condition._acquire_restore", "Condition._release_save"),
    "concurrent.futures._base": ("_AcquireFutures.__enter__", "_AcquireFutures.__exit__"),
}


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not a KeyboardInterrupt, which the argument parser would turn into exit code 1."""


class _Command:
    """The running command: the signal that it got, how far it is, and the command that resumes it.

    The thread that ends it holds `ending`.
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_seen = False
        self.state: Callable[[], str] = str
        self.resumed_by = ""
        self.resumes = False
        self.ending = _thread.allocate_lock()


class _Watcher:
    """The thread that sees signals, and the process that it is in: a fork has none."""

    process = 0
    pipe = -1


_command = _Command()


def catch_interrupts() -> None:
    """Let Ctrl-C and SIGTERM raise Interrupted in the main thread."""
    for number in _NUMBERS:
        _signal.signal(number, _interrupt)
    if _Watcher.process != os.getpid():
        reading, writing = (_above_streams(descriptor) for descriptor in os.pipe())
        os.set_blocking(writing, False)
        try:
            _thread.start_new_thread(_watch, (reading,))
        except RuntimeError:  # the machine allows no more threads
            writing = -1
        _Watcher.process = os.getpid()
        _Watcher.pipe = writing
    _signal.set_wakeup_fd(_Watcher.pipe, warn_on_full_buffer=False)


def _above_streams(descriptor: int) -> int:
    """Return a descriptor that is none of the three streams, which the caller may have closed."""
    if descriptor > 2:
        return descriptor
    above = _above_streams(os.dup(descriptor))
    os.close(descriptor)
    return above


def release_interrupts() -> None:
    """From now on Ctrl-C and SIGTERM end the process at once."""
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    for number in _NUMBERS:
        _signal.signal(number, _signal.SIG_DFL)
    forget_signals()


def forget_signals() -> None:
    """Let the watcher see no more signals, and forget those that it saw: the command is over."""
    global _command
    _signal.set_wakeup_fd(-1)
    _command = _Command()


def say_when_interrupted(state: Callable[[], str], command: str = "", *, resumes: bool = True) -> None:
    """Choose what is said after an interrupt: how far the work is, and the command that resumes it, if one does."""
    _command.state = state
    _command.resumed_by = command
    _command.resumes = resumes


def is_resumable() -> bool:
    """Return whether the running command keeps finished work, which the same command resumes."""
    return _command.resumes


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise Interrupted, but not during an import or a step of a lock: try again 10 ms later.

    Compiled modules swallow an exception that ends one of their imports, and go on with half a module. A test in
    tests/job/test_resume.py shows it.
    """
    if number in _REQUESTS:
        _command.number = number
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


def _watch(pipe: int) -> None:
    """Wait for a signal and say that the command stops; end the process if it does not, or at the next signal."""
    while True:
        requests = [number for number in os.read(pipe, 64) if number in _REQUESTS]
        command = _command
        for number in requests:
            command.number = number
            if command.is_seen:
                _end_at_once(command)
            else:
                command.is_seen = True
                _thread.start_new_thread(_end_later, (command,))
                _say_stopping(command)


def _end_later(command: _Command) -> None:
    time.sleep(GRACE_SECONDS)
    if command is _command:
        _end_at_once(command)


def _say_stopping(command: _Command) -> None:
    """Say it by the console, if it is there: it may be drawing bars."""
    with command.ending:
        _wipe_echo()
        console = sys.modules.get("k2convert.cli.console")
        say = getattr(console, "print_note", None)
        if say is None:
            _write(f"{STOPPING}\n")
        else:
            say(STOPPING)


def _end_at_once(command: _Command) -> None:
    """End the process, whatever its threads do, and remove what they have half-written; not if it is ending."""
    if not command.ending.acquire(blocking=False):
        return
    _discard_unfinished()
    if sys.stderr.isatty():
        _write(_SHOW_CURSOR)
    _write(_sentence(command))
    os._exit(128 + command.number)


def _discard_unfinished() -> None:
    writer = sys.modules.get("k2convert.checkpoint.writer")
    if writer is not None:
        writer.discard_unfinished()


def end_interrupted() -> NoReturn:
    """Tell the person watching what is done and what resumes it, and end with 130 (Ctrl-C) or 143 (SIGTERM)."""
    command = _command
    release_interrupts()
    command.ending.acquire()  # and keep it: if the watcher has it, it ends the process
    _wipe_echo()
    _write(_sentence(command))
    sys.exit(128 + (command.number or _signal.SIGINT))


def leave(code: int) -> NoReturn:
    """End this process, which is the command's own. Threads that still compute end with it: Python would wait."""
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        from contextlib import suppress

        _discard_unfinished()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody is watching
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _sentence(command: _Command) -> str:
    try:
        from k2convert.errors import visible

        state = visible(command.state())
        following = visible(command.resumed_by)
    except Exception:  # the work folder is gone, or the import was interrupted
        return "interrupted.\n"
    said = f"interrupted: {state}\n" if state else "interrupted.\n"
    return said + (f"next: {following}\n" if following else "")


def _wipe_echo() -> None:
    if sys.stderr.isatty():
        _write("\r  \r")


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody is watching
        pass
