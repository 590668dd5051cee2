"""Weights of a source: INT4 as compressed-tensors' pack-quantized format stores it (group 32, symmetric), and BF16.

    weight_packed  int32 [N, K/8]    element j of a word in bits 4j..4j+3, code = q + 8
    weight_scale   bf16  [N, K/32]   s; the weight is q * s

A weight may have its columns divided by powers of two, as smoothing does (formats/channels.py): column j is then
q * s * 2**-a_j, with a_j in -4..4. Nothing is repacked: the exponents are kept next to codes and scales.

Read as little-endian bytes, byte k of a row holds column 2k in its low nibble and 2k + 1 in its high one. Authority:
compressed_tensors.compressors.pack_quantized.helpers.pack_to_int32 with num_bits=4 (0.19.0).

BF16 numbers are their 16 bits, the upper half of an FP32 number: bit 15 is the sign, 14..7 the exponent, 6..0 the
mantissa. NumPy has no such type, so weights are held as uint16 and computed in float32, where each is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, GROUP_SIZE, MAX_COLUMN_EXPONENT
from k2convert.errors import FormatError
from k2convert.quantize.formats.nvfp4 import row_chunks, unpack_nibbles

_NAN_BITS: Final = 0x7FC0


class Bf16Weight:
    """A BF16 weight: `bits` uint16 [N, K], K a multiple of 16; FormatError otherwise."""

    __slots__ = ("_bits",)

    def __init__(self, bits: NDArray[np.uint16]) -> None:
        if bits.dtype != np.uint16 or bits.ndim != 2 or bits.shape[1] % BLOCK_SIZE:
            raise FormatError(
                f"BF16 weights must be the bits uint16 [N, K] with K a multiple of {BLOCK_SIZE}, not {describe(bits)}"
            )
        self._bits = bits

    @property
    def bits(self) -> NDArray[np.uint16]:
        """The bits of every number, uint16 [N, K]."""
        return self._bits

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self._bits.shape[0], self._bits.shape[1]

    def rows(self, start: int, stop: int) -> Bf16Weight:
        """A view of some rows."""
        return Bf16Weight(self._bits[start:stop])


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


MAX_MAGNITUDE: Final = 8
NUM_MAGNITUDES: Final = MAX_MAGNITUDE + 1
"""|q| takes the values 0..8; only code -8 has |q| = 8."""

FIRST_UNUSABLE_BITS: Final = 0x7E00
"""BF16 bits of 2**125: eight times it overflows. Infinity, NaN and all negative numbers have larger bits."""
MINUS_ZERO_BITS: Final = 0x8000


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """An INT4 projection: `packed` uint8 [N, K/2] (bytes of weight_packed), `scale_bits` uint16 [N, K/32] (BF16 bits).

    `channel_exponents` is int8 [K] in -4..4, column j is divided by 2**a_j; None if every exponent is zero.
    `channels.divide_columns` sets it, and makes sure that every s * 2**-a_j is an exact BF16 number.
    FormatError if dtypes, shapes or exponents do not fit.
    """

    packed: NDArray[np.uint8]
    scale_bits: NDArray[np.uint16]
    channel_exponents: NDArray[np.int8] | None = None

    def __post_init__(self) -> None:
        if self.packed.dtype != np.uint8 or self.packed.ndim != 2:
            raise FormatError(f"packed INT4 codes must be uint8 [N, K/2], not {describe(self.packed)}")
        if self.scale_bits.dtype != np.uint16 or self.scale_bits.ndim != 2:
            raise FormatError(
                f"INT4 scales must be BF16 bits, uint16 [N, K/{GROUP_SIZE}], not {describe(self.scale_bits)}"
            )
        rows, columns = self.shape
        if columns % GROUP_SIZE or self.scale_bits.shape != (rows, columns // GROUP_SIZE):
            raise FormatError(
                f"INT4 codes [{rows}, {columns}] need scales [{rows}, {columns}/{GROUP_SIZE}], "
                f"not {list(self.scale_bits.shape)}"
            )
        if self.channel_exponents is not None:
            check_channel_exponents(self.channel_exponents, columns)
            if not self.channel_exponents.any():
                object.__setattr__(self, "channel_exponents", None)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def scales(self) -> NDArray[np.float32]:
        """The scales as float32 [N, K/32]."""
        return bf16_values(self.scale_bits)

    def rows(self, start: int, stop: int) -> Int4Weight:
        """A view of some rows."""
        return Int4Weight(self.packed[start:stop], self.scale_bits[start:stop], self.channel_exponents)

    def element_scales(self) -> NDArray[np.float32]:
        """Return s * 2**-a_j of every element, float32 [N, K], exact."""
        scales_NK = self.scales.repeat(GROUP_SIZE, axis=1)
        if self.channel_exponents is None:
            return scales_NK
        return np.ldexp(scales_NK, -self.channel_exponents.astype(np.int32))


SourceWeight = Int4Weight | Bf16Weight
"""A weight of a source checkpoint."""


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Unpack bytes uint8 [.., K/2] into codes int8 [.., K], each in -8..7."""
    return unpack_nibbles(packed).view(np.int8) - np.int8(MAX_MAGNITUDE)


def dequantize_int4(weight: Int4Weight) -> Bf16Weight:
    """Return q * s rounded to BF16 [N, K], which is compressed-tensors' arithmetic: one BF16 multiply, ties to even.

    The product is exact in float32: q has 4 significant bits, s (divided by a power of two or not) has 8.
    """
    rows, columns = weight.shape
    bits = np.empty((rows, columns), dtype=np.uint16)
    for start, stop in row_chunks(rows, columns):
        chunk = weight.rows(start, stop)
        with np.errstate(over="ignore"):
            products_NK = unpack_int4(chunk.packed).astype(np.float32) * chunk.element_scales()
        bits[start:stop] = bf16_bits(products_NK)
    return Bf16Weight(bits)


def check_channel_exponents(exponents: NDArray[np.int8], columns: int) -> None:
    """Refuse exponents that are not int8 [K] in -4..4 (FormatError)."""
    if exponents.dtype != np.int8 or exponents.shape != (columns,):
        raise FormatError(f"channel exponents must be int8 [{columns}], not {describe(exponents)}")
    if columns and (exponents.min() < -MAX_COLUMN_EXPONENT or exponents.max() > MAX_COLUMN_EXPONENT):
        raise FormatError(
            f"channel exponents must be in {-MAX_COLUMN_EXPONENT}..{MAX_COLUMN_EXPONENT}, "
            f"not {int(exponents.min())}..{int(exponents.max())}"
        )


def check_int4_scales(scale_bits: NDArray[np.uint16], *, name: str) -> None:
    """Refuse BF16 scales [N, K/32] that are NaN, infinite, negative, or at least 2**125 (FormatError)."""
    unusable = (scale_bits >= FIRST_UNUSABLE_BITS) & (scale_bits != MINUS_ZERO_BITS)
    if not unusable.any():
        return
    row, group = (int(index) for index in np.argwhere(unusable)[0])
    raise FormatError(
        f"{name}: INT4 scale [{row}, {group}] is {float(bf16_values(scale_bits)[row, group])}; scales must be finite, "
        f"not negative and below 2**125. {int(unusable.sum())} of {scale_bits.size} scales are unusable."
    )
