"""Folders that k2convert writes to. No link is followed below the folder that the user named.

A link could lead to any file of the user. The folder that the user named, `root` in these functions, may be a link, and
so may every folder above it. Below it each component is opened with O_NOFOLLOW, relative to the descriptor of the one
before. A link there is refused by name (DestinationError), and what it leads to stays as it is.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from k2convert.errors import DestinationError, DestinationWriteError

_NO_HARD_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # the last file then wins
_CANNOT_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # file systems of networks and of user space
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


unfinished: Final[set[Path]] = set()
"""The temporary files and folders of this process that it removes when it ends in any way but by SIGKILL."""


def discard_unfinished() -> None:
    """Remove the temporary files and folders that are in use. The process is about to end."""
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
            raise DestinationError(f"{path}: is a link, and k2convert writes through none. Remove it.")


@contextmanager
def opened_folder(folder: Path, *, root: Path | None = None) -> Generator[int]:
    """Open a folder below `root` for the block; returns its descriptor. Raises DestinationError for a link, OSError."""
    path = folder if root is None else root
    descriptor = os.open(path, _FOLDER)
    try:
        for part in folder.relative_to(path).parts:
            path = path / part
            try:
                inner = os.open(path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError:
                check_no_link(path)
                raise
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def make_folder(folder: Path, *, root: Path | None = None) -> None:
    """Create a folder below `root` and its parents, and sync them; raises DestinationWriteError, DestinationError."""
    top = folder if root is None else root
    try:
        missing = [path for path in (top, *top.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            with suppress(PermissionError), opened_folder(path.parent) as parent:  # write-only folders cannot be opened
                sync_folder(parent)
        path = top
        for part in folder.relative_to(top).parts:
            with opened_folder(path, root=top) as parent, suppress(FileExistsError):
                os.mkdir(part, dir_fd=parent)
                sync_folder(parent)
            path = path / part
        with opened_folder(folder, root=top):
            pass
    except OSError as error:
        raise DestinationWriteError(
            f"{folder}: cannot be created ({error.strerror}). Choose a folder that you may write to."
        ) from None


def sync_folder(folder: int) -> None:
    """Sync an open folder, if its file system can do that; raises OSError."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def create_file(path: Path, folder: int, *, flags: int = os.O_WRONLY) -> int:
    """Create a new temporary file, through no link; returns its descriptor. Raises DestinationError, OSError."""
    remove_file(path, folder)
    return os.open(path.name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)


def remove_file(path: Path, folder: int) -> None:
    """Remove a file or link from its open folder, if it is there; raises DestinationError for a folder, OSError."""
    try:
        os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        raise DestinationError(f"{path}: is a folder, but k2convert needs a file there. Remove it.") from None


def replace_file(temporary: Path, path: Path, folder: int) -> None:
    """Rename a synced temporary file to its final name in the same open folder, and sync the folder."""
    os.replace(temporary.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    sync_folder(folder)


def place_first(temporary: Path, path: Path, folder: int) -> None:
    """Give a synced temporary file its final name, unless a file has it: one of several processes succeeds."""
    try:
        os.link(temporary.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        os.replace(temporary.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    with suppress(FileNotFoundError):
        os.unlink(temporary.name, dir_fd=folder)
    sync_folder(folder)


def remove_folder(folder: Path, *, root: Path) -> None:
    """Remove a folder of this program with all that is in it, as far as that is possible. Links are not followed."""
    with suppress(OSError), opened_folder(folder.parent, root=root) as parent:
        shutil.rmtree(folder.name, ignore_errors=True, dir_fd=parent)
