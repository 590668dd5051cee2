"""Histograms of |q| in the 16-element blocks of an INT4 weight.

A block's error under any scale depends only on its histogram, so the search and the metrics work on histograms. One
is kept in an int64: nine fields of five bits, field k counting |q| = k (0..16).
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
PRESENCE_BITS: Final = (np.int64(FIELD_MASK + 1) >> 1) << _FIELD_SHIFTS
"""int64 [9]: the bit of `presence_masks` for each |q|, bit 5k + 4."""
_FIFTEENS: Final = int((np.int64(FIELD_MASK >> 1) << _FIELD_SHIFTS).sum())


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


def presence_masks(words_M: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [M]: bit 5k + 4 is set if the block holds some |q| = k."""
    # 15 + n has its fifth bit set exactly when n is 1..16, and never carries into the next field.
    return (words_M + _FIFTEENS) & PRESENCE_BITS.sum()
