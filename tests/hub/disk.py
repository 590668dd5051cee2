"""The disk that a command takes, watched while it runs."""

import contextlib
import os
import threading
from pathlib import Path


def used_bytes(folder: Path, *suffixes: str) -> int:
    """Disk space of all files, or of those with such ends; files that disappear meanwhile are left out."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if name.endswith(suffixes or ("",)):
                    total += (Path(parent) / name).stat().st_blocks * 512
    return total


class Watched:
    """A folder, and the most bytes of disk that its files took at once during the block."""

    def __init__(self, folder: Path, *suffixes: str) -> None:
        self.folder = folder
        self.suffixes = suffixes
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, used_bytes(self.folder, *self.suffixes))

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
