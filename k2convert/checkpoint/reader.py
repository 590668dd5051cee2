"""Tensor bytes from shards by positioned reads.

`pread` is used instead of `mmap`: a mapped file that is truncated or fails kills the process with SIGBUS, and mapped
pages count as its memory. Bytes in the page cache are copied from it. Other bytes are read with O_DIRECT if the
filesystem allows it: a checkpoint is larger than memory, and filling the page cache costs as much as converting (cold
rows against `cp` in scripts/bench/RESULTS.md). Readers are thread-safe. A failed read names file and tensor.

`PageCache` maps a file to ask for its resident pages (mincore). Nothing is read through the mapping, so a file that
shrinks meanwhile does no harm and no page counts as this process's memory.
"""

import ctypes
import errno
import hashlib
import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.checkpoint.header import DTYPE_BYTES, TensorInfo
from k2convert.errors import SourceReadError
from k2convert.machine import BUFFERS, PAGE_BYTES

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE: Final = 2  # linux/fs.h
_HASH_BYTES: Final = 1 << 20


class PageCache:
    """Pages of one open file that the system holds. For files the user cannot write, the kernel reports all of it."""

    def __init__(self, descriptor: int) -> None:
        """Map the file; raises OSError or ValueError if it cannot be mapped, for example because it is empty."""
        self._num_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self._num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data

    def holds_most(self, begin: int, end: int) -> bool:
        """Return whether more than half of the pages of bytes [begin, end) are in memory."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        stop = min(end, self._num_bytes)
        if stop <= first:
            return True
        resident = np.zeros(-(-(stop - first) // mmap.PAGESIZE), dtype=np.uint8)
        where = ctypes.c_void_p(self._address + first)
        length = ctypes.c_size_t(stop - first)
        failed = _libc.mincore(where, length, ctypes.c_void_p(resident.ctypes.data)) != 0
        return failed or 2 * int(np.count_nonzero(resident & 1)) > resident.size


def start_writing(descriptor: int, position: int, num_bytes: int) -> None:
    """Ask the system to start writing a range to disk. Does not wait; a filesystem may ignore it."""
    offset = ctypes.c_int64(position)
    length = ctypes.c_int64(num_bytes)
    _libc.sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)


def leave_cache(path: Path) -> None:
    """Drop a file from the page cache. For files that will not be read again."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Bytes = NDArray[np.uint8]
_NOTHING: Bytes = np.empty(0, dtype=np.uint8)


def same_bytes(left: Bytes, right: Bytes) -> bool:
    """Return whether two flat uint8 arrays are equal; compares eight bytes at once, in an eighth of the memory."""
    if left.size != right.size:
        return False
    words = left.size - left.size % 8
    return np.array_equal(left[:words].view(np.uint64), right[:words].view(np.uint64)) and np.array_equal(
        left[words:], right[words:]
    )


_FIRST_UNUSABLE: Final = {
    "F64": 0x7FF0 << 48,
    "F32": 0x7F80 << 16,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F8_E5M2": 0x7C,
    "F8_E4M3": 0x7F,
}
"""The bits of the smallest positive value that is no number: infinity, or NaN if the type has no infinity."""


def is_finite(data: Bytes, dtype: str) -> bool:
    """Return whether no value is NaN or infinite; true for types that have neither.

    As signed integers the largest positive value is the maximum, as unsigned ones the largest negative value is. Both
    maxima together take 0.4 ms for 16 MiB of BF16 on one core, and no memory.
    """
    first = _FIRST_UNUSABLE.get(dtype)
    if first is None or not data.size:
        return True
    width = DTYPE_BYTES[dtype]
    sign = 1 << (8 * width - 1)
    return bool(data.view(f"<i{width}").max() < first and data.view(f"<u{width}").max() < sign + first)


def is_zero(data: Bytes) -> bool:
    """Return whether all bytes are zero. The first page answers for most tensors, in a thousandth of the time."""
    return not (data[:PAGE_BYTES].any() or data.any())


@dataclass(frozen=True, slots=True)
class _OpenShard:
    """The descriptors of a shard, one of them with O_DIRECT, and its cached pages; None if the filesystem refuses."""

    descriptor: int
    direct: int | None = None
    cache: PageCache | None = None


