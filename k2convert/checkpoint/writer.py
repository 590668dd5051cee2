"""One shard, complete or absent: written as NAME.tmp, hashed on the way, synced and renamed.

Shards are written with O_DIRECT if the filesystem allows it: the file is pre-sized and filled in order from aligned
staging buffers. Otherwise writes are buffered. A file to be uploaded is always buffered, because it is read again soon.
"""

import errno
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from k2convert.checkpoint.files import TEMPORARY_SUFFIX, write_all, writing
from k2convert.checkpoint.folders import create_file, remove_file, replace_file
from k2convert.checkpoint.reader import start_writing
from k2convert.errors import DestinationError
from k2convert.machine import BUFFERS

ALIGNMENT = 4096
STAGING_BYTES = 16 << 20
STAGING_BYTES_CACHED = 4 << 20  # large writes gain nothing with the page cache
NUM_STAGING = 4


class ShardWriter:
    """Writes one file of known size in order; `commit` renames it. One `for_upload` is cached, and has a sha256."""

    def __init__(self, path: Path, num_bytes: int, *, for_upload: bool = False, suffix: str = TEMPORARY_SUFFIX) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + suffix)
        self._num_bytes = num_bytes
        self._hash = blake3()
        self._sha256 = hashlib.sha256() if for_upload else None
        # Whole pages, as O_DIRECT requires. NumPy copies into them without the GIL.
        self._size = STAGING_BYTES_CACHED if for_upload else STAGING_BYTES
        self._staging = [BUFFERS.empty_pages(self._size)[: self._size] for _ in range(NUM_STAGING)]
        self._current = 0
        self._filled = 0
        self._position = 0
        self._pending: deque[tuple[Future[None], Future[object]]] = deque()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="write")
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hash")  # one: the order matters
        self._direct: int | None = None
        self._is_committed = False
        try:
            with writing(path):
                self._descriptor = create_file(self._temporary, flags=os.O_RDWR)
                try:
                    os.posix_fallocate(self._descriptor, 0, max(self._num_bytes, 1))
                    os.ftruncate(self._descriptor, self._num_bytes)
                    self._direct = _open_direct(self._temporary) if not for_upload else None
                except OSError:
                    os.close(self._descriptor)
                    remove_file(self._temporary)
                    raise
        except Exception:
            self._pool.shutdown()
            self._hasher.shutdown()
            raise

    def write(self, data: "bytes | memoryview") -> None:
        """Append bytes. The caller may reuse them when this returns. Raises DiskFullError or DestinationWriteError."""
        view = np.frombuffer(data, dtype=np.uint8)
        while len(view):
            take = min(len(view), self._size - self._filled)
            self._staging[self._current][self._filled : self._filled + take] = view[:take]
            self._filled += take
            view = view[take:]
            if self._filled == self._size:
                self._flush()

    def commit(self, *, accept: Callable[[str], None] | None = None) -> str:
        """Flush, sync, let `accept` see the blake3, and rename to the final name; returns the blake3 as hex."""
        with writing(self._path):
            self._flush()
            while self._pending:
                self._wait_for_oldest()
            if self._position != self._num_bytes:
                raise RuntimeError(f"{self._path}: planned {self._num_bytes} bytes, wrote {self._position}")
            os.fsync(self._descriptor)
            self._close()
            if accept is not None:
                accept(self._hash.hexdigest())
            replace_file(self._temporary, self._path)
            self._is_committed = True
        return self._hash.hexdigest()

    @property
    def sha256(self) -> str | None:
        """The sha256 of a committed file as hex, or None if it is not `for_upload`."""
        if self._sha256 is None:
            return None
        return self._sha256.hexdigest()

    def _flush(self) -> None:
        filled = self._filled
        position = self._position
        used = self._staging[self._current][:filled]
        stored = self._pool.submit(self._store, used, position)
        self._pending.append((stored, self._hasher.submit(self._update_hashes, used.data)))
        self._position = position + filled
        self._filled = 0
        self._current = (self._current + 1) % NUM_STAGING
        while len(self._pending) >= NUM_STAGING:
            with writing(self._path):
                self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for done in self._pending.popleft():
            done.result()

    def _update_hashes(self, data: memoryview) -> None:
        self._hash.update(data)
        if self._sha256 is not None:
            self._sha256.update(data)

    def _store(self, used: NDArray[np.uint8], position: int) -> None:
        aligned = 0
        if self._direct is not None:
            aligned = len(used) - len(used) % ALIGNMENT
            write_all(self._direct, used[:aligned].data, position)
        if aligned < len(used):
            write_all(self._descriptor, used[aligned:].data, position + aligned)
            # Otherwise `commit` would wait for all of it.
            start_writing(self._descriptor, position + aligned, len(used) - aligned)

    def _close(self) -> None:
        self._pool.shutdown(wait=True)
        self._hasher.shutdown(wait=True)
        for descriptor in (self._direct, self._descriptor):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._direct = None
        self._descriptor = -1

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._descriptor >= 0:
            self._close()
        if not self._is_committed:
            with suppress(OSError, DestinationError):
                remove_file(self._temporary)


def _open_direct(path: Path) -> int | None:
    """Open a second descriptor with O_DIRECT and try to write a block; None if it is refused (tmpfs, FUSE)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(descriptor).st_size < ALIGNMENT:
        os.close(descriptor)
        return None
    with mmap.mmap(-1, ALIGNMENT) as probe:
        try:
            os.pwrite(descriptor, probe, 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                return None
            raise
    return descriptor
