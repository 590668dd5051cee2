"""The system's page cache for one file: ask what it holds, start writing it to disk, drop it.

`PageCache` maps the file and asks for its resident pages (mincore). Nothing is read through the mapping, so a file
that shrinks meanwhile does no harm and no page counts as this process's memory.
"""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np

from k2convert.buffers import PAGE_BYTES

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE: Final = 2  # linux/fs.h


class PageCache:
    """What the system holds of one open file. For files the user cannot write, the kernel reports all of it."""

    def __init__(self, descriptor: int) -> None:
        """Map the file; raises OSError or ValueError if it cannot be mapped, for example because it is empty."""
        self._num_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self._num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data

    def holds_most(self, begin: int, end: int) -> bool:
        """Return whether more than half of the pages of bytes [begin, end) are in memory."""
        first, stop = begin // PAGE_BYTES * PAGE_BYTES, min(end, self._num_bytes)
        if stop <= first:
            return True
        resident = np.zeros(-(-(stop - first) // PAGE_BYTES), dtype=np.uint8)
        where, length = ctypes.c_void_p(self._address + first), ctypes.c_size_t(stop - first)
        failed = _libc.mincore(where, length, ctypes.c_void_p(resident.ctypes.data)) != 0
        return failed or 2 * int(np.count_nonzero(resident & 1)) > resident.size


def start_writing(descriptor: int, position: int, num_bytes: int) -> None:
    """Ask the system to start writing a range to disk. Does not wait; a filesystem may ignore it."""
    offset, length = ctypes.c_int64(position), ctypes.c_int64(num_bytes)
    _libc.sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


def leave_cache(path: Path) -> None:
    """Drop a file from the page cache. For files that will not be read again."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
