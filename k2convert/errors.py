"""The one error tree. Each class also inherits the standard error it stands for, so callers may catch either.

Messages are written for the person at the terminal: what is wrong, where (file, tensor), what to do about it.
The command line prints this tree alone; any other exception keeps its traceback, because it is our bug.
"""


class K2ConvertError(Exception):
    """Anything k2convert refuses or fails at knowingly; the command exits with code 1."""


class FormatError(K2ConvertError, ValueError):
    """Tensor values or shapes that the number formats do not allow."""


class CheckpointError(K2ConvertError, ValueError):
    """A checkpoint folder, index or shard that is damaged, hostile or not of the expected form."""


class ChangedFileError(CheckpointError):
    """A finished shard whose bytes are not those that were written."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"{path}: is no longer what was written: its bytes have another hash than its record. Delete it and run "
            "the conversion again: it makes this shard anew. If it happens twice, suspect disk or memory."
        )


class RecipeError(K2ConvertError, ValueError):
    """A recipe that cannot be read or asks for something that does not exist."""


class PlanError(K2ConvertError, ValueError):
    """Source and recipe do not fit together: something is unclaimed, missing or matches nothing."""


class DestinationError(K2ConvertError, ValueError):
    """The destination cannot be used: it is the source, or holds something that is not ours."""


class ResumeError(K2ConvertError, ValueError):
    """The destination holds another job's work: a field of the fingerprint differs."""


class LockedError(K2ConvertError, BlockingIOError):
    """Another live run works on the same destination."""


class DiskFullError(K2ConvertError, OSError):
    """Not enough room for the result, found before the start or during a write."""


class SourceReadError(K2ConvertError, OSError):
    """The operating system failed to read the source."""


class DestinationWriteError(K2ConvertError, OSError):
    """The operating system failed to write the result, for another reason than a full disk."""


class OutputError(K2ConvertError, OSError):
    """The operating system failed to write to standard output."""


class MissingDependencyError(K2ConvertError, ImportError):
    """An optional library is needed for what was asked and is not installed."""


class InvalidCheckpointError(K2ConvertError, ValueError):
    """A finished checkpoint failed validation; the command exits with code 3."""


class HubError(K2ConvertError, OSError):
    """The Hub refused or failed; the message says what to do."""
