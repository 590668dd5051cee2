"""Cutting a tensor: rows into chunks of bounded memory, flat lists of blocks into samples and runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, GROUP_SIZE

CHUNK_ELEMENTS: Final = 1 << 20
"""Weights handled at once. Working memory is a small multiple of it, for a tensor of any size."""

SAMPLE_STRIDE: Final = 64
MIN_SAMPLED_BLOCKS: Final = 4096

BLOCKS_PER_GROUP: Final = GROUP_SIZE // BLOCK_SIZE
BYTES_PER_BLOCK: Final = BLOCK_SIZE // 2


def row_chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) over the rows, about CHUNK_ELEMENTS weights at a time."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def sampled_range(num_blocks: int, *, sample_seed: int) -> range:
    """Return the row-major indices of the sampled blocks: one in 64, or about 4,096 of a smaller tensor."""
    stride = min(SAMPLE_STRIDE, max(1, num_blocks // MIN_SAMPLED_BLOCKS))
    return range(sample_seed % stride, num_blocks, stride)


def run_starts(sorted_M: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index at which each run of equal values starts, int64, for a sorted array [M]."""
    begins = np.ones(sorted_M.size, dtype=np.bool_)
    begins[1:] = sorted_M[1:] != sorted_M[:-1]
    return np.flatnonzero(begins)
