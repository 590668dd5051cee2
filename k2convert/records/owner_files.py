"""Files that lock a destination whose file system has no flock: some network disks, and some of FUSE.

    DEST/.k2convert/owner          of the one process that works there
    DEST/.k2convert/owner-RANDOM   of each process that does a part of a job

Each is created with O_EXCL and has one line: host, process, and the moment in which the kernel started that process.
A file of a process of this host that has ended is removed. Nobody here can tell that of another host's process, so its
file is refused by name.
"""

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from k2convert.checkpoint.files import writing
from k2convert.checkpoint.folders import opened_folder
from k2convert.checkpoint.names import WORK_FOLDER
from k2convert.errors import LockedError

_OWNER: Final = "owner"
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_START_FIELD: Final = 19  # of /proc/PID/stat, counted behind the name in brackets
_MAX_LINE: Final = 1024


@contextmanager
def own_destination(destination: Path, *, shared: bool) -> Generator[None]:
    """Lock a destination by a file, created before others are looked for; raises LockedError."""
    name = f"{_OWNER}-{secrets.token_hex(8)}" if shared else _OWNER
    path = destination / WORK_FOLDER / name
    with opened_folder(path.parent, root=destination) as folder:
        with writing(path):
            while not _created(name, folder):
                _check(path, folder)
        try:
            for other in _owners(folder, parts=not shared):
                if other != name:
                    _check(path.with_name(other), folder)
            yield
        finally:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def is_owned(destination: Path) -> bool:
    """Return whether a process works in a destination, as far as its files tell."""
    folder_path = destination / WORK_FOLDER
    with opened_folder(folder_path, root=destination) as folder:
        return any(not _has_ended(_line(name, folder)) for name in _owners(folder, parts=True))


def _owners(folder: int, *, parts: bool) -> list[str]:
    found = sorted(os.listdir(folder))
    return [name for name in found if name == _OWNER or (parts and name.startswith(f"{_OWNER}-"))]


def _created(name: str, folder: int) -> bool:
    try:
        descriptor = os.open(name, _NEW, 0o666, dir_fd=folder)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, f"{os.uname().nodename} {os.getpid()} {_started(os.getpid())}\n".encode())
    finally:
        os.close(descriptor)
    return True


def _check(path: Path, folder: int) -> None:
    """Remove the file of a process that has ended; raises LockedError for any other."""
    line = _line(path.name, folder)
    if _has_ended(line):
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        return
    host, pid, *_ = [*line.split(), "?", "?"]
    raise LockedError(
        f"{path.parent.parent}: another run (process {pid} on {host}) is working here. Wait for it or stop it, then "
        f"run the same command again. If it has ended, remove {path}."
    )


def _line(name: str, folder: int) -> str:
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
    return host == os.uname().nodename and pid.isdecimal() and _started(int(pid)) != started


def _started(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[_START_FIELD]
