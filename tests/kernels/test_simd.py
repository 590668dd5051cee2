"""The vector operations against the plain loops that take their place on other CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from k2convert.kernels import simd

GROUPS = 4096


@numba.njit
def _count(packed: Any, words: Any, masks: Any, portable: bool) -> None:
    for group in range(masks.size):
        if portable:
            one, two, mask = simd._count_portable(packed, np.uint64(16 * group))
        else:
            one, two, mask = simd.count_magnitudes(packed, np.uint64(16 * group))
        words[group, 0], words[group, 1], masks[group] = one, two, mask


@numba.njit
def _encode(packed: Any, maps: Any, starts: Any, out: Any, portable: bool) -> None:
    for group in range(starts.shape[0]):
        at, one, two = np.uint64(16 * group), np.uint64(starts[group, 0]), np.uint64(starts[group, 1])
        if portable:
            simd._encode_portable(packed, at, maps, one, two, out)
        else:
            simd.encode_group(packed, at, maps, one, two, out)


@pytest.fixture
def packed() -> np.ndarray:
    groups = np.random.default_rng(0).integers(0, 256, (GROUPS, 16))
    # Sixteen equal codes are the largest count a byte has to hold.
    groups[:256] = np.arange(256)[:, None]
    return groups.astype(np.uint8).reshape(-1)


@pytest.mark.parametrize("portable", [False, True])
def test_counts_are_those_of_the_codes(packed: np.ndarray, portable: bool) -> None:
    words, masks = np.zeros((GROUPS, 2), dtype=np.uint64), np.zeros(GROUPS, dtype=np.uint64)
    _count(packed, words, masks, portable)
    magnitudes = np.abs(np.stack([packed & 15, packed >> 4], axis=1).astype(np.int64) - 8).reshape(GROUPS, 2, 16)
    for k in range(1, 9):
        expected = (magnitudes == k).sum(axis=2)
        assert np.array_equal(words >> np.uint64(8 * k - 8) & np.uint64(0xFF), expected)
        present = np.stack([masks >> np.uint64(k - 1), masks >> np.uint64(k + 7)], axis=1) & np.uint64(1)
        assert np.array_equal(present, expected > 0)


@pytest.mark.slow
def test_kernels_equal_formats_on_a_cpu_without_avx2(tmp_path: Path) -> None:
    """The whole of the comparison with `formats` again, compiled for the least x86-64 there is."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        Path(__file__).parent / "test_cpu.py",
    ]
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert finished.returncode == 0, finished.stdout


@pytest.mark.parametrize("portable", [False, True])
def test_each_block_is_encoded_by_its_own_map(packed: np.ndarray, portable: bool) -> None:
    rng = np.random.default_rng(1)
    maps = rng.integers(0, 16, (40, 16)).astype(np.uint8)
    chosen = rng.integers(0, 40, (GROUPS, 2))
    out = np.zeros_like(packed)
    _encode(packed, maps.reshape(-1), 16 * chosen, out, portable)
    tables = maps[np.repeat(chosen.reshape(-1), 8)]
    rows = np.arange(packed.size)
    assert np.array_equal(out, tables[rows, packed & 15] | tables[rows, packed >> 4] << 4)
