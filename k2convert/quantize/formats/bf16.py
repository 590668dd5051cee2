"""BF16 numbers as their 16 bits, which are the upper half of an FP32 number.

    bit   15     14 .. 7    6 .. 0
          sign   exponent   mantissa        the same exponent as FP32, 8 significant bits

NumPy has no BF16 type, so weights are held as uint16 and computed in float32, where every BF16 number is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError

_NAN_BITS: Final = 0x7FC0


@dataclass(frozen=True, slots=True, eq=False)
class Bf16Weight:
    """A BF16 weight: `bits` uint16 [N, K], K a multiple of 16; FormatError otherwise."""

    bits: NDArray[np.uint16]

    def __post_init__(self) -> None:
        if self.bits.dtype != np.uint16 or self.bits.ndim != 2 or self.bits.shape[1] % BLOCK_SIZE:
            raise FormatError(
                f"BF16 weights must be the bits uint16 [N, K] with K a multiple of {BLOCK_SIZE}, "
                f"not {describe(self.bits)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.bits.shape[0], self.bits.shape[1]


def bf16_values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 values of BF16 bits, of the same shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 values to BF16, ties to even, and return the bits; overflow gives infinity, NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(_NAN_BITS), rounded.astype(np.uint16))


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round float32 values to the nearest BF16 numbers, ties to even; float32 of the same shape."""
    return bf16_values(bf16_bits(values))


def describe(array: NDArray[Any]) -> str:
    """Return an array's dtype and shape, for messages."""
    return f"{array.dtype} {list(array.shape)}"
