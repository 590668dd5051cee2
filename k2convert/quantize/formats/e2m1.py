"""E2M1, the four-bit element of NVFP4 (OCP Microscaling Formats v1.0, section 5.3.3).

    bit   3      2 1        0
          sign   exponent   mantissa        code = the low three bits

    code   0    1    2    3    4    5    6    7
    value  0   0.5   1   1.5   2    3    4    6      (no infinity, no NaN; nibble 0x8 is -0)

Two elements share a byte. The even column is in the low nibble, as in ModelOpt's NVFP4QTensor and compressed-tensors'
pack_fp4_to_uint8.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX: Final = 6.0
SIGN_BIT: Final = 0x8

DOUBLED_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the values. These are integers, so the exact search computes with them."""

QUADRUPLED_MIDPOINTS: Final = (1, 3, 5, 7, 10, 14, 20)
"""Four times the midpoints .25, .75, 1.25, 1.75, 2.5, 3.5, 5 between neighboring values."""

_SIGNED_VALUES: Final = np.array([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])


def nearest_code(numerator: NDArray[Any], denominator: Any) -> NDArray[np.uint8]:
    """Return the uint8 code 0..7 nearest to numerator / denominator, ties to the even code, saturating at 7.

    Both are non-negative (denominator positive) and broadcast; integers or floats. The function never divides, so the
    answer is exact if 4 * numerator and 20 * denominator are.
    """
    quadrupled = 4 * numerator
    code = np.asarray(quadrupled > denominator).astype(np.uint8)
    for index, midpoint in enumerate(QUADRUPLED_MIDPOINTS[1:], start=1):
        # This midpoint is between code `index` and `index + 1`; a tie goes to the even one.
        rises = quadrupled >= midpoint * denominator if index % 2 else quadrupled > midpoint * denominator
        code += rises
    return code


def decode_e2m1(nibbles: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the float64 values of uint8 nibbles 0..15, of the same shape; 0x8 gives -0.0."""
    return _SIGNED_VALUES[nibbles]


def pack_nibbles(nibbles_NK: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack uint8 nibbles [.., K] into bytes [.., K/2], the even column in the low nibble."""
    return nibbles_NK[..., 0::2] | (nibbles_NK[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack bytes [.., K/2] into uint8 nibbles [.., K]; the inverse of `pack_nibbles`."""
    nibbles = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=np.uint8)
    nibbles[..., 0::2] = packed & np.uint8(0xF)
    nibbles[..., 1::2] = packed >> np.uint8(4)
    return nibbles
