"""A pool of buffers for tensor bytes, because the tensors of one checkpoint have few different sizes.

A new buffer of 8 MB costs up to 2,000 page faults, which take as long as `max` takes to fill it. So buffers stay in
the pool. One is free again when only the pool refers to it: a tensor, view or memoryview of an array keeps the array
alive.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

SMALLEST_POOLED: Final = 1 << 16
PAGE_BYTES: Final = 4096
POOL_BYTES: Final = 384 << 20
SIZE_BITS: Final = 4


def _free_references() -> int:
    """Return the reference count of an array that only a list and a loop over it hold, in this interpreter."""
    for array in [np.empty(0, dtype=np.uint8)]:
        return sys.getrefcount(array)
    raise AssertionError


_FREE: Final = _free_references()


class BufferPool:
    """Hands out uint8 arrays with arbitrary contents; safe to use from several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._arrays: list[NDArray[np.uint8]] = []
        self._lock = Lock()

    def empty(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a uint8 array [num_bytes], in used memory if a buffer of that size is free."""
        return self.empty_pages(num_bytes)[:num_bytes]

    def empty_pages(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return whole pages, one more than these bytes need, so that the bytes fit at any offset within a page."""
        held = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        if num_bytes < SMALLEST_POOLED:
            memory = np.empty(held + PAGE_BYTES, dtype=np.uint8)
            skipped = -memory.ctypes.data % PAGE_BYTES
            return memory[skipped : skipped + held]
        if num_bytes > self._capacity_bytes // 4:
            return _map(held)
        with self._lock:
            return self._take(_rounded(held - PAGE_BYTES) + PAGE_BYTES)[:held]

    def limit(self, capacity_bytes: int) -> None:
        """Keep at most this many bytes from now on."""
        with self._lock:
            self._capacity_bytes = capacity_bytes
            self._leave_room(0)

    def clear(self) -> None:
        """Release all buffers; those in use stay alive for their users, the rest returns to the system."""
        with self._lock:
            self._arrays.clear()

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        for position in range(len(self._arrays)):
            array = self._arrays[position]
            if array.size == num_bytes and sys.getrefcount(array) == _FREE:
                self._arrays.append(self._arrays.pop(position))
                return array
        self._leave_room(num_bytes)
        array = _map(num_bytes)
        self._arrays.append(array)
        return array

    def _leave_room(self, num_bytes: int) -> None:
        """Drop the least recently used buffers, free ones first; dropped buffers in use stay alive for their users."""
        excess = sum(array.nbytes for array in self._arrays) + num_bytes - self._capacity_bytes
        for used in (False, True):
            position = 0
            while excess > 0 and position < len(self._arrays):
                if used or sys.getrefcount(self._arrays[position]) == _FREE - 1:
                    excess -= self._arrays.pop(position).nbytes
                else:
                    position += 1


def _map(num_bytes: int) -> NDArray[np.uint8]:
    """Map separate pages, which return to the system with the array; an allocator might keep them.

    Ask for huge pages, because each page costs a fault.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)


def _rounded(num_bytes: int) -> int:
    """Round up to SIZE_BITS significant bits, at most an eighth more, so that similar sizes share buffers."""
    unit = 1 << max(num_bytes.bit_length() - SIZE_BITS, 0)
    return -(-num_bytes // unit) * unit


BUFFERS: Final = BufferPool(POOL_BYTES)
"""The pool for both source and result: an INT4 weight and its NVFP4 form have parts of the same sizes."""
