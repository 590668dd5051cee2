"""E4M3 (the "fn" kind: no infinity), the block scale of NVFP4 (OCP 8-bit Floating Point v1.0).

    bit   7      6 5 4 3    2 1 0
          sign   exponent   mantissa        normal: (8 + mantissa) * 2**(exponent - 10), exponent 1..15

Block scales are positive. Bytes 0x01-0x07 are subnormal (below 2**-6; Hopper's Marlin path flushes them to zero) and
0x7F is NaN. So the safe bytes are 0x08 (2**-6) to 0x7E (448).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

E4M3_MAX: Final = 448.0
E4M3_SMALLEST: Final = 2.0**-9
SMALLEST_NORMAL: Final = 2.0**-6

MIN_NORMAL_BYTE: Final = 0x08
MAX_BYTE: Final = 0x7E
ONE_BYTE: Final = 0x38
"""The byte of 1.0, which blocks of zeros get."""

MIN_EXPONENT: Final = -9
MAX_EXPONENT: Final = 5
"""A normal scale is mantissa * 2**exponent with an integer mantissa 8..15 and an exponent in this range."""

_DROPPED_BITS: Final = 20
"""FP32 has 23 mantissa bits, E4M3 has 3."""
_BIAS_BITS: Final = (127 - 7) << 3
"""The difference of the two exponent biases, at the place of E4M3's exponent."""


def encode_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round float32 values, already within 0..448, to E4M3 bytes (uint8), ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    half = np.uint32((1 << (_DROPPED_BITS - 1)) - 1)
    rounded = (bits + half + ((bits >> np.uint32(_DROPPED_BITS)) & np.uint32(1))) >> np.uint32(_DROPPED_BITS)
    # Below 2**-6 the format is a grid with steps of 2**-9; 2**-6 itself is the byte 8.
    subnormal = np.rint(values * np.float32(2**9))
    return np.where(values < SMALLEST_NORMAL, subnormal, rounded.astype(np.int64) - _BIAS_BITS).astype(np.uint8)


def decode_e4m3(scale_bytes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the float64 values of E4M3 bytes (uint8), of the same shape."""
    return _VALUES[scale_bytes]


def _all_values() -> NDArray[np.float64]:
    exponents, mantissas = np.arange(128) >> 3, np.arange(128) & 7
    positive = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0))
    positive[0x7F] = np.nan
    return np.concatenate([positive, -positive])


_VALUES: Final = _all_values()
