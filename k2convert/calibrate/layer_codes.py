"""The converted experts of one layer, between the walk that makes them and the shards that take them.

    codes-003.safetensors    the projections [N, K] of layer 3
        MODULE.packed        U8 [N, K/2]
        MODULE.block_scales  U8 [N, K/16]
        MODULE.global_scale  F32 [1]

The file is complete or absent. Its blake3 is kept by the work folder (work.py), which checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from k2convert.checkpoint.header import encode_header, read_header
from k2convert.checkpoint.reader import ShardReader
from k2convert.checkpoint.writer import ALIGNMENT, ShardWriter
from k2convert.choices import BLOCK_SIZE
from k2convert.errors import CheckpointError
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight

_PACKED, _SCALES, _GLOBAL = "packed", "block_scales", "global_scale"
_FP32_BYTES = 4

Write = Callable[[str, Nvfp4Weight], None]
"""Appends one projection, by the name of its module."""


@contextmanager
def writing_layer_codes(
    path: Path, shapes: Mapping[str, tuple[int, int]], *, record: Callable[[Path, str], None]
) -> Generator[Write]:
    """Yield a function that appends the projections [N, K] of `shapes`, which must come in this order.

    The file appears at the end of the block. `record` gets its blake3 before that.
    Raises DiskFullError, DestinationWriteError.
    """
    tensors: list[tuple[str, str, tuple[int, ...], int]] = []
    for module, (rows, columns) in shapes.items():
        packed, scales = (rows, columns // 2), (rows, columns // BLOCK_SIZE)
        tensors.append((f"{module}.{_PACKED}", "U8", packed, rows * packed[1]))
        tensors.append((f"{module}.{_SCALES}", "U8", scales, rows * scales[1]))
        tensors.append((f"{module}.{_GLOBAL}", "F32", (1,), _FP32_BYTES))
    header = encode_header(tensors, metadata={}, alignment=ALIGNMENT)
    waiting = iter(shapes.items())
    with ShardWriter(path, len(header) + sum(num_bytes for *_, num_bytes in tensors)) as writer:
        writer.write(header)

        def write(module: str, weight: Nvfp4Weight) -> None:
            expected = next(waiting)
            if expected != (module, weight.shape):
                raise ValueError(f"{path}: {module} {weight.shape} is not {expected[0]} {expected[1]}")
            for array in (weight.packed, weight.block_scales, np.array([weight.global_scale], dtype=np.float32)):
                writer.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

        yield write
        writer.commit(accept=partial(record, path))


class LayerCodes:
    """The open codes of one layer; any thread may read."""

    def __init__(self, path: Path) -> None:
        """Open the file, which must be whole."""
        self._path = path
        self._tensors = read_header(path).tensors
        self._reader = ShardReader(lambda _: path)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def read(self, module: str) -> Nvfp4Weight:
        """Return one projection; raises CheckpointError if the file does not have it."""
        found = [self._tensors.get(f"{module}.{name}") for name in (_PACKED, _SCALES, _GLOBAL)]
        packed, scales, scalar = found
        if packed is None or scales is None or scalar is None:
            raise CheckpointError(f"{self._path}: has no codes of {module}. Delete the file and repeat the command.")
        return Nvfp4Weight(
            self._reader.read(packed).reshape(packed.shape),
            self._reader.read(scales).reshape(scales.shape),
            float(self._reader.read(scalar).view(np.float32)[0]),
        )
