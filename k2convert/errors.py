"""The error tree. Each class also inherits the standard error it corresponds to, so callers may catch either.

Messages are for the person at the terminal: what is wrong, where (file, tensor), what to do. The command line prints
this tree without a traceback, and what the machine refuses (`explain`). Any other exception keeps its traceback,
because it is a bug of k2convert.
"""

import errno
import math
import os
import re
import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from reprlib import Repr
from typing import Any, Final, Literal

Extra = Literal["torch", "calibrate", "reference", "ray"]

_EXTRAS: Final[dict[Extra, tuple[str, ...]]] = {
    "torch": ("torch",),
    "calibrate": ("torch", "transformers", "tokenizers", "tiktoken", "jinja2"),
    "reference": ("torch", "compressed_tensors", "modelopt"),
    "ray": ("ray",),
}
"""The modules that each extra of the package brings."""

MAX_QUOTED: Final = 80


class K2ConvertError(Exception):
    """Base of every failure that k2convert expects. The command exits with code 1."""


class InterruptedRun(Exception):  # noqa: N818 - a request to stop is not an error
    """The run was asked to stop."""


class ArgumentError(K2ConvertError, ValueError):
    """An argument of a function that nothing could be done with: its type, its range, or a word that is not known."""


class MachineError(K2ConvertError, OSError):
    """The operating system refused a file in a way that no other class is for. Its cause is the system's own error."""


class FormatError(K2ConvertError, ValueError):
    """Tensor values or shapes that the number formats do not allow."""


class CheckpointError(K2ConvertError, ValueError):
    """A checkpoint folder, index or shard that is damaged, hostile or of an unexpected form."""


class MalformedFileError(CheckpointError):
    """A file that is missing or malformed. The message states the problem only; the caller adds a `remedy`."""


class ChangedFileError(CheckpointError):
    """A finished shard whose bytes do not match its record."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"{path}: does not match its recorded hash. Delete it and rerun; only this shard is converted again. "
            "If this happens twice, check the disk and the memory."
        )


class RecipeError(K2ConvertError, ValueError):
    """A recipe that cannot be read, or that asks for something that does not exist."""


class PlanError(K2ConvertError, ValueError):
    """Source and recipe do not fit together: a tensor is unclaimed, missing or matches nothing."""


class CalibrationError(K2ConvertError, ValueError):
    """A text or a value of the forward pass that calibration cannot use."""


class FitError(K2ConvertError, ValueError):
    """A GPU that is not known, or a layout over GPUs that the model cannot have."""


class DestinationError(K2ConvertError, ValueError):
    """The destination cannot be used: it is the source, or it holds files that k2convert did not write."""


class ResumeError(K2ConvertError, ValueError):
    """The destination holds the work of a different job: a field of the fingerprint differs."""


class SourceChangedError(ResumeError):
    """The source has other weights than when the destination's job began, or a config.json that does not fit them."""


class LockedError(K2ConvertError, BlockingIOError):
    """Another running process works on the same destination."""


class DiskFullError(K2ConvertError, OSError):
    """Not enough room for the result. Found before the start or during a write."""


class SourceReadError(K2ConvertError, OSError):
    """The operating system failed to read the source."""


class DestinationWriteError(K2ConvertError, OSError):
    """The operating system failed to write the result, and the reason is not a full disk."""


class OutputError(K2ConvertError, OSError):
    """The operating system failed to write to standard output."""


class MissingDependencyError(K2ConvertError, ImportError):
    """The request needs an optional library that is not installed."""


class InvalidCheckpointError(K2ConvertError, ValueError):
    """A finished checkpoint failed validation. The command exits with code 3."""


class UnservableError(InvalidCheckpointError):
    """A result that failed validation and was not published. `validation`, a ValidationReport, says why."""

    def __init__(self, message: str, validation: Any) -> None:
        super().__init__(message)
        self.validation = validation


class HubError(K2ConvertError, OSError):
    """The Hub refused or failed. The message says what to do."""


_QUOTE: Final = Repr()
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = MAX_QUOTED


def quoted(value: object) -> str:
    """Return the repr of a value from outside on one line, cut to 80 characters, however long or deep it is."""
    return cut(_QUOTE.repr(value), MAX_QUOTED)


def cut(text: str, limit: int = 300) -> str:
    """Return what another program said, on one line and cut to `limit` characters."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    return f"{text[: limit - 3]}..."


_BIDI: Final = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_CONTROLS: Final = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), *_BIDI)}


def visible(text: str) -> str:
    """Return a text that cannot command a terminal: C0, DEL, C1, ends of lines and bidi marks are escapes."""
    return text.translate(_CONTROLS)


def shortened(text: str) -> str:
    """Return a name as it is if it is plain text of at most 80 characters, else `quoted`."""
    if len(text) <= MAX_QUOTED and text.isprintable():
        return text
    return quoted(text)


@contextmanager
def remedy(text: str) -> Generator[None]:
    """Add what to do to a MalformedFileError raised in the block; it becomes a CheckpointError."""
    try:
        yield
    except MalformedFileError as error:
        raise CheckpointError(f"{str(error).rstrip('.')}. {text}") from error


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a word that is not one of those allowed; raises ArgumentError."""
    if value not in allowed:
        raise ArgumentError(f"{name} {quoted(value)}: expected {' or '.join(allowed)}.")