class ShardReader:
    """Reads tensors of any shard of one checkpoint. `locate` maps a shard's name to its file."""

    def __init__(self, locate: Callable[[str], Path]) -> None:
        self._locate = locate
        self._files: dict[str, _OpenShard] = {}
        self._descriptors: list[int] = []
        self._is_closed = False
        self._lock = Lock()

    def read(self, tensor: TensorInfo, *, begin: int = 0, end: int | None = None) -> Bytes:
        """Return bytes [begin, end) of one tensor as a new uint8 array; raises SourceReadError."""
        begin = tensor.begin + begin
        end = tensor.begin + (tensor.num_bytes if end is None else end)
        return self._bytes(tensor, begin, end)

    def _bytes(self, tensor: TensorInfo, begin: int, end: int) -> Bytes:
        if begin == end:
            return _NOTHING
        try:
            file = self._open(tensor.shard)
            descriptor = file.descriptor
            first = begin - begin % PAGE_BYTES
            pages = BUFFERS.empty_pages(end - begin)  # each byte keeps its offset within a page, as O_DIRECT requires
            position = begin
            unit = 1
            if file.direct is not None and file.cache is not None and not file.cache.holds_most(begin, end):
                descriptor = file.direct
                unit = PAGE_BYTES
            while position < end:
                start = position - position % unit
                stop = -(-end // unit) * unit
                count = os.preadv(descriptor, [pages[start - first : stop - first].data], start)
                if start + count <= position:
                    raise SourceReadError(
                        f"{self._locate(tensor.shard)}: tensor {tensor.name}: the file ends at byte {position}. "
                        "It was truncated after the start: restore it and run the same command again."
                    )
                position = start + count
            data = pages[begin - first : end - first]
        except SourceReadError:
            raise
        except OSError as error:
            if error.errno == errno.ENOMEM:  # of the buffer
                raise MemoryError from error
            raise SourceReadError(
                f"{self._locate(tensor.shard)}: tensor {tensor.name}: reading failed ({error.strerror}). "
                "Check the disk, then run the same command again."
            ) from error
        # Unaligned tensors are copied to an aligned buffer.
        if begin % DTYPE_BYTES[tensor.dtype] == 0:
            return data
        return data.copy()

    def _open(self, shard: str) -> _OpenShard:
        with self._lock:
            if self._is_closed:
                raise ValueError("the reader is closed")
            if shard not in self._files:
                self._files[shard] = _open_file(self._locate(shard), self._descriptors)
            return self._files[shard]

    def release(self) -> None:
        """Close every file, also one whose opening was interrupted. Reading opens them again."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.pop())
            self._files.clear()

    def close(self) -> None:
        """Close every file for good: nothing is read after that."""
        self._is_closed = True
        self.release()

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class FileHash:
    """The sha256 of a file, computed in file order by a thread of its own.

    A reader that waits for it finds the bytes in the page cache, so the disk reads them once. SHA-256 has 1.6 GB/s on
    one core with SHA-NI. With three busy programs on each of two cores, `run --rule max` of 1.7 GB took 18 s instead of
    12 from a cold disk, and 14.5 s instead of 11.5 from the page cache.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._position = 0.0
        self._moved = Condition()
        self._stop = Event()
        self._error: OSError | None = None
        self._thread = Thread(target=self._run, name="sha256", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        buffer = memoryview(bytearray(_HASH_BYTES))
        try:
            with self._path.open("rb", buffering=0) as file:
                while not self._stop.is_set() and (count := file.readinto(buffer)):
                    self._digest.update(buffer[:count])
                    self._move(self._position + count)
        except OSError as error:
            self._error = error
        finally:
            self._move(math.inf)

    def _move(self, position: float) -> None:
        with self._moved:
            self._position = position
            self._moved.notify_all()

    def wait(self, end: int) -> None:
        """Wait until the bytes before `end` are hashed, or nothing more will be."""
        with self._moved:
            self._moved.wait_for(lambda: self._position >= end)

    def hexdigest(self) -> str:
        """Wait for the whole file; raises SourceReadError."""
        self._thread.join()
        if self._error is not None:
            reason = self._error.strerror
            raise SourceReadError(f"{self._path}: cannot be read ({reason}). Check permissions and disk.")
        return self._digest.hexdigest()

    def __enter__(self) -> "FileHash":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()


def _open_file(path: Path, descriptors: list[int]) -> _OpenShard:
    """Open a file; its descriptors are in the list as soon as they exist."""
    descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    buffered = descriptors[-1]
    os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    try:
        cache = PageCache(buffered)
    except (OSError, ValueError):
        return _OpenShard(buffered)
    return _OpenShard(buffered, _open_direct(path, descriptors), cache)


def _open_direct(path: Path, descriptors: list[int]) -> int | None:
    """Open a second descriptor with O_DIRECT and try to read a page; None if it is refused (FUSE, some tmpfs)."""
    try:
        descriptors.append(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:
        return None
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(descriptors[-1], [page], 0)
    except OSError:
        os.close(descriptors.pop())
        return None
    return descriptors[-1]
