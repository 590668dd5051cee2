"""checkpoint.holes."""

import ctypes
import os
import tempfile
from pathlib import Path
from threading import Lock

_BLOCK = 4096


_KEEP_SIZE_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, linux/falloc.h


def punch_hole(path: Path, begin: int, end: int) -> bool:
    """Give the whole blocks within bytes [begin, end) of a file back to the filesystem; False if it cannot."""
    begin, end = -(-begin // _BLOCK) * _BLOCK, end // _BLOCK * _BLOCK
    if end <= begin:
        return True
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _punch(descriptor, begin, end)
    finally:
        os.close(descriptor)


def _punch(descriptor: int, begin: int, end: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (descriptor, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(end - begin))
    return libc.fallocate64(*arguments) == 0


def can_punch_holes(folder: Path) -> bool:
    """Whether the filesystem of a folder takes parts of files back; tried on a small file without a name."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\1" * (4 * _BLOCK))
            probe.flush()
            is_punched = _punch(probe.fileno(), _BLOCK, 3 * _BLOCK)
            return is_punched and os.fstat(probe.fileno()).st_blocks * 512 < 4 * _BLOCK
    except OSError:  # a folder that cannot be written to
        return False


class ShrinkingFile:
    """A source file that is given back while it is read; `consume` may be called from several threads, in any order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spans: list[tuple[int, int]] = []
        self._lock = Lock()

    def consume(self, begin: int, end: int) -> None:
        """Note that [begin, end) has been read for the last time, and free every whole block that is used up."""
        with self._lock:
            spans: list[tuple[int, int]] = []
            for span in self._spans:
                if span[1] < begin or span[0] > end:
                    spans.append(span)
                else:
                    begin, end = min(begin, span[0]), max(end, span[1])
            self._spans = sorted([*spans, (begin, end)])
            punch_hole(self._path, begin, end)