def check_number(name: str, value: object) -> None:
    """Refuse what is not a whole number from 1 on; raises ArgumentError."""
    if type(value) is not int or value < 1:
        raise ArgumentError(f"{name} {quoted(value)}: expected a whole number, 1 or more.")


def check_flags(**values: object) -> None:
    """Refuse what is neither True nor False, by its name; raises ArgumentError."""
    for name, value in values.items():
        if type(value) is not bool:
            raise ArgumentError(f"{name} {quoted(value)}: expected True or False.")


def missing_module(extra: Extra) -> str | None:
    """Return the first module of an extra that is not installed, or None. Imports nothing."""
    return next((module for module in _EXTRAS[extra] if find_spec(module) is None), None)


def require_extra(extra: Extra, *, purpose: str) -> None:
    """Raise MissingDependencyError if an extra is not installed. `purpose` is what needs it: "device cuda"."""
    module = missing_module(extra)
    if module is not None:
        raise MissingDependencyError(f"{purpose} needs {module}, which is not installed. {install_remedy(extra=extra)}")


def install_remedy(*, package: str | None = None, extra: Extra | None = None) -> str:
    """Return how to install a package, or those of an extra, in this Python."""
    from importlib.metadata import requires  # slow to load, and only an error needs it

    packages = [package] if package is not None else []
    marks = tuple(f"extra == {quote}{extra}{quote}" for quote in ("'", '"'))
    packages += [text.partition(";")[0] for text in requires("k2convert") or () if text.endswith(marks)]
    return f"Install it with: {shlex.join([sys.executable, '-m', 'pip', 'install', *packages])}"


def counted(count: int, noun: str) -> str:
    """Return "1 window" or "2,000 windows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def exact_zero(value: float) -> str:
    """Return five decimal places, and "0" for nothing but zero."""
    return f"{value:.5f}" if value else "0"


def format_decibels(value: float) -> str:
    """Return "22.62 dB", or a word for an infinite ratio, and for one that is no number."""
    if math.isfinite(value):
        return f"{value:.2f} dB"
    return "exact" if value > 0 else "broken"


def check_disk(subject: str, *, needed: int, allowed: int, remedy: str) -> None:
    """Refuse what needs more disk than it may use; raises DiskFullError with both numbers."""
    if needed > allowed:
        needs = format_bytes(needed)
        limit = format_bytes(allowed)
        raise DiskFullError(f"{subject} needs at least {needs} of disk at once, but may use {limit}. {remedy}")


def parse_size(text: str) -> int:
    """Return the bytes in `200GB`, `1.5TB`, `64GiB` or a plain number; raises ArgumentError."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([kMGT]?)(i)?B?", text.strip(), flags=re.IGNORECASE)
    if match is None:
        raise ArgumentError(f"{quoted(text)}: not a size. Write for example 200GB.")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def read_size(name: str, given: object) -> int | None:
    """Return a size in bytes, given as a number or as text like "200GB"; None if none is. Raises ArgumentError."""
    if given is None:
        return None
    if isinstance(given, str):
        return parse_size(given)
    check_number(name, given)
    return int(str(given))


def format_bytes(count: float) -> str:
    """Format a size in decimal units, as disks and the Hub do."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            if unit == "B":
                return f"{count:.0f} {unit}"
            return f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def format_estimate(count: float) -> str:
    """Format an estimated size with two digits."""
    return re.sub(r"\.0+ ", " ", format_bytes(float(f"{count:.1e}")))


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
    errno.ELOOP: "Remove the link that leads to itself.",
    errno.ENFILE: f"Close other programs, {_AGAIN}",
    errno.ENOENT: f"Something removed it meanwhile: restore it, {_AGAIN}",
    errno.ESTALE: f"Mount the network disk again, {_AGAIN}",
}


def explain(error: BaseException, *, resumes: bool) -> str | None:
    """Return the one line for a failure of the machine; None for anything else. Work of one that `resumes` is kept."""
    line = _explain(error)
    if resumes and line is not None and line.endswith(_AGAIN):
        return f"{line} Finished work is kept."
    return line


def _explain(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno != errno.ENOMEM:
        return _explain_file(error)
    if isinstance(error, MemoryError | OSError):
        return _NO_MEMORY
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return _NO_THREAD
    if isinstance(error, ImportError) and ("failed to map segment" in str(error) or "annot allocate" in str(error)):
        return _NO_MEMORY
    if isinstance(error, ValueError) and "null byte" in str(error):
        return "a name has a null character, which no file has. Choose a different name."
    return None


def _explain_file(error: OSError) -> str:
    reason = cut(os.strerror(error.errno) if error.errno else str(error))
    remedy = _REMEDIES.get(error.errno or 0, f"Check the disk, {_AGAIN}")
    if error.filename is None and error.errno in _FULL:  # files are named, so this was help or a usage error
        return f"standard output: writing failed ({reason}). Write to a different file or disk."
    if error.filename is None:
        return f"the system refuses ({reason}). {remedy}"
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    return f"{name if len(name) < _LONGEST_PATH else shortened(name)}: {reason}. {remedy}"
