"""The lock of one destination: one run works there, or several processes that do a part of its job each.

DEST/.k2convert/lock    held by flock while a process works, by a run alone, by parts together. The kernel frees it when
                        that process dies. A run writes two lines into it: its number and host, and how far it is.

Where the file system has no flock, as on some network disks, filelock.SoftFileLock makes a file instead, for a run
DEST/.k2convert/owner, for each part owner-RANDOM. It replaces the file of a process of this host that has ended. Of a
process of another host nobody here can tell that, so its file is refused by name.
"""

import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, TextIO, cast

from k2convert.checkpoint.files import writing
from k2convert.checkpoint.names import LOCK_NAME, WORK_FOLDER
from k2convert.errors import DestinationError, DestinationWriteError, LockedError
from k2convert.records.events import SILENT, Events, Keep

_OPEN_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PROBE_SECONDS: Final = 0.1  # how long `status` or another part that begins may have the lock
_MAX_CHARACTERS: Final = 1 << 16  # read from a lock file
_ENOTSUPP: Final = 524  # of the kernel, which some network disks pass on
NO_FLOCK: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, _ENOTSUPP)
"""Answers of flock where the file system has none."""

_OWNER: Final = "owner"


@contextmanager
def lock_destination(destination: Path, *, events: Events = SILENT) -> Generator[Keep]:
    """Lock a destination and yield a function that writes its progress into the lock file; raises LockedError."""
    with _locked(destination, fcntl.LOCK_EX, events) as lock:
        with writing(_path(destination)):
            _write_owner(lock, "")
        try:
            yield partial(_keep, lock)
        finally:
            try:
                os.ftruncate(lock.fileno(), 0)
            except OSError as error:
                events.note(f"{_path(destination)}: cannot be emptied ({error.strerror}). It locks nothing any more.")


@contextmanager
def share_destination(destination: Path, *, events: Events = SILENT) -> Generator[None]:
    """Lock a destination together with other processes that do a part each; raises LockedError while a run has it."""
    with _locked(destination, fcntl.LOCK_SH, events):
        yield


@contextmanager
def _locked(destination: Path, kind: int, events: Events) -> Generator[TextIO]:
    path = _path(destination)
    with ExitStack() as stack:
        while True:
            lock = stack.enter_context(_open(path, os.O_RDWR | os.O_CREAT))
            has_flock = _flock(lock, kind, destination)
            status = os.fstat(lock.fileno())
            with writing(path):
                is_current = path.exists() and os.path.samestat(status, path.lstat())
                if is_current and (status.st_nlink == 1 or kind == fcntl.LOCK_SH):
                    break
                if is_current:  # its other names are of copies (`cp -al`), and a run writes into it
                    path.unlink()
            lock.close()
        if not has_flock:
            stack.enter_context(_soft_lock(path.parent, is_part=kind == fcntl.LOCK_SH))
            events.note(
                f"{destination}: this file system has no flock. A file with process and host in {WORK_FOLDER} keeps "
                "other runs out instead."
            )
        yield lock


def _flock(lock: TextIO, kind: int, destination: Path) -> bool:
    """Take the lock, and return whether there is flock; raises LockedError if another process has it."""
    deadline = time.monotonic() + _PROBE_SECONDS
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _locked_error(destination, lock.readline().strip()) from None
            time.sleep(_PROBE_SECONDS / 10)
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            return False


def _locked_error(destination: Path, owner: str, *, remedy: str = "") -> LockedError:
    who = f"another run (process {owner})" if owner else "another run, or a part of this job,"
    return LockedError(
        f"{destination}: {who} is working here. Wait for it or stop it, then run the same command again.{remedy}"
    )


@contextmanager
def _soft_lock(work: Path, *, is_part: bool) -> Generator[None]:
    """Lock by a file of this process, which is there before the files of others are read; raises LockedError."""
    own = work / (f"{_OWNER}-{secrets.token_hex(8)}" if is_part else _OWNER)
    with _soft_locked(own):
        for other in [work / _OWNER] if is_part else sorted(work.glob(f"{_OWNER}-*")):
            with _soft_locked(other):
                pass
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
            how = f" If it has ended, remove {path}."
            raise _locked_error(path.parent.parent, f"{pid} on {host}", remedy=how) from None
    try:
        yield
    finally:
        lock.release()


def read_lock(destination: Path) -> tuple[bool, dict[str, Any] | None, float]:
    """Return whether a process works here, its progress as it wrote it last, and how many seconds ago that was."""
    path = _path(destination)
    if not path.exists():
        return False, None, 0.0
    with _open(path, os.O_RDONLY) as lock:
        try:
            if _flock(lock, fcntl.LOCK_EX, destination):  # parts of a job share it
                return False, None, 0.0
            for owner in path.parent.glob(f"{_OWNER}*"):
                with _soft_locked(owner):
                    pass
            return False, None, 0.0
        except (LockedError, DestinationWriteError):  # the latter of a file without flock in a read-only folder
            lock.seek(0)
            _, _, progress = lock.read(_MAX_CHARACTERS).partition("\n")
            age = time.time() - os.fstat(lock.fileno()).st_mtime
            return True, parse_summary(progress), max(age, 0.0)


def _path(destination: Path) -> Path:
    return destination / WORK_FOLDER / LOCK_NAME


def _open(path: Path, flags: int) -> TextIO:
    """Open the lock file without following a link, which might lead to any file."""
    try:
        descriptor = os.open(path, flags | _OPEN_FLAGS, 0o666)
        if not S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise DestinationError(f"{path}: is a link or a folder, not a file. Remove it.") from None
        raise DestinationWriteError(
            f"{path}: cannot be opened ({error.strerror}). Choose a folder that you may write to."
        ) from None
    return os.fdopen(descriptor, "r+" if flags & os.O_RDWR else "r", errors="replace")


def _write_owner(lock: TextIO, text: str) -> None:
    os.ftruncate(lock.fileno(), 0)  # not by the file object, which would try a failed write again when it is closed
    os.pwrite(lock.fileno(), f"{os.getpid()} on {os.uname().nodename}\n{text}".encode(), 0)


def _keep(lock: TextIO, text: str) -> None:
    with suppress(OSError, ValueError):  # a display for others must not end the work; the file may be closed already
        _write_owner(lock, text)


def parse_summary(text: str) -> dict[str, Any] | None:
    """Return the kept line of a running job, or None if it is not whole: it may be half written."""
    with suppress(ValueError, TypeError, KeyError):
        document: Any = json.loads(text)
        if (
            isinstance(document["phases"], dict)
            and all(_is_phase(phase) for phase in cast(Mapping[str, Any], document["phases"]).values())
            and isinstance(document["seconds_left"], int | None)
            and type(document["finished_shards"]) is int
        ):
            return cast(dict[str, Any], document)
    return None


def _is_phase(phase: Any) -> bool:
    counts = (phase["done"], phase["total"], phase.get("unit", 1))
    return all(type(count) is int for count in counts) and isinstance(phase["rate"], int | float | None)
