"""Free a source file's disk blocks while the file is read (hole punching), for jobs with little disk."""

import ctypes
import os
import tempfile
from pathlib import Path
from threading import Lock
from typing import Final

_BLOCK: Final = 4096
_KEEP_SIZE_PUNCH_HOLE: Final = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, linux/falloc.h


def can_punch_holes(folder: Path) -> bool:
    """Return whether the folder's filesystem can free parts of a file. Tries it on a small unnamed file."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\1" * (4 * _BLOCK))
            probe.flush()
            is_punched = _punch(probe.fileno(), _BLOCK, 3 * _BLOCK)
            return is_punched and os.fstat(probe.fileno()).st_blocks * 512 < 4 * _BLOCK
    except OSError:  # the folder is not writable
        return False


class ShrinkingFile:
    """A source file whose blocks are freed as they are read. `consume` is thread-safe and accepts any order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spans: list[tuple[int, int]] = []
        self._lock = Lock()

    def consume(self, begin: int, end: int) -> None:
        """Record that bytes [begin, end) were read for the last time, and free every block that is fully read."""
        with self._lock:
            spans: list[tuple[int, int]] = []
            for span in self._spans:
                if span[1] < begin or span[0] > end:
                    spans.append(span)
                else:
                    begin, end = min(begin, span[0]), max(end, span[1])
            self._spans = sorted([*spans, (begin, end)])
            _free_blocks(self._path, begin, end)


def _free_blocks(path: Path, begin: int, end: int) -> None:
    """Free the whole blocks within bytes [begin, end)."""
    begin, end = -(-begin // _BLOCK) * _BLOCK, end // _BLOCK * _BLOCK
    if end <= begin:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _punch(descriptor, begin, end)
    finally:
        os.close(descriptor)


def _punch(descriptor: int, begin: int, end: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (descriptor, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(end - begin))
    return libc.fallocate64(*arguments) == 0
