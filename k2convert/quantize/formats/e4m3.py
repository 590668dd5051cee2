"""E4M3 (the "fn" kind: no infinity), the block scale of NVFP4 (OCP 8-bit Floating Point v1.0).

    bit   7      6 5 4 3    2 1 0
          sign   exponent   mantissa        normal: (8 + mantissa) * 2**(exponent - 10), exponent 1..15

Block scales are positive. Bytes 0x01-0x07 are subnormal (below 2**-6, flushed to zero by Hopper's Marlin path) and
0x7F is NaN, so the bytes a careful writer uses are 0x08 (2**-6) to 0x7E (448).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k2convert.quantize.formats.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


E4M3_MAX: Final = 448.0
E4M3_SMALLEST: Final = 2.0**-9

MIN_NORMAL_BYTE: Final = 0x08
MAX_BYTE: Final = 0x7E
ONE_BYTE: Final = 0x38
"""The byte of 1.0, given to blocks that hold nothing."""

MIN_EXPONENT: Final = -9
MAX_EXPONENT: Final = 5
"""A normal scale is mantissa * 2**exponent with an integer mantissa 8..15 and an exponent in this range."""


def encode_e4m3(values: Tensor) -> Tensor:
    """Round float32 values, already within 0..448, to E4M3 bytes (uint8), ties to even."""
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(scale_bytes: Tensor) -> Tensor:
    """Return the float64 values of E4M3 bytes (uint8), of the same shape."""
    return scale_bytes.view(torch.float8_e4m3fn).to(torch.float32).to(torch.float64)
