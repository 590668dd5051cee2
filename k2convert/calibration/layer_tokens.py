"""The tokens of a layer that rule gptq converts: their inputs, where these are, and the error on them.

What has a row for each token is in files on a CPU, and on any other device in its memory. A file is in the work folder
and has no name, so that nothing is left of it when the process ends. It is mapped into memory, and has all its bytes on
the disk from the start. What was touched counts as memory of the process until `release`; the bytes stay the same. So
memory does not grow with the tokens of a text.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final
from weakref import WeakSet

import torch
from torch import Tensor

from k2convert.checkpoint.files import writing
from k2convert.forward.decoder import CUDA_PIECE_TOKENS, PIECE_TOKENS
from k2convert.forward.moe import Routing
from k2convert.quantize.gptq.moments import Moments

_CHUNK_ROWS: Final = 256
_NOISE: Final = 1e-12  # FP32 sums in another order: there is nothing before the first MoE layer
_SCATTERED_ROWS: Final = 256  # touched at a time: with each come up to 64 KiB around it
_FLOAT_BYTES: Final = 4


class Scratch:
    """Gives big tensors of one device; on a CPU they are in files in `folder`. Any thread may use it."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder = folder
        self._device = device
        self._piece_rows, self._scattered_rows = (
            (PIECE_TOKENS, _SCATTERED_ROWS) if device == "cpu" else (CUDA_PIECE_TOKENS, CUDA_PIECE_TOKENS)
        )
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

    def gather(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Return the rows `tokens` int64 [t] of f32 [T, K], a copy in memory."""
        rows_tK = values.new_empty(tokens.shape[0], values.shape[1])
        for rows in self._steps(tokens.shape[0], self._scattered_rows):
            rows_tK[rows] = values[tokens[rows]]
        return rows_tK

    def subtract(self, values: Tensor, tokens: Tensor, others: Tensor) -> None:
        """Subtract f32 [t, K] from the rows `tokens` int64 [t] of f32 [T, K]; each is there once."""
        for rows in self._steps(tokens.shape[0], self._scattered_rows):
            values.index_add_(0, tokens[rows], others[rows], alpha=-1)

    def pieces(self, rows: int) -> Iterator[slice]:
        """Return the rows in pieces that fit into memory; releases after each of them what was touched."""
        return self._steps(rows, self._piece_rows)

    def _steps(self, rows: int, step: int) -> Iterator[slice]:
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))
            self.release()

    def release(self) -> None:
        """Give the memory back that the files take. It is not lost: it is read again when it is touched."""
        with self._lock:
            mapped = list(self._mapped)
        for memory in mapped:
            memory.madvise(mmap.MADV_DONTNEED)


@dataclass(slots=True, eq=False)
class LayerInputs:
    """Inputs of a MoE layer for T tokens, all on one device; smoothing is not in them yet.

    `x` f32 [T, K] is the MLP's input in the converted model, `residual` f32 [T, K] what the model lacks after the layer
    without routed experts. `token_weights` f64 [T] are 1 / ||h||^2. `halves` uint8 [F] deals the first F tokens to two
    halves. Everything is fitted to these; the others are only measured. `gate_up` has their moments of x, with these
    weights.
    """

    x: Tensor
    residual: Tensor
    routing: Routing
    token_weights: Tensor
    halves: Tensor
    gate_up: Moments | None

    @property
    def first_measured(self) -> int:
        """The first of the tokens that errors are measured on: those kept out of the fit, and as many before them.

        Without any that are kept out, all are measured.
        """
        fitted = self.halves.shape[0]
        held_out = self.x.shape[0] - fitted
        return max(0, fitted - held_out) if held_out else 0


def output_errors(residual_mK: Tensor, inputs: LayerInputs, scratch: Scratch) -> tuple[float, float]:
    """Return the mean of ||R||^2 / ||h||^2 over the measured tokens that were fitted to, and over the others."""
    weights = inputs.token_weights[inputs.first_measured :]
    fitted = inputs.halves.shape[0] - inputs.first_measured
    parts = range(fitted), range(fitted, residual_mK.shape[0])
    first, second = (_error(residual_mK, weights, scratch, tokens) for tokens in parts)
    return first, second


def _error(residual_mK: Tensor, weights: Tensor, scratch: Scratch, tokens: range) -> float:
    total = 0.0
    for start in tokens[::_CHUNK_ROWS]:
        rows = slice(start, min(start + _CHUNK_ROWS, tokens.stop))
        total += float((residual_mK[rows].double().square().sum(dim=1) * weights[rows]).sum())
        scratch.release()
    mean = total / max(len(tokens), 1)
    return mean if mean > _NOISE else 0.0
