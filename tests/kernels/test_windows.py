"""Looking at 16 candidates instead of 82, and at 6 assignments instead of 40, loses nothing: proven by exhaustion.

A block is a histogram of |q| = 1..8 with at most 16 entries: 735,471 of them, and 128 mantissas of s. The full search
here ranges over every shift from 0 to 11, so it also covers candidates beyond those that formats.scale_tables lists.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from k2convert.formats.block_bound import int4_block_bounds
from k2convert.formats.e2m1 import DOUBLED_VALUES
from k2convert.kernels.cpu_optimal import EXACT_BIT, WINDOW_SIZE, search_blocks
from k2convert.kernels.search_tables import BOUND_ASSIGNMENTS, LOWEST_STEP, NUM_WINDOWS, search_tables
from k2convert.kernels.simd import store_floats

NUM_CANDIDATES = 96


def all_histograms() -> NDArray[np.uint8]:
    """Every way to choose at most 16 of the magnitudes 1..8; uint8 [735471, 8]."""
    histograms = np.zeros((1, 0), dtype=np.uint8)
    left = np.array([16])
    for _ in range(8):
        choices = left + 1
        parent = np.repeat(np.arange(len(left)), choices)
        count = np.arange(choices.sum()) - np.repeat(np.cumsum(choices) - choices, choices)
        histograms = np.concatenate([histograms[parent], count[:, None].astype(np.uint8)], axis=1)
        left = left[parent] - count
    return histograms


def full_errors(mantissa: int) -> NDArray[np.float64]:
    """Errors of |q| = 1..8 in units of (s / 2ms)**2 under mb * 2**j, ascending: float64 [8, 96], all integers."""
    steps = np.array([(8 + c % 8) << (c // 8) for c in range(NUM_CANDIDATES)])
    wanted = 2 * mantissa * np.arange(1, 9)
    return ((wanted[:, None, None] - steps[:, None] * np.array(DOUBLED_VALUES)) ** 2).min(axis=2).astype(np.float64)


@numba.njit(nogil=True)
def _count_wrong(histograms: Any, errors: Any, first: Any, mantissa_index: Any, tables: Any, buffers: Any) -> Any:
    """Count histograms whose pick is not the best candidate, last on ties, or whose exactness is wrong."""
    masks, tables_at, floats, picks = buffers
    sums = np.empty(NUM_CANDIDATES)
    wrong = 0
    for number in range(histograms.shape[0]):
        word, present = np.uint64(0), 0
        sums[:] = 0.0
        for k in range(8):
            count = histograms[number, k]
            if count > 0:
                word |= np.uint64(count) << np.uint64(8 * k)
                present |= 1 << k
                for candidate in range(NUM_CANDIDATES):
                    sums[candidate] += count * errors[k, candidate]
        masks[0], masks[1] = present | present << 8, 0
        tables_at[0] = mantissa_index * NUM_WINDOWS * WINDOW_SIZE
        store_floats(floats, np.uint64(0), word)
        store_floats(floats, np.uint64(8), word)
        search_blocks(np.uint64(1), masks, tables_at, floats, tables, picks)
        best = 0
        for candidate in range(NUM_CANDIDATES):
            if sums[candidate] <= sums[best]:
                best = candidate
        pick = best - first | (1 << EXACT_BIT if sums[best] == 0.0 else 0)
        wrong += present > 0 and (np.int64(picks[0]) != pick or picks[1] != picks[0])
    return wrong


def count_wrong(histograms: NDArray[np.uint8], mantissa: int) -> int:
    buffers = (
        np.zeros(2, dtype=np.uint16),
        np.zeros(2, dtype=np.int32),
        np.zeros(16, dtype=np.float32),
        np.zeros(2, dtype=np.uint32),
    )
    first = 32 + -(-mantissa // 16) - 8 - LOWEST_STEP
    return _count_wrong(histograms, full_errors(mantissa), first, mantissa - 128, search_tables(), buffers)


def test_every_histogram_under_some_mantissas() -> None:
    histograms = all_histograms()
    assert histograms.shape == (735471, 8)
    for mantissa in (128, 183, 255):
        assert count_wrong(histograms[mantissa % 5 :: 5], mantissa) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mantissa", range(128, 256))
def test_every_histogram_under_every_mantissa(mantissa: int) -> None:
    assert count_wrong(all_histograms(), mantissa) == 0


def test_six_assignments_bound_every_histogram() -> None:
    histograms = all_histograms()
    for start in range(0, len(histograms), 1 << 16):
        counts = np.zeros((len(histograms[start : start + (1 << 16)]), 9), dtype=np.int64)
        counts[:, 1:] = histograms[start : start + (1 << 16)]
        explained = np.zeros(len(counts))
        for assignment in np.array(BOUND_ASSIGNMENTS, dtype=np.float64):
            inner, norm = counts @ (np.arange(9) * assignment), counts @ (assignment * assignment)
            explained = np.maximum(explained, inner * inner / np.maximum(norm, 1.0))
        assert np.array_equal(counts @ (np.arange(9.0) ** 2) - explained, int4_block_bounds(counts))
