"""Histograms of |q| in the 16-element blocks of an INT4 weight.

A block's error under any scale depends only on its histogram, so the search works on histograms. One is kept in an
int64: nine fields of five bits, field k counting |q| = k (0..16).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.formats.blocks import BYTES_PER_BLOCK, row_chunks
from k2convert.quantize.formats.int4 import MAX_MAGNITUDE, NUM_MAGNITUDES

FIELD_BITS: Final = 5
FIELD_MASK: Final = (1 << FIELD_BITS) - 1

_FIELD_SHIFTS: Final = FIELD_BITS * np.arange(NUM_MAGNITUDES)


def _byte_histograms() -> NDArray[np.int64]:
    nibbles = np.arange(256)[:, None] >> np.array([0, 4]) & 0xF
    return (np.int64(1) << _FIELD_SHIFTS[np.abs(nibbles - MAX_MAGNITUDE)]).sum(axis=1)


_BYTE_HISTOGRAMS: Final = _byte_histograms()


def block_histograms(packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return int64 [N * K/16] histogram words of INT4 bytes uint8 [N, K/2]."""
    bytes_ME = packed.reshape(-1, BYTES_PER_BLOCK)
    words_M = np.zeros(bytes_ME.shape[0], dtype=np.int64)
    for start, stop in row_chunks(words_M.size, BLOCK_SIZE):
        words_M[start:stop] = _BYTE_HISTOGRAMS[bytes_ME[start:stop]].sum(axis=1)
    return words_M


def unpack_histograms(words_M: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [M, 9] counts of |q| = 0..8 from histogram words int64 [M]."""
    return (words_M[:, None] >> _FIELD_SHIFTS) & FIELD_MASK
