"""Tensor bytes from shards by positioned reads.

`pread` and not `mmap`: a file that is cut short or fails under a memory map kills the process with SIGBUS, and mapped
pages count as its memory. What the system's cache holds is copied from there; the rest goes past the cache (O_DIRECT)
where the filesystem allows it, because a checkpoint is larger than memory and every page put into the cache costs as
much as converting it. Readers are thread-safe; every read names file and tensor when it fails.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from k2convert.buffers import BUFFERS, PAGE_BYTES
from k2convert.checkpoint.header import DTYPE_BYTES, TensorInfo
from k2convert.checkpoint.page_cache import PageCache
from k2convert.errors import SourceReadError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _File:
    """One open shard; `direct` goes past the cache, None where the filesystem will not."""

    buffered: int
    direct: int | None
    cache: PageCache | None


class ShardReader:
    """Reads tensors of any shard of one checkpoint; `locate` maps a shard's name to its file.

    `consumed`, if given, is called with (shard, first byte, byte after the last) when a read is done.
    """

    def __init__(
        self, locate: Callable[[str], Path], *, consumed: Callable[[str, int, int], None] | None = None
    ) -> None:
        self._locate = locate
        self._consumed = consumed
        self._files: dict[str, _File] = {}
        self._lock = Lock()

    def read(self, tensor: TensorInfo, *, begin: int = 0, end: int | None = None) -> Bytes:
        """Bytes [begin, end) of one tensor as a uint8 array of the caller's own; raises SourceReadError."""
        begin, end = tensor.begin + begin, tensor.begin + (tensor.num_bytes if end is None else end)
        try:
            data = self._read(tensor, begin, end)
            if self._consumed is not None:
                self._consumed(tensor.shard, begin, end)
        except SourceReadError:
            raise
        except OSError as error:
            raise SourceReadError(
                f"{self._locate(tensor.shard)}: tensor {tensor.name}: reading failed ({error.strerror}). "
                "Check the disk and run again: finished shards stay finished."
            ) from error
        # What lies across its elements' boundaries in the file is copied to where an element may begin.
        return data if begin % DTYPE_BYTES[tensor.dtype] == 0 else data.copy()

    def _read(self, tensor: TensorInfo, begin: int, end: int) -> Bytes:
        file, first = self._open(tensor.shard), begin - begin % PAGE_BYTES
        pages = BUFFERS.empty_pages(end - begin)  # every byte goes where it lies in its page of the file
        position = begin
        descriptor, unit = file.buffered, 1
        if file.direct is not None and file.cache is not None and not file.cache.holds_most(begin, end):
            descriptor, unit = file.direct, PAGE_BYTES
        while position < end:
            start, stop = position - position % unit, -(-end // unit) * unit
            count = os.preadv(descriptor, [pages[start - first : stop - first].data], start)
            if start + count <= position:
                raise SourceReadError(
                    f"{self._locate(tensor.shard)}: tensor {tensor.name}: the file ends at byte {position}. "
                    "It has been cut short since the start: restore it and run again."
                )
            position = start + count
        return pages[begin - first : end - first]

    def _open(self, shard: str) -> _File:
        with self._lock:
            if shard not in self._files:
                self._files[shard] = _open_file(self._locate(shard))
            return self._files[shard]

    def close(self) -> None:
        """Close every file; the reader can be used again and reopens them."""
        with self._lock:
            for file in self._files.values():
                os.close(file.buffered)
                if file.direct is not None:
                    os.close(file.direct)
            self._files.clear()

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _open_file(path: Path) -> _File:
    buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    try:
        cache = PageCache(buffered)
    except (OSError, ValueError):
        return _File(buffered, None, None)
    return _File(buffered, _open_direct(path), cache)


def _open_direct(path: Path) -> int | None:
    """A second descriptor for O_DIRECT, proven by reading one page; None where it is refused (FUSE, some tmpfs)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(descriptor, [page], 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
