"""The lock of one destination: only one process works there, and others can read how far it is.

DEST/.k2convert/lock    held by the running process (flock: the kernel frees it when the owner dies). Its first line is
                        that process's number and host, the second how far it is. Empty after the run. Processes that do
                        a part of a job each hold it together, and write nothing into it.

Where the file system has no flock, as on some network disks and some of FUSE, files lock it instead:

    DEST/.k2convert/owner          of the one process that works there
    DEST/.k2convert/owner-RANDOM   of each process that does a part of a job

Each is created with O_EXCL and has one line: host, process, and the moment in which the kernel started that process.
A file of a process of this host that has ended is removed. Nobody here can tell that of another host's process, so its
file is refused by name.
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
from k2convert.checkpoint.folders import opened_folder, remove_file
from k2convert.checkpoint.names import LOCK_NAME, WORK_FOLDER
from k2convert.errors import DestinationError, DestinationWriteError, LockedError
from k2convert.records.events import SILENT, Events, Keep

_LOCK_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOOK_SECONDS: Final = 0.1  # `status` has the lock for a moment
_MAX_KEPT: Final = 1 << 16  # characters read from a lock file
_ENOTSUPP: Final = 524  # of the kernel, which some network disks pass on
NO_FLOCK: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, _ENOTSUPP)
"""Answers of flock where the file system has none."""

_OWNER: Final = "owner"
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_START_FIELD: Final = 19  # of /proc/PID/stat, counted behind the name in brackets
_MAX_LINE: Final = 1024


@contextmanager
def lock_destination(destination: Path, *, events: Events = SILENT) -> Generator[Keep]:
    """Lock a destination and yield a function that keeps a line in the lock file; raises LockedError."""
    with _taken(fcntl.LOCK_EX, destination) as lock, _also_without_flock(lock, fcntl.LOCK_EX, destination, events):
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
    with _taken(fcntl.LOCK_SH, destination) as lock, _also_without_flock(lock, fcntl.LOCK_SH, destination, events):
        yield


def _taken(kind: int, destination: Path) -> TextIO:
    """Open and take the lock. A file with a second name (`cp -al`) is not written to: the owner replaces it."""
    path = _path(destination)
    while True:
        lock = _open_lock(destination, os.O_RDWR | os.O_CREAT)
        try:
            _take(lock, kind, destination)
            found = os.fstat(lock.fileno())
            with writing(path), opened_folder(path.parent, root=destination) as folder:
                is_here = _is_file_of(found, path, folder)
                if is_here and (kind == fcntl.LOCK_SH or found.st_nlink == 1):
                    return lock
                if is_here:
                    remove_file(path, folder)
        except BaseException:
            lock.close()
            raise
        lock.close()


def _is_file_of(found: os.stat_result, path: Path, folder: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(found, os.stat(path.name, dir_fd=folder, follow_symlinks=False))
    return False


def _take(lock: TextIO, kind: int, destination: Path) -> None:
    """Take the lock, if there is flock; raises LockedError if another process has it for longer than a look takes."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            return fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.seek(0)
                owner = lock.readline().strip()
                who = "another run, or a part of this job, is"
                if owner:
                    who = f"another run (process {owner}) is"
                raise LockedError(
                    f"{destination}: {who} working here. Wait for it or stop it, then run the same command again."
                ) from None
            time.sleep(_LOOK_SECONDS / 10)
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            return None


@contextmanager
def _also_without_flock(lock: TextIO, kind: int, destination: Path, events: Events) -> Generator[None]:
    """Keep others out for the block where the file system has no flock: by a file, with a note."""
    with ExitStack() as stack:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)  # changes nothing where it is held
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            stack.enter_context(own_destination(destination, shared=kind == fcntl.LOCK_SH))
            events.note(
                f"{destination}: this file system has no flock ({error.strerror}). A file with host and process in "
                f"{WORK_FOLDER} keeps other runs out instead."
            )
        yield


def read_lock(destination: Path) -> tuple[bool, dict[str, Any] | None, float]:
    """Return whether a process works here, what it last said about its progress, and how many seconds ago."""
    if not _path(destination).exists():
        return False, None, 0.0
    with _open_lock(destination, os.O_RDONLY) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # parts of a job share it
        except BlockingIOError:
            return _progress(lock)
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            if is_owned(destination):
                return _progress(lock)
        return False, None, 0.0


def _progress(lock: TextIO) -> tuple[bool, dict[str, Any] | None, float]:
    _, _, said = lock.read(_MAX_KEPT).partition("\n")
    age = time.time() - os.fstat(lock.fileno()).st_mtime
    return True, parse_summary(said), max(age, 0.0)


def _path(destination: Path) -> Path:
    return destination / WORK_FOLDER / LOCK_NAME


def _open_lock(destination: Path, flags: int) -> TextIO:
    """Open the lock file without following a link, which might lead to any file."""
    path = _path(destination)
    try:
        with opened_folder(path.parent, root=destination) as folder:
            descriptor = os.open(path.name, flags | _LOCK_FLAGS, 0o666, dir_fd=folder)
        found = os.fstat(descriptor)
        if not S_ISREG(found.st_mode):
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


@contextmanager
def own_destination(destination: Path, *, shared: bool) -> Generator[None]:
    """Lock a destination by a file, created before others are looked for; raises LockedError."""
    name = f"{_OWNER}-{secrets.token_hex(8)}" if shared else _OWNER
    path = destination / WORK_FOLDER / name
    with opened_folder(path.parent, root=destination) as folder:
        with writing(path):
            while not _created_owner(name, folder):
                _check_owner(path, folder)
        try:
            for other in _owners(folder, parts=not shared):
                if other != name:
                    _check_owner(path.with_name(other), folder)
            yield
        finally:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def is_owned(destination: Path) -> bool:
    """Return whether a process works in a destination, as far as its files tell."""
    with opened_folder(destination / WORK_FOLDER, root=destination) as folder:
        return any(not _has_ended(_owner_line(name, folder)) for name in _owners(folder, parts=True))


def _owners(folder: int, *, parts: bool) -> list[str]:
    found = sorted(os.listdir(folder))
    return [name for name in found if name == _OWNER or (parts and name.startswith(f"{_OWNER}-"))]


def _created_owner(name: str, folder: int) -> bool:
    try:
        descriptor = os.open(name, _NEW, 0o666, dir_fd=folder)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        file.write(f"{os.uname().nodename} {os.getpid()} {_start_of(os.getpid())}\n".encode())
    return True


def _check_owner(path: Path, folder: int) -> None:
    """Remove the file of a process that has ended; raises LockedError for any other."""
    line = _owner_line(path.name, folder)
    if _has_ended(line):
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        return
    host, pid, *_ = [*line.split(), "?", "?"]
    raise LockedError(
        f"{path.parent.parent}: another run (process {pid} on {host}) is working here. Wait for it or stop it, then "
        f"run the same command again. If it has ended, remove {path}."
    )


def _owner_line(name: str, folder: int) -> str:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return ""
    try:
        return os.read(descriptor, _MAX_LINE).decode(errors="replace")
    finally:
        os.close(descriptor)


def _has_ended(line: str) -> bool:
    """Return whether a file's process has ended: a process of this host that is not there, or started later."""
    host, pid, started, *_ = [*line.split(), "", "", ""]
    return host == os.uname().nodename and pid.isdecimal() and _start_of(int(pid)) != started


def _start_of(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[_START_FIELD]
