"""Files and folders that k2convert writes: created, renamed, and synced with their folder.

A link could lead to any file of the user. A job refuses the links below its destination once, when it opens. A file is
written under a temporary name that nothing had (O_EXCL, O_NOFOLLOW), and its rename replaces a link, never its target.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Final

from k2convert.errors import DestinationError, DestinationWriteError

_NO_HARD_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # the last file then wins
_CANNOT_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # file systems of networks and of user space


unfinished: Final[set[Path]] = set()
"""The temporary files and folders of this process that it removes when it ends in any way but by SIGKILL."""
_creating: Final = Lock()


def discard_unfinished() -> None:
    """Remove the temporary files and folders that are in use, and let no thread create another: the process ends."""
    _creating.acquire()
    for path in tuple(unfinished):
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()


@contextmanager
def temporary_folder() -> Generator[Path]:
    """Make a temporary folder for the block; returns its path."""
    with tempfile.TemporaryDirectory(prefix="k2convert-") as name:
        folder = Path(name)
        unfinished.add(folder)
        try:
            yield folder
        finally:
            unfinished.discard(folder)


def check_no_link(path: Path) -> None:
    """Refuse a link at `path` (DestinationError). A path that cannot be looked at passes: opening it will fail."""
    with suppress(OSError):
        if stat.S_ISLNK(path.lstat().st_mode):
            raise DestinationError(f"{path}: is a link, and k2convert does not write through links. Remove it.")


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and sync them; raises DestinationWriteError."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            with suppress(PermissionError):  # write-only folders cannot be opened
                sync_folder(path.parent)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        for path in (folder, *folder.parents):
            if path.exists() and not path.is_dir():
                raise DestinationWriteError(
                    f"{path}: is not a folder, and k2convert needs a folder there. Remove it, or choose another place."
                ) from None
        raise DestinationWriteError(
            f"{folder}: cannot be created ({error.strerror}). Choose a folder that you may write to."
        ) from None


def sync_folder(folder: Path) -> None:
    """Sync a folder, if its file system can do that; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def create_file(path: Path, *, flags: int = os.O_WRONLY) -> int:
    """Create a new temporary file, in place of one that a killed run left; returns its descriptor.

    It is `unfinished` until it is renamed or removed. Raises DestinationError, OSError.
    """
    with _creating:
        remove_file(path)
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        unfinished.add(path)
    return descriptor


def remove_file(path: Path) -> None:
    """Remove a file or link, if it is there; raises DestinationError for a folder, OSError."""
    try:
        path.unlink(missing_ok=True)
        unfinished.discard(path)
    except IsADirectoryError:
        raise DestinationError(f"{path}: is a folder, but k2convert needs a file there. Remove it.") from None


def replace_file(temporary: Path, path: Path) -> None:
    """Rename a synced temporary file to its final name in the same folder, and sync the folder."""
    temporary.replace(path)
    unfinished.discard(temporary)
    sync_folder(path.parent)


def place_first(temporary: Path, path: Path) -> None:
    """Give a synced temporary file its final name, unless a file has it: one of several processes succeeds."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        temporary.replace(path)
    remove_file(temporary)
    sync_folder(path.parent)
