"""INT4 weights of a source, as compressed-tensors' pack-quantized format stores them (group 32, symmetric).

    weight_packed  int32 [N, K/8]    element j of a word in bits 4j..4j+3, code = q + 8
    weight_scale   bf16  [N, K/32]   s; the weight is q * s

A weight may have its columns divided by powers of two, as smoothing does: column j is then q * s * 2**-a_j, with a_j in
-4..4. Nothing is repacked: the exponents are kept next to codes and scales. Every s * 2**-a is an exact BF16 number.

Read as little-endian bytes, byte k of a row holds column 2k in its low nibble and 2k + 1 in its high one. Authority:
compressed_tensors.compressors.pack_quantized.helpers.pack_to_int32 with num_bits=4 (0.19.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import GROUP_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import (
    Magnitude,
    bf16_bits,
    bf16_values,
    check_channel_exponents,
    describe,
    round_to_bf16,
    scale_bits,
)
from k2convert.quantize.formats.nvfp4 import row_slices, unpack_nibbles

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
    `divide_columns` sets it, and makes sure that every s * 2**-a_j is an exact BF16 number.
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

    @classmethod
    def load(cls, packed: NDArray[np.uint8], scale: NDArray[np.uint8], rows: int, name: str) -> Int4Weight:
        """The weight of the bytes of its tensors; FormatError if a scale is not usable."""
        scale_bits = scale.view(np.uint16).reshape(rows, -1)
        if scale_bits.max(initial=0) >= FIRST_UNUSABLE_BITS:
            check_int4_scales(scale_bits, name=name)
        return cls(packed=packed.reshape(rows, -1), scale_bits=scale_bits)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def scales(self) -> NDArray[np.float32]:
        """The scales as float32 [N, K/32]."""
        return bf16_values(self.scale_bits)

    @property
    def bits(self) -> NDArray[np.uint16]:
        """q * s rounded to BF16 uint16 [N, K], which is compressed-tensors' arithmetic: one multiply, ties to even.

        The product is exact in float32: q has 4 significant bits, s (divided by a power of two or not) has 8.
        """
        bits = np.empty(self.shape, dtype=np.uint16)
        for rows in row_slices(*self.shape):
            with np.errstate(over="ignore"):
                bits[rows] = bf16_bits(self.select(rows).values())
        return bits

    def select(self, rows: slice | NDArray[np.bool_]) -> Int4Weight:
        """The rows of a slice, as a view, or those that are marked."""
        return Int4Weight(self.packed[rows], self.scale_bits[rows], self.channel_exponents)

    def values(self) -> NDArray[np.float32]:
        """The values float32 [N, K], exact."""
        return unpack_int4(self.packed) * self.element_scales()

    def element_scales(self) -> NDArray[np.float32]:
        """Return s * 2**-a_j of every element, float32 [N, K], exact."""
        scales_NK = self.scales.repeat(GROUP_SIZE, axis=1)
        if self.channel_exponents is None:
            return scales_NK
        return np.ldexp(scales_NK, -self.channel_exponents.astype(np.int32))

    def magnitude(self, *, name: str = "weight") -> Magnitude:
        """The magnitude; FormatError for a scale that is not usable."""
        check_int4_scales(self.scale_bits, name=name)
        scale_max = 0.0
        amax = 0.0
        for rows in row_slices(*self.shape):
            chunk = self.select(rows)
            scale_max = max(scale_max, float(np.abs(chunk.element_scales()).max(initial=0.0)))
            amax = max(amax, float(round_to_bf16(np.abs(chunk.values())).max(initial=0.0)))
        return Magnitude(scale_max=scale_max, amax=amax, is_int4=True)

    def divide_columns(self, exponents: NDArray[np.int8], *, name: str) -> Int4Weight:
        """The weight with exponents beside it; FormatError if a scale over its column's power of two is not usable."""
        check_channel_exponents(exponents, self.shape[1])
        if self.channel_exponents is not None:
            exponents = self.channel_exponents + exponents
        check_int4_scales(self.scale_bits, name=name)
        by_group_GE = exponents.reshape(-1, GROUP_SIZE)
        for extreme_G in (by_group_GE.min(axis=1, initial=0), by_group_GE.max(axis=1, initial=0)):
            divided = scale_bits(self.scale_bits, -extreme_G, name=f"{name}: INT4 scales")
            if ((divided >= FIRST_UNUSABLE_BITS) & (divided != MINUS_ZERO_BITS)).any():
                raise FormatError(f"{name}: an INT4 scale divided by its column's power of two is 2**125 or more")
        return Int4Weight(self.packed, self.scale_bits, exponents)


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Unpack bytes uint8 [.., K/2] into codes int8 [.., K], each in -8..7."""
    return unpack_nibbles(packed).view(np.int8) - np.int8(MAX_MAGNITUDE)


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
