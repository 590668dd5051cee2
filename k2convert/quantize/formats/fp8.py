"""FP8 weights: E4M3 elements and one FP32 scale for every output row.

    codes    uint8 [N, K]     E4M3 bytes, as nvfp4.py draws them, with a sign; 0x7F and 0xFF (NaN) never occur
    scales   float32 [N, 1]   s; the weight is value * s

    s      max |w| of the row / 448, in FP32; 1.0 for a row of zeros
    code   E4M3(w / s): the quotient in FP32, at most 448, ties to the even code

Authority: compressed-tensors' float-quantized with the strategy channel (0.19.0), and torch.float8_e4m3fn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import MAGNITUDE_BITS, bf16_values
from k2convert.quantize.formats.nvfp4 import E4M3_MAX, decode_e4m3

_CHUNK: Final = 1 << 16  # weights handled at once, so that all arrays stay in the cache
_INFINITY_BITS: Final = 0x7F80
_EXPONENT: Final = np.uint32(0x7F800000)
_SMALLEST_EXPONENT: Final = np.uint32((127 - 6) << 23)  # of E4M3's normal numbers; below it the grid keeps its steps
_DROPPED: Final = np.uint32(20 << 23)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """A weight in FP8: `codes` uint8 [N, K], `scales` float32 [N, 1]."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]


def quantize_fp8(bits: NDArray[np.uint16], *, name: str) -> Fp8Weight:
    """Quantize a BF16 weight, uint16 bits [N, K]; FormatError, naming it, if a value is NaN or infinite."""
    rows, columns = bits.shape
    codes = np.empty((rows, columns), dtype=np.uint8)
    scales = np.empty((rows, 1), dtype=np.float32)
    step = max(1, _CHUNK // max(columns, 1))
    for start in range(0, rows, step):
        some = slice(start, start + step)
        magnitudes = bits[some] & np.uint16(MAGNITUDE_BITS)
        largest = magnitudes.max(axis=1, keepdims=True, initial=0)
        if largest.max(initial=0) >= _INFINITY_BITS:
            raise FormatError(f"{name}: the weight has NaN or infinite values; the source is damaged")
        amax = bf16_values(largest)
        scales[some] = np.where(amax > 0, amax / np.float32(E4M3_MAX), np.float32(1))
        sizes = bf16_values(magnitudes) / scales[some]
        signs = (bits[some] >> np.uint16(8)).astype(np.uint8) & np.uint8(0x80)
        codes[some] = _nearest_codes(sizes) | signs
    return Fp8Weight(codes, scales)


def _nearest_codes(sizes: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the codes uint8 0..0x7E of float32 sizes >= 0, ties to the even code, at most 448. It changes `sizes`.

    A power of two, 2**20 times that of the number, is added. The sum has E4M3's three bits of mantissa, so FP32's own
    addition rounds, also in the range of subnormal numbers, whose step is that of the smallest exponent.
    """
    np.minimum(sizes, np.float32(E4M3_MAX), out=sizes)
    exponents = np.maximum(sizes.view(np.uint32) & _EXPONENT, _SMALLEST_EXPONENT)
    added = exponents + _DROPPED
    sizes += added.view(np.float32)
    steps = sizes.view(np.uint32) - added  # 0..16 steps of 1/8 of the power of two
    return (steps + ((exponents - _SMALLEST_EXPONENT) >> np.uint32(20))).astype(np.uint8)


def decode_fp8(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return value * s as float64 [M, K], exact, of codes uint8 [M, K] and scales float32 [M, 1]."""
    return decode_e4m3(codes) * scales
