"""FP8 weights: E4M3 elements, and FP32 scales of rows or of blocks.

    codes    uint8 [N, K]     E4M3 bytes, as nvfp4.py draws them, with a sign; 0x7F and 0xFF (NaN) never occur
    scales   float32          s; the weight is value * s
             [N, 1]           of rows: max |w| / 448, in FP32; 1.0 for a row of zeros
             [R, C]           of blocks of 128 x 128, of which the last ones may be smaller: the least power of two that
                              is max |w| / 448 or more, at least 2**-126; 1.0 for a block of zeros

    code     E4M3(w / s): the quotient in FP32, at most 448, ties to the even code

Engines make powers of two of block scales, and lose 3 dB if they are none.

Authority: compressed-tensors' float-quantized with the strategy channel (0.19.0), ModelOpt's FP8_PB_WO (0.47), and
torch.float8_e4m3fn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import FP8_BLOCK
from k2convert.errors import FormatError
from k2convert.machine import BUFFERS
from k2convert.quantize.formats.bf16 import MAGNITUDE_BITS, bf16_values
from k2convert.quantize.formats.nvfp4 import E4M3_MAX, decode_e4m3

_CHUNK: Final = 1 << 17  # weights handled at once, so that all arrays stay in the cache
_INFINITY_BITS: Final = 0x7F80
_EXPONENT: Final = np.uint32(0x7F800000)
_SMALLEST_EXPONENT: Final = np.uint32((127 - 6) << 23)  # of E4M3's normal numbers; below it the grid keeps its steps
_DROPPED: Final = np.uint32(20 << 23)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """A weight in FP8: `codes` uint8 [N, K], `scales` float32 [N, 1] of rows or [R, C] of blocks."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]


def encode_fp8(bits: NDArray[np.uint16], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the codes uint8 of BF16 bits [M, K] under scales [M, 1] of rows, or [1, C] of one row of blocks."""
    if scales.shape[1] > 1:
        scales = np.repeat(scales, FP8_BLOCK, axis=1)[:, : bits.shape[1]]
    sizes = bf16_values(bits & np.uint16(MAGNITUDE_BITS)) / scales
    signs = (bits >> np.uint16(8)).astype(np.uint8) & np.uint8(0x80)
    return _nearest_codes(sizes) | signs


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


Encode = Callable[[NDArray[np.uint16], NDArray[np.float32]], NDArray[np.uint8]]
"""Makes codes as `encode_fp8` does."""


def quantize_fp8(bits: NDArray[np.uint16], *, name: str, encode: Encode = encode_fp8) -> Fp8Weight:
    """Quantize a BF16 weight with a scale for each row, uint16 bits [N, K]; FormatError, naming it, if it has NaN or
    infinite values. `encode` is `encode_fp8`, or the kernel that gives the same codes.
    """
    rows, columns = bits.shape
    codes = BUFFERS.empty(bits.size).reshape(bits.shape)
    scales = np.empty((rows, 1), dtype=np.float32)
    step = max(1, _CHUNK // max(columns, 1))
    for start in range(0, rows, step):
        some = slice(start, start + step)
        magnitudes = bits[some] & np.uint16(MAGNITUDE_BITS)
        amax = _finite(magnitudes.max(axis=1, keepdims=True, initial=0), name)
        scales[some] = np.where(amax > 0, amax / np.float32(E4M3_MAX), np.float32(1))
        codes[some] = encode(bits[some], scales[some])
    return Fp8Weight(codes, scales)


def quantize_fp8_blocks(
    bits: NDArray[np.uint16], *, name: str, shared: NDArray[np.float32] | None = None, encode: Encode = encode_fp8
) -> Fp8Weight:
    """Quantize a BF16 weight with a scale for each block, uint16 bits [N, K]; raises as `quantize_fp8` does.

    `shared` is max |w| float32 [C] of each column of blocks whose rows have one scale, also in other weights.
    """
    amax = block_amax(bits, name=name)
    scales = _powers_of_two(amax if shared is None else np.broadcast_to(shared, amax.shape))
    codes = BUFFERS.empty(bits.size).reshape(bits.shape)
    for number in range(len(scales)):
        some = slice(number * FP8_BLOCK, (number + 1) * FP8_BLOCK)
        codes[some] = encode(bits[some], scales[number : number + 1])
    return Fp8Weight(codes, scales)


def block_amax(bits: NDArray[np.uint16], *, name: str) -> NDArray[np.float32]:
    """Return max |w| of each block, float32 [R, C]; FormatError, naming it, if it has NaN or infinite values."""
    rows, columns = (range(0, size, FP8_BLOCK) for size in bits.shape)
    largest = np.zeros((len(rows), len(columns)), dtype=np.uint16)
    for number, start in enumerate(rows):
        magnitudes = (bits[start : start + FP8_BLOCK] & np.uint16(MAGNITUDE_BITS)).max(axis=0)
        largest[number] = np.maximum.reduceat(magnitudes, columns)
    return _finite(largest, name)


def _powers_of_two(amax: NDArray[np.float32]) -> NDArray[np.float32]:
    fractions, exponents = np.frexp(amax.astype(np.float64) / E4M3_MAX)
    exponents = np.maximum(exponents - (fractions == 0.5), -126)
    return np.where(amax > 0, np.ldexp(1.0, exponents), 1.0).astype(np.float32)


def _finite(largest: NDArray[np.uint16], name: str) -> NDArray[np.float32]:
    """Return the values of largest magnitudes; FormatError if one is no number."""
    if largest.max(initial=0) >= _INFINITY_BITS:
        raise FormatError(f"{name}: the weight has NaN or infinite values; the source is damaged")
    return bf16_values(largest)


def decode_fp8(weight: Fp8Weight, rows: slice) -> NDArray[np.float64]:
    """Return value * s of some rows, float64 [M, K], exact."""
    scales = weight.scales
    values = decode_e4m3(weight.codes[rows])
    if scales.shape != (len(weight.codes), 1):
        blocks = np.arange(*rows.indices(len(weight.codes))) // FP8_BLOCK
        values *= np.repeat(scales[blocks], FP8_BLOCK, axis=1)[:, : weight.codes.shape[1]]
    else:
        values *= scales[rows]
    return values
