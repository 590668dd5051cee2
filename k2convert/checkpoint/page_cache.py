"""What the system's cache holds of a file: asked without reading any of it, written to disk early, given back.

A mapping of the file is asked for its resident pages (mincore); nothing is read through the mapping, so a file that
shrinks meanwhile harms nobody and no page counts as this process's memory.
"""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from k2convert.buffers import PAGE_BYTES

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


class PageCache:
    """What the system holds of one open file. To a file that the user may not write, it says that all is held."""

    def __init__(self, descriptor: int) -> None:
        """Raises OSError or ValueError where the file cannot be mapped, an empty one among them."""
        self._num_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self._num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data

    def holds_most(self, begin: int, end: int) -> bool:
        """Whether more than half of the pages of the file's bytes [begin, end) are in memory."""
        first, stop = begin // PAGE_BYTES * PAGE_BYTES, min(end, self._num_bytes)
        if stop <= first:
            return True
        resident = np.zeros(-(-(stop - first) // PAGE_BYTES), dtype=np.uint8)
        where, length = ctypes.c_void_p(self._address + first), ctypes.c_size_t(stop - first)
        failed = _libc.mincore(where, length, ctypes.c_void_p(resident.ctypes.data)) != 0
        return failed or 2 * int(np.count_nonzero(resident & 1)) > resident.size


def start_writing(descriptor: int, position: int, num_bytes: int) -> None:
    """Let the system begin to bring a written range to disk; nothing is waited for, and a filesystem may refuse."""
    offset, length = ctypes.c_int64(position), ctypes.c_int64(num_bytes)
    _libc.sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


def leave_cache(path: Path) -> None:
    """Give back the memory that the system has a file in, for one that nobody will read again."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
