"""Unfinished work in a folder: the log of its steps that are done, after which a killed run goes on, and the lock.

    WORK/done/STEP.json     written when the files of a step are complete and synced: the only claim that it is done.
                            Sealed: a damaged claim is none
    WORK/lock               held by flock, by a run alone, by parts of its job together. The kernel frees it when the
                            process dies. A run writes two lines into it: its number and host, and how far it is
                            (`status` shows it)

The steps of a conversion are its shards (journal.py). Those of a layer pass are its layers, and the head of an
evaluation (forward/work.py). WORK is .k2convert in the folder of a result or of a layer pass.

Where the file system has no flock, as on some network disks, filelock.SoftFileLock makes a file instead: owner for a
run, owner-RANDOM for a part. It replaces the file of a process of this host that has ended. Nobody here can tell that
of a process of another host, so its file is refused by name.
"""

import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from k2convert.checkpoint.files import TEMPORARY_SUFFIX, discard_file, list_folder, write_atomically, writing
from k2convert.checkpoint.folders import check_no_link
from k2convert.checkpoint.names import DONE_FOLDER, LOCK_NAME, WORK_FOLDER
from k2convert.errors import DestinationError, DestinationWriteError, LockedError, ResumeError
from k2convert.records.command import say_own_command
from k2convert.records.document import JsonObject, read_sealed, seal
from k2convert.records.events import SILENT, Events, Keep
from k2convert.records.fingerprint import check_version, describe_changes, other_instructions

Step = TypeVar("Step")

_PROBE_SECONDS: Final = 0.1  # how long `status`, or a part that begins, may have the lock
_MAX_BYTES: Final = 1 << 16  # read from a lock file
_OWNER: Final = "owner"
_UNKNOWN: Final = "another run, or a part of this job,"
_NO_FLOCK: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, 524)
"""What flock answers where the file system has none. 524 is the kernel's ENOTSUPP, which some network disks pass on."""


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

    def declare(self, step: str, record: Step, *, mtime_ns: int | None = None) -> None:
        """Declare a step done: its files are in place and synced. Raises DiskFullError, DestinationWriteError."""
        write_atomically(self.path(step), seal(record), mtime_ns=mtime_ns, suffix=self._suffix)

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


@contextmanager
def lock_destination(destination: Path, *, events: Events = SILENT) -> Generator[Keep]:
    """Lock a folder for a run; yield a function that writes its progress into the lock file. Raises LockedError."""
    path = _path(destination)
    with _locked(path, fcntl.LOCK_EX, events) as lock:
        with writing(path):
            _write_owner(lock, "")
        try:
            yield partial(_write_progress, lock)
        finally:
            try:
                lock.truncate(0)
            except OSError as error:
                events.note(f"{path}: cannot be emptied ({error.strerror}). It locks nothing any more.")


@contextmanager
def share_destination(destination: Path, *, events: Events = SILENT) -> Generator[None]:
    """Lock a folder for a part of a job, beside other parts. Raises LockedError while a run has it."""
    with _locked(_path(destination), fcntl.LOCK_SH, events):
        yield


@contextmanager
def _locked(path: Path, mode: int, events: Events) -> Generator[FileIO]:
    while True:
        with closing(_open(path, os.O_RDWR | os.O_CREAT)) as lock:
            has_flock = _flock(lock, mode, path)
            with writing(path):
                status = os.fstat(lock.fileno())
                is_current = path.exists() and os.path.samestat(status, path.lstat())
                if is_current and status.st_nlink > 1 and mode == fcntl.LOCK_EX:
                    path.unlink()  # its other names are of copies (`cp -al`), and a run writes into it
                    is_current = False
            if is_current:
                with nullcontext() if has_flock else _soft_lock(path.parent, mode, events):
                    yield lock
                return


def _flock(lock: FileIO, mode: int, path: Path) -> bool:
    """Take the lock, and return whether there is flock; raises LockedError if another process has it."""
    deadline = time.monotonic() + _PROBE_SECONDS
    while True:
        try:
            fcntl.flock(lock, mode | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                owner, _, _ = _read(lock).partition("\n")
                raise _locked_error(path, f"another run (process {owner})" if owner else _UNKNOWN) from None
            time.sleep(_PROBE_SECONDS / 10)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            return False


@contextmanager
def _soft_lock(work: Path, mode: int, events: Events) -> Generator[None]:
    """Lock by a file of this process, which is there before the files of others are read; raises LockedError."""
    run = work / _OWNER
    is_part = mode == fcntl.LOCK_SH
    with _soft_locked(work / f"{_OWNER}-{secrets.token_hex(8)}" if is_part else run):
        for other in [run] if is_part else sorted(work.glob(f"{_OWNER}-*")):
            with _soft_locked(other):
                pass
        events.note(
            f"{work.parent}: this file system has no flock. A file with process and host in {WORK_FOLDER} keeps other "
            "runs out instead."
        )
        yield


@contextmanager
def _soft_locked(path: Path) -> Generator[None]:
    from filelock import SoftFileLock, Timeout  # most file systems have flock

    lock = SoftFileLock(path, timeout=_PROBE_SECONDS)
    with writing(path):
        try:
            lock.acquire()
        except Timeout:
            pid, host, *_ = [*path.read_text(errors="replace").splitlines(), "?", "?"]
            remedy = f" If it has ended, remove {path}."
            raise _locked_error(path, f"another run (process {pid} on {host})", remedy) from None
    try:
        yield
    finally:
        lock.release()


def read_lock(destination: Path) -> tuple[bool, dict[str, Any] | None, float]:
    """Return whether a process works here, its last progress (Display.summary), and its age in seconds."""
    path = _path(destination)
    if not path.exists():
        return False, None, 0.0
    with closing(_open(path, os.O_RDONLY)) as lock:
        try:
            if not _flock(lock, fcntl.LOCK_EX, path):  # parts share it
                for owner in path.parent.glob(f"{_OWNER}*"):
                    with _soft_locked(owner):
                        pass
            return False, None, 0.0
        except (LockedError, DestinationWriteError):  # the latter of a file without flock in a read-only folder
            progress = None
            with suppress(ValueError):  # half written
                progress = json.loads(_read(lock).partition("\n")[2])
            return True, progress, max(time.time() - os.fstat(lock.fileno()).st_mtime, 0.0)


def _path(destination: Path) -> Path:
    return destination / WORK_FOLDER / LOCK_NAME


def _open(path: Path, flags: int) -> FileIO:
    check_no_link(path)
    if path.exists() and not path.is_file():
        raise DestinationError(f"{path}: is not a file, but k2convert locks a file of this name. Remove it.")
    with writing(path):
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        return FileIO(descriptor, "r+" if flags & os.O_RDWR else "r")


def _read(lock: FileIO) -> str:
    return os.pread(lock.fileno(), _MAX_BYTES, 0).decode(errors="replace")


def _write_owner(lock: FileIO, progress: str) -> None:
    lock.truncate(0)
    os.pwrite(lock.fileno(), f"{os.getpid()} on {os.uname().nodename}\n{progress}".encode(), 0)


def _write_progress(lock: FileIO, progress: str) -> None:
    with suppress(OSError, ValueError):  # a display for others must not end the work; the file may be closed already
        _write_owner(lock, progress)


def _locked_error(path: Path, who: str, remedy: str = "") -> LockedError:
    return LockedError(
        f"{path.parent.parent}: {who} is working here. Wait for it or stop it, then run the same command again.{remedy}"
    )
