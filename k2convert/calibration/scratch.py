"""Where the big tensors of a layer are: on a CPU in files, on any other device in its memory.

A file is in the work folder and has no name, so that nothing is left of it when the process ends. It is mapped into
memory and has all its bytes on the disk from the start. What was touched counts as memory of the process until
`release`; the bytes stay the same. So memory does not grow with the tokens of a text.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Final
from weakref import WeakSet

import torch
from torch import Tensor

from k2convert.checkpoint.files import writing
from k2convert.forward.decoder import CUDA_PIECE_TOKENS, PIECE_TOKENS

_FLOAT_BYTES: Final = 4


class Scratch:
    """Gives big tensors of one device; on a CPU they are in files in `folder`. Any thread may use it."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._piece_rows = PIECE_TOKENS if device == "cpu" else CUDA_PIECE_TOKENS
        self._lock = Lock()  # guards the set
        self._mapped: WeakSet[mmap.mmap] = WeakSet()

    def empty(self, rows: int, columns: int) -> Tensor:
        """Return f32 [rows, columns] of any values; raises DiskFullError, DestinationWriteError."""
        if self._device != "cpu":
            return torch.empty(rows, columns, device=self._device)
        num_bytes = max(rows * columns, 1) * _FLOAT_BYTES
        with writing(self._folder), tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            mapped = mmap.mmap(file.fileno(), num_bytes)
        with self._lock:
            self._mapped.add(mapped)
        return torch.frombuffer(mapped, dtype=torch.float32)[: rows * columns].view(rows, columns)

    def copy(self, values: Tensor) -> Tensor:
        """Return a copy of f32 [rows, columns]."""
        copied = self.empty(*values.shape)
        for rows in self.pieces(values.shape[0]):
            copied[rows] = values[rows]
        return copied

    def pieces(self, rows: int) -> Iterator[slice]:
        """Yield the rows in pieces that fit into memory; releases after each of them what was touched."""
        for start in range(0, rows, self._piece_rows):
            yield slice(start, min(start + self._piece_rows, rows))
            self.release()

    def release(self) -> None:
        """Give the memory back that the files take. It is not lost: it is read again when it is touched."""
        with self._lock:
            mapped = list(self._mapped)
        for memory in mapped:
            memory.madvise(mmap.MADV_DONTNEED)
