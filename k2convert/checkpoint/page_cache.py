"""Asking the system which parts of a file lie in its cache, without reading any of it.

A mapping of the file is asked for its resident pages (mincore); nothing is read through the mapping, so a file that
shrinks meanwhile harms nobody and no page counts as this process's memory.
"""

import ctypes
import mmap
import os

import numpy as np

from k2convert.buffers import PAGE_BYTES

_libc = ctypes.CDLL(None, use_errno=True)


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
