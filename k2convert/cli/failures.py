"""What the machine refuses, in one line each: memory, threads, files. Every other unknown exception is a bug.

And what typer refuses, in its own form but in plain words.
"""

import errno
import io
import os
import re
from typing import Any, Final

import typer

from k2convert.errors import cut, shortened, visible

# typer has it from click, or from its own copy of click
UsageError: Final[type[Exception]] = typer.BadParameter.__bases__[0]

_SAME_THING: Final[dict[str, str]] = {
    **dict.fromkeys(("convert", "quantize", "resume"), "run"),
    **dict.fromkeys(("check", "verify"), "validate"),
    **dict.fromkeys(("info", "show"), "inspect"),
    **dict.fromkeys(("push", "upload"), "publish"),
}
"""Words that other tools have for a command, where the spelling does not give it away."""

_AGAIN: Final = "then run the same command again."
_NO_MEMORY: Final = (
    f"not enough memory. Close other programs, raise the limit (`ulimit -v`), or use a larger machine, {_AGAIN}"
)
_NO_THREAD: Final = f"the system refuses another thread. Raise its limit (`ulimit -u`, or the container's), {_AGAIN}"
_LONGEST_PATH: Final = 250
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES: Final = {
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.EACCES: "Check its permissions and those of its folders.",
    errno.EPERM: "Check its permissions and those of its folders.",
    errno.EMFILE: f"Raise the limit on open files (`ulimit -n`), {_AGAIN}",
    errno.ENFILE: f"Close other programs, {_AGAIN}",
    errno.ENOENT: f"Something removed it meanwhile: restore it, {_AGAIN}",
    errno.ESTALE: f"Mount the network disk again, {_AGAIN}",
}


def explain(error: BaseException, *, resumes: bool) -> str | None:
    """Return the one line for a failure of the machine; None if the exception is something else.

    Finished work is kept if the command `resumes`.
    """
    line = _explain(error)
    is_kept = resumes and line is not None and line.endswith(_AGAIN)
    return f"{line} Finished work is kept." if is_kept else line


def _explain(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return _NO_MEMORY
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return _NO_THREAD
    if isinstance(error, ImportError) and ("failed to map segment" in str(error) or "annot allocate" in str(error)):
        return _NO_MEMORY
    if isinstance(error, OSError):
        return _NO_MEMORY if error.errno == errno.ENOMEM else _explain_file(error)
    if isinstance(error, ValueError) and "null byte" in str(error):
        return "a name has a null character, which no file has. Choose a different name."
    return None


def explain_usage(error: Any) -> str:
    """Return what to print for a UsageError: usage and message; nothing if it printed help itself."""
    shown = io.StringIO()
    error.show(file=shown)
    if "Error: " not in shown.getvalue():
        return shown.getvalue()
    *lines, message = shown.getvalue().rstrip("\n").split("Error: ", 1)
    message = " ".join(message.split()).replace(": Value error, ", ": ")
    missing = re.fullmatch(r"No such command '(\w+)'\.", message)
    if missing and missing[1] in _SAME_THING:
        message += f" Did you mean '{_SAME_THING[missing[1]]}'?"
    return f"{lines[0]}Error: {visible(message)}\n"


def _explain_file(error: OSError) -> str:
    reason = cut(os.strerror(error.errno) if error.errno else str(error))
    remedy = _REMEDIES.get(error.errno or 0, f"Check the disk, {_AGAIN}")
    if error.filename is None and error.errno in _FULL:  # files are named, so this was help or a usage error
        return f"standard output: writing failed ({reason}). Write to a different file or disk."
    if error.filename is None:
        return f"the system refuses ({reason}). {remedy}"
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    return f"{name if len(name) < _LONGEST_PATH else shortened(name)}: {reason}. {remedy}"
