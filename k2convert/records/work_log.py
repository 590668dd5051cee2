"""The log of unfinished work: which of its steps are done. A run that was killed goes on after them.

    WORK/done/STEP.json     written when the files of a step are complete and synced: the only claim that it is done.
                            Sealed: a damaged claim is none

The steps of a conversion are its shards (journal.py). Those of a layer pass are its layers, and the head of an
evaluation (forward/work.py). Beside them WORK has what the work is, and the lock (lock.py).
"""

from pathlib import Path
from typing import Generic, TypeVar

from k2convert.checkpoint.files import TEMPORARY_SUFFIX, discard_file, list_folder, write_atomically
from k2convert.checkpoint.names import DONE_FOLDER
from k2convert.errors import ResumeError
from k2convert.records.command import say_own_command
from k2convert.records.document import JsonObject, read_sealed, seal
from k2convert.records.fingerprint import check_version, describe_changes, other_instructions

Step = TypeVar("Step")


class WorkLog(Generic[Step]):
    """The steps of the work in a folder WORK that are done. `kind` is the dataclass of what is kept of a step.

    `suffix` is that of temporary files, one of its own for each process that does a part of the work.
    """

    def __init__(self, work: Path, kind: type[Step], *, suffix: str = TEMPORARY_SUFFIX) -> None:
        self.folder = work / DONE_FOLDER
        self._kind = kind
        self._suffix = suffix

    def path(self, step: str) -> Path:
        """Return the file that says that a step is done."""
        return self.folder / f"{step}.json"

    def steps(self) -> list[str]:
        """Return the steps that are declared done, in the order of their names."""
        return [path.stem for path in list_folder(self.folder) if path.suffix == ".json"]

    def read(self, step: str) -> Step:
        """Return what is kept of a step that is done; raises MalformedFileError if its file is damaged."""
        return read_sealed(self._kind, self.path(step))

    def declare(self, step: str, kept: Step, *, mtime_ns: int | None = None) -> None:
        """Declare a step done: its files are in place and synced. Raises DiskFullError, DestinationWriteError."""
        write_atomically(self.path(step), seal(kept), mtime_ns=mtime_ns, suffix=self._suffix)

    def forget(self, step: str) -> None:
        """Remove the claim that a step is done."""
        discard_file(self.path(step))


def check_same(
    folder: Path, before: JsonObject, now: JsonObject, *, version: int, kind: str = "job", elsewhere: str
) -> None:
    """Refuse to go on with the work in a folder if what its result depends on has changed; raises ResumeError.

    `version` is the IDENTITY_VERSION of the release that began it. `elsewhere` says what to do to begin anew.
    """
    check_version(version, folder)
    if changes := describe_changes(before, now):
        how = other_instructions(before, now) or say_own_command(folder)
        raise ResumeError(
            f"{folder}: holds a different {kind}: {changes}. {how}{elsewhere}, or delete this one to start over."
        )
