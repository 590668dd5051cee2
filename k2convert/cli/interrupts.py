"""Ctrl-C and SIGTERM end the command at once, from the first moment on: this module imports nothing that takes time.

No step has to be finished first, because a run that is killed at any moment resumes to the same bytes. So no exception
is raised anywhere. A thread of its own sees a signal, also while the main thread is in compiled code. It removes what
is half-written, says how far the work is and which command resumes it, and ends the process with 128 + the signal.
If this takes longer than GRACE_SECONDS, or at a second signal, the process ends without it.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

_signal = __import__("_signal")  # what `signal` is made of: `signal` itself takes milliseconds to import
_thread = __import__("_thread")  # the same for `threading`

GRACE_SECONDS = 6.0
_NUMBERS = (_signal.SIGINT, _signal.SIGTERM)
_ending = _thread.allocate_lock()  # held from a signal to the end of the process

displays: list[Callable[[], object]] = []
"""What clears and ends each bar or spinner that is on the terminal."""


class _Command:
    """The running command: how far it is, the command that resumes it, and whether finished work is kept."""

    def __init__(self) -> None:
        self.state: Callable[[], str] = str
        self.resumed_by = ""
        self.resumes = False


_command = _Command()


def say_when_interrupted(state: Callable[[], str], command: str = "", *, resumes: bool = True) -> None:
    """Choose what is said after an interrupt: how far the work is, and the command that resumes it, if one does."""
    _command.state = state
    _command.resumed_by = command
    _command.resumes = resumes


def is_resumable() -> bool:
    """Return whether the running command keeps finished work, which the same command resumes."""
    return _command.resumes


def catch_interrupts() -> None:
    """Let Ctrl-C and SIGTERM end this process as the page says."""
    reading, writing = (_above_streams(descriptor) for descriptor in os.pipe())
    os.set_blocking(writing, False)
    handler = _leave_it_to_the_watcher
    try:
        _thread.start_new_thread(_watch, (reading,))
    except RuntimeError:  # the machine allows no more threads
        handler = _signal.SIG_DFL
    for number in _NUMBERS:
        _signal.signal(number, handler)
    _signal.set_wakeup_fd(writing, warn_on_full_buffer=False)


def _above_streams(descriptor: int) -> int:
    """Return a descriptor that is none of the three streams, which the caller may have closed."""
    if descriptor > 2:
        return descriptor
    above = _above_streams(os.dup(descriptor))
    os.close(descriptor)
    return above


def _leave_it_to_the_watcher(number: int, frame: FrameType | None) -> None:
    """A signal handler: Python has written the signal's number to the pipe of the watcher."""


def _watch(pipe: int) -> None:
    is_seen = False
    while True:
        for number in os.read(pipe, 64):
            if number not in _NUMBERS:
                continue
            if is_seen:
                _end_at_once(number)
            is_seen = True
            try:
                _thread.start_new_thread(_end_later, (number,))
                _thread.start_new_thread(_end, (number,))
            except RuntimeError:  # the machine allows no more threads
                _end(number)


def _end(number: int) -> NoReturn:
    _ending.acquire()
    with suppress(Exception):  # the terminal is gone, or the display has just ended
        for end_display in displays:
            end_display()
    _discard_unfinished()
    if sys.stderr.isatty():
        _write("\r  \r")  # over the ^C that the terminal shows
    _write(_sentence())
    os._exit(128 + number)


def _end_later(number: int) -> None:
    time.sleep(GRACE_SECONDS)
    _end_at_once(number)


def _end_at_once(number: int) -> NoReturn:
    """End the process without any lock: another thread may hold those of the streams."""
    show_cursor = b"\x1b[?25h" if os.isatty(2) else b""
    with suppress(OSError):  # nobody is watching
        os.write(2, show_cursor + b"interrupted.\n")
    os._exit(128 + number)


def wait_for_end() -> None:
    """Wait for ever if an interrupt is ending the process. Errors of the main thread may come from what it removed."""
    with _ending:
        pass


def leave(code: int) -> NoReturn:
    """End this process, which is the command's own. Threads that still compute end with it: Python would wait."""
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        _discard_unfinished()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody is watching
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _discard_unfinished() -> None:
    folders = sys.modules.get("k2convert.checkpoint.folders")
    discard = getattr(folders, "discard_unfinished", None)
    if discard is not None:  # else the module is not imported, or being imported: there is nothing yet
        discard()


def _sentence() -> str:
    try:
        from k2convert.errors import visible

        state = visible(_command.state())
        following = visible(_command.resumed_by)
    except Exception:  # the work folder is gone, or the command has not begun
        return "interrupted.\n"
    sentence = f"interrupted: {state}\n" if state else "interrupted.\n"
    return sentence + (f"next: {following}\n" if following else "")


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody is watching
        sys.stderr.write(text)
        sys.stderr.flush()
