"""A room: the temporary folder in which a task on a node of a cluster does one shard of a job with the Hub.

    TMPDIR/k2convert-ray-RANDOM-PLACE/    that only this user may enter, with a file `lock` that its task has locked

The driver of a run chooses RANDOM, so that nobody can foresee the name. PLACE counts the rooms of the run on the node.
Each task first removes the rooms of dead tasks, of its own run or an earlier one: those of this user that no process
has locked. No link is followed, and nothing outside a room is touched.
"""

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from k2convert.checkpoint.folders import opened_folder
from k2convert.errors import DestinationError, DiskFullError, format_bytes
from k2convert.job.locations import shown_as
from k2convert.records.lock import NO_FLOCK

_FREE_SHARE: Final = 0.9  # of a node's free disk, unless --max-disk says otherwise
_MAX_PLACES: Final = 256  # shards that a node may have in work
_POLL_SECONDS: Final = 0.2
_NAME: Final = re.compile(r"(k2convert-ray-[0-9a-f]{16})-[0-9]+")


def new_rooms() -> str:
    """Return how the names of the rooms of one run begin."""
    return f"k2convert-ray-{secrets.token_hex(8)}"


@contextmanager
def open_room(rooms: str, *, shard_bytes: int, max_disk: int | None) -> Generator[Path]:
    """Wait for room for one more shard; make a folder, removed at the end, whose path leads through its descriptor."""
    top = Path(tempfile.gettempdir())
    with opened_folder(top) as parent, ExitStack() as stack:
        while True:
            _sweep(top, parent, rooms=rooms)
            allowed = max_disk or int(shutil.disk_usage(top).free * _FREE_SHARE)
            if allowed < shard_bytes:
                raise DiskFullError(
                    f"{top}: a shard needs {format_bytes(shard_bytes)}, but this node may use {format_bytes(allowed)}. "
                    "Allow more with --max-disk, or set TMPDIR on the node to a larger disk."
                )
            paths = (top / f"{rooms}-{place}" for place in range(min(allowed // shard_bytes, _MAX_PLACES)))
            path = next((path for path in paths if _made(path, parent)), None)
            if path is not None and (folder := _claim(path, parent, stack)) is not None:
                break
            time.sleep(_POLL_SECONDS)
        inside = Path(f"/proc/self/fd/{folder}")
        with shown_as(str(path), inside):
            yield inside


def _made(path: Path, parent: int) -> bool:
    try:
        os.mkdir(path.name, 0o700, dir_fd=parent)
    except FileExistsError:
        return False
    return True


def _sweep(top: Path, parent: int, *, rooms: str) -> None:
    """Remove the rooms of dead tasks; raises DestinationError if a name of this run is not a room of this user."""
    for name in os.listdir(parent):
        if match := _NAME.fullmatch(name):
            try:
                with ExitStack() as stack:
                    _claim(top / name, parent, stack)
            except DestinationError:
                if match[1] == rooms:
                    raise


def _claim(path: Path, parent: int, stack: ExitStack) -> int | None:
    """Lock a room and return its descriptor; None if a task has it. DestinationError if others may enter."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with ExitStack() as opened:
        try:
            folder = os.open(path.name, flags | os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent)
            opened.callback(os.close, folder)
            found = os.fstat(folder)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError
            lock = os.open("lock", flags | os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder)
            opened.callback(os.close, lock)
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                raise PermissionError
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = os.path.samestat(found, os.stat(path.name, dir_fd=parent, follow_symlinks=False))
        except (BlockingIOError, FileNotFoundError):
            return None
        except OSError as error:
            if error.errno in NO_FLOCK:
                raise DestinationError(
                    f"{path}: this file system has no flock ({error.strerror}). Set TMPDIR on the node to a local disk."
                ) from None
            raise DestinationError(
                f"{path}: is not a folder that k2convert made for this user alone. Remove it, or set TMPDIR on the "
                "node to a folder of your own."
            ) from None
        if not is_current:
            return None
        opened.callback(_remove, path.name, folder, parent)
        stack.push(opened.pop_all())
        return folder


def _remove(name: str, folder: int, parent: int) -> None:
    """Empty an open room, then remove it. Whatever else has its name by now has content, and stays."""
    shutil.rmtree(".", ignore_errors=True, dir_fd=folder)
    with suppress(OSError):
        os.rmdir(name, dir_fd=parent)
