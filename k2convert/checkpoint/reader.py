"""Tensor bytes from shards by positioned reads.

`pread` and not `mmap`: a file that is cut short or fails under a memory map kills the process with SIGBUS, and mapped
pages count as its memory. Readers are thread-safe; every read names file and tensor when it fails.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from k2convert.checkpoint.header import TensorInfo
from k2convert.errors import SourceReadError

Bytes = NDArray[np.uint8]


class ShardReader:
    """Reads tensors of any shard of one checkpoint; `locate` maps a shard's name to its file.

    `consumed`, if given, is called with (shard, first byte, byte after the last) when a read is done.
    """

    def __init__(
        self, locate: Callable[[str], Path], *, consumed: Callable[[str, int, int], None] | None = None
    ) -> None:
        self._locate = locate
        self._consumed = consumed
        self._descriptors: dict[str, int] = {}
        self._lock = Lock()

    def read(self, tensor: TensorInfo, *, begin: int = 0, end: int | None = None) -> Bytes:
        """Bytes [begin, end) of one tensor as a new uint8 array; raises SourceReadError."""
        end = tensor.num_bytes if end is None else end
        buffer = np.empty(end - begin, dtype=np.uint8)
        self.read_into(tensor, buffer, begin=begin)
        return buffer

    def read_into(self, tensor: TensorInfo, buffer: Bytes, *, begin: int = 0) -> None:
        """Fill `buffer` with the tensor's bytes from `begin` on."""
        view, position = buffer.data, tensor.begin + begin
        try:
            descriptor = self._descriptor(tensor.shard)
            while len(view):
                count = os.preadv(descriptor, [view], position)
                if count == 0:
                    raise SourceReadError(
                        f"{self._locate(tensor.shard)}: tensor {tensor.name}: the file ends at byte {position}. "
                        "It has been cut short since the start: restore it and run again."
                    )
                view, position = view[count:], position + count
            if self._consumed is not None:
                self._consumed(tensor.shard, tensor.begin + begin, position)
        except SourceReadError:
            raise
        except OSError as error:
            raise SourceReadError(
                f"{self._locate(tensor.shard)}: tensor {tensor.name}: reading failed ({error.strerror}). "
                "Check the disk and run again: finished shards stay finished."
            ) from error

    def prefetch(self, tensor: TensorInfo, *, begin: int = 0, end: int | None = None) -> None:
        """Ask the system to have these bytes in memory soon; returns at once, and a refusal does not matter."""
        end = tensor.num_bytes if end is None else end
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor(tensor.shard), tensor.begin + begin, end - begin, os.POSIX_FADV_WILLNEED)

    def _descriptor(self, shard: str) -> int:
        with self._lock:
            if shard not in self._descriptors:
                descriptor = os.open(self._locate(shard), os.O_RDONLY | os.O_CLOEXEC)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                self._descriptors[shard] = descriptor
            return self._descriptors[shard]

    def close(self) -> None:
        """Close every file; the reader can be used again and reopens them."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
