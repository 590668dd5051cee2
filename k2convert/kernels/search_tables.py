"""The tables of `formats.scale_tables`, cut to what a kernel needs to find a block's best scale in one look.

The definition of `optimal` compares 82 candidates. Which of them can win depends on which magnitudes occur in the
block: a block with 1, 2, 3, 5 and 7 in it is never served best by t = 4. So the 255 sets of magnitudes fall into
`NUM_WINDOWS` windows of 16 neighbouring candidates that hold every winner, for every mantissa of s; 31 sets, which
hold few and even magnitudes and hardly ever occur, need a look at two windows. That this loses nothing is proven by
exhaustion: tests/kernels/test_windows.py compares all 735,470 histograms under all 128 mantissas with the full search.

A position p counts candidates upwards (larger scale, larger t): position 6 is the first with t >= 1. Errors are
integers in units of (s / ms)**2, capped at 2**20 - 1 so that sums of 16 stay exact in float32; no winner is near it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from k2convert.formats.scale_tables import (
    FIRST_CANDIDATE,
    MIN_MANTISSA,
    NUM_CANDIDATES,
    NUM_MANTISSAS,
    ZERO_CANDIDATE,
    scale_tables,
)

CACHE_LINE: Final = 64
LANES: Final = 16
NUM_COUNTED: Final = 8
WINDOW_STARTS: Final = (0, 7, 11, 13, 15, 16, 19, 21, 23)
NUM_WINDOWS: Final = len(WINDOW_STARTS)
NUM_POSITIONS: Final = WINDOW_STARTS[-1] + LANES
LOW_PAIR: Final = NUM_WINDOWS
HIGH_PAIR: Final = NUM_WINDOWS + 1
"""Stand for two windows that join, positions 0 to 31 and 7 to 38, in the table of windows."""
PAIRS: Final = ((0, 5), (1, 8))

WINDOW_OF_SET: Final = (
    "001030004010100061102910491019107010300011101000a110211011101110"
    "81919111419191112190211021901110a1919111319191112190211021901110"
    "8110210041101100411021004110110021102100111011002110211011101100"
    "a1919111419191114190211041901110a1919111319091102190211021901110"
)
"""The window of each set of magnitudes, one hexadecimal digit; bit k - 1 of the place says that |q| = k occurs."""

BOUND_ASSIGNMENTS: Final = (
    (0, 1, 2, 3, 4, 6, 6, 8, 8),
    (0, 1, 2, 4, 4, 6, 8, 8, 8),
    (0, 1, 3, 4, 6, 6, 8, 8, 12),
    (0, 1, 3, 4, 6, 8, 8, 8, 12),
    (0, 2, 3, 4, 6, 8, 8, 12, 12),
    (0, 3, 6, 8, 12, 12, 12, 12, 12),
)
"""Of the assignments in formats.block_bound those that some histogram needs, as doubled values: for all 735,471 of them
the greatest quotient is the same without the others (tests/kernels/test_windows.py)."""

ERROR_CAP: Final = (1 << 20) - 1
LOWEST_STEP: Final = 6
"""Positions below the first candidate with t >= 1."""
LAST_GRID_RANK: Final = NUM_CANDIDATES - 2
SHIFT_OF_ONE: Final = 4
"""mb * 2**4 reaches every ms: the first candidate with t >= 1 has this shift, or mb = 8 and one more."""


class SearchTables(NamedTuple):
    """What the CPU kernels read; flat arrays, because that is what they index.

    windows      uint8 [256]             first window of a set of magnitudes
    more         uint8 [256]             second window, the first again where one is enough
    starts       int64 [9]               first position of each window
    errors       float32 [128 * 9 * 8 * 16]  (ms, window, |q| - 1, lane)
    map_ids      uint8 [128 * 82]        (ms, rank): which map gives the codes
    maps         uint8 [maps * 16]       output nibble of each source nibble
    full_errors  float64 [128 * 9 * 82]  (ms, |q|, rank), as in ScaleTables
    scale_bytes  uint8 [26 * 82]         (kg - es, rank), as in ScaleTables
    """

    windows: NDArray[np.uint8]
    more: NDArray[np.uint8]
    starts: NDArray[np.int64]
    errors: NDArray[np.float32]
    map_ids: NDArray[np.uint8]
    maps: NDArray[np.uint8]
    full_errors: NDArray[np.float64]
    scale_bytes: NDArray[np.uint8]


def lowest_rank(mantissas: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank in ScaleTables of position 0 for each ms; position p has rank `lowest_rank - p`."""
    grid_index = 8 * SHIFT_OF_ONE + (mantissas + 15) // 16 - 8 - LOWEST_STEP
    return LAST_GRID_RANK - grid_index


@lru_cache(maxsize=1)
def search_tables() -> SearchTables:
    """Build the tables for the CPU kernels."""
    tables = scale_tables(torch.device("cpu"))
    maps, map_ids = np.unique(tables.nibble_maps.numpy(), return_inverse=True)
    nibbles = (maps.view(np.uint64)[:, None] >> (4 * np.arange(16, dtype=np.uint64))) & np.uint64(15)
    assert len(maps) <= 256
    windows = set_windows()
    return SearchTables(
        windows=windows[:, 0].copy(),
        more=windows[:, 1].copy(),
        starts=np.array(WINDOW_STARTS, dtype=np.int64),
        errors=_on_cache_line(window_errors().reshape(-1)),
        map_ids=map_ids.astype(np.uint8).reshape(-1),
        maps=nibbles.astype(np.uint8).reshape(-1),
        full_errors=tables.errors.numpy().reshape(-1),
        scale_bytes=tables.scale_bytes.numpy().reshape(-1),
    )


def _on_cache_line(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Copy the values to where a cache line begins, so that no vector of a window lies across two."""
    memory = np.empty(values.size + CACHE_LINE // values.itemsize, dtype=values.dtype)
    skipped = -memory.ctypes.data % CACHE_LINE // values.itemsize
    aligned = memory[skipped : skipped + values.size]
    aligned[:] = values
    return aligned


def set_windows() -> NDArray[np.uint8]:
    """Return uint8 [256, 2]: the windows to look at for each set of magnitudes, one twice where it is enough."""
    entries = [int(digit, 16) for digit in WINDOW_OF_SET]
    return np.array([PAIRS[e - LOW_PAIR] if e >= LOW_PAIR else (e, e) for e in entries], dtype=np.uint8)


def window_errors() -> NDArray[np.float32]:
    """Return float32 [128, 9, 8, 16]: error of |q| = 1..8 under each candidate of each window, for every ms."""
    errors_SkC = scale_tables(torch.device("cpu")).errors.numpy()
    mantissas_S = np.arange(MIN_MANTISSA, MIN_MANTISSA + NUM_MANTISSAS, dtype=np.int64)
    ranks_SP = lowest_rank(mantissas_S)[:, None] - np.arange(NUM_POSITIONS)
    assert ranks_SP.min() >= FIRST_CANDIDATE > ZERO_CANDIDATE
    by_position = np.take_along_axis(errors_SkC[:, 1:, :], ranks_SP[:, None, :], axis=2)
    # Every candidate here has a shift of at least one, so errors in units of (s / 2ms)**2 are multiples of four.
    capped = np.minimum(by_position / 4, ERROR_CAP).astype(np.float32)
    windows = [capped[:, :, start : start + LANES] for start in WINDOW_STARTS]
    return np.ascontiguousarray(np.stack(windows, axis=1))
