"""A folder that the processes of one test run share."""

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, made by the first process that asks for it. Others wait for it."""
    finished = folder.with_name(f"{folder.name}.finished")
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not finished.exists():
            make(folder)
            finished.touch()
    return folder
