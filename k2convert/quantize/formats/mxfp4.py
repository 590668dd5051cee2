"""MXFP4 weights of a source, as compressed-tensors' mxfp4-pack-quantized format stores them.

    weight_packed  uint8 [N, K/2]    two E2M1 nibbles per byte, the even column low: NVFP4's codes (nvfp4.py)
    weight_scale   uint8 [N, K/32]   E8M0 bytes; the weight is v * 2**(byte - 127)

Byte 255 is NaN and refused. Byte 0 is 2**-127, a number. Every weight is an exact BF16 number up to 2**125, so an MXFP4
weight is also a BF16 weight, whose bits are decoded when they are asked for. A group is empty if its codes are all 0 or
-0. Authority: OCP Microscaling Formats v1.0, sections 5.3.3 and 5.4.1; compressed_tensors.compressors.mxfp4 (0.19.0).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import GROUP_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import MAGNITUDE_BITS, Bf16Weight, Magnitude, bf16_bits, bf16_values, describe
from k2convert.quantize.formats.nvfp4 import decode_e2m1, row_slices

SCALE_BIAS: Final = 127
NAN_BYTE: Final = 255
MAX_EXPONENT: Final = 125
"""The largest exponent of a group with codes: 6 * 2**126 is beyond BF16 and FP32."""

GROUP_BYTES: Final = GROUP_SIZE // 2
_MAGNITUDE_WORD: Final = np.uint64(0x7777777777777777)


class Mxfp4Weight(Bf16Weight):
    """An MXFP4 projection: `packed` uint8 [N, K/2], `scale_bytes` uint8 [N, K/32]; FormatError if shapes do not fit."""

    __slots__ = ("counts", "packed", "scale_bytes")

    def __init__(self, packed: NDArray[np.uint8], scale_bytes: NDArray[np.uint8]) -> None:
        are_bytes = packed.dtype == scale_bytes.dtype == np.uint8 and packed.ndim == scale_bytes.ndim == 2
        if not are_bytes or packed.shape != (scale_bytes.shape[0], scale_bytes.shape[1] * GROUP_BYTES):
            raise FormatError(
                f"MXFP4 codes must be uint8 [N, K/2] with scales uint8 [N, K/{GROUP_SIZE}], "
                f"not {describe(packed)} with {describe(scale_bytes)}"
            )
        self.packed = packed
        self.scale_bytes = scale_bytes
        self.counts: NDArray[np.int64] | None = None  # what the kernels count once, see kernels/cpu.py

    @classmethod
    def load(cls, packed: NDArray[np.uint8], scale: NDArray[np.uint8], rows: int, name: str) -> Mxfp4Weight:
        """The weight of the bytes of its tensors; FormatError if a scale is NaN."""
        check_mxfp4_scales(scale.reshape(rows, -1), name=name)
        return cls(packed.reshape(rows, -1), scale.reshape(rows, -1))

    @property
    def bits(self) -> NDArray[np.uint16]:
        """The exact BF16 bits of every weight, uint16 [N, K], decoded now."""
        decoded = np.empty(self.shape, dtype=np.uint16)
        for rows in row_slices(*self.shape):
            decoded[rows] = decode_mxfp4(self.packed[rows], self.scale_bytes[rows])
        return decoded

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def select(self, rows: slice) -> Mxfp4Weight:
        """A view of the rows of a slice."""
        return Mxfp4Weight(self.packed[rows], self.scale_bytes[rows])

    def magnitude(self, *, name: str = "weight") -> Magnitude:
        """The magnitude; FormatError for a scale that no BF16 number has."""
        check_mxfp4_scales(self.scale_bytes, name=name)
        used = self.scale_bytes.reshape(-1)[~is_empty(self.groups())]
        exponent = check_exponent(int(used.max()) if used.size else None, name=name)
        amax = 0.0
        for rows in row_slices(*self.shape):
            largest = (self.select(rows).bits & np.uint16(MAGNITUDE_BITS)).max(initial=0)
            amax = max(amax, float(bf16_values(largest)))
        return Magnitude(scale_max=amax, amax=amax, is_int4=False, largest_exponent=exponent)

    def groups(self) -> NDArray[np.uint8]:
        """The bytes of the codes by group, uint8 [N * K/32, 16]."""
        return np.ascontiguousarray(self.packed).reshape(-1, GROUP_BYTES)


def decode_mxfp4(packed: NDArray[np.uint8], scale_bytes: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Return BF16 bits uint16 [N, K] of codes [N, K/2] under scale bytes [N, S] that divide the columns equally."""
    rows, scales = scale_bytes.shape
    indices = (scale_bytes.astype(np.uint16) << np.uint16(8))[:, :, None] | packed.reshape(rows, scales, -1)
    return _pairs()[indices].reshape(rows, -1).view(np.uint16)


def is_empty(groups: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return whether every code of a group, uint8 [M, 16], is 0 or -0: bool [M]."""
    words: NDArray[Any] = groups.view(np.uint64) & _MAGNITUDE_WORD
    return (words[:, 0] | words[:, 1]) == 0


def look_up(table: NDArray[np.uint8], indices: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return table[indices] for a table uint8 [256] and flat indices, three times as fast as NumPy does."""
    return np.frombuffer(bytearray(indices).translate(table.tobytes()), dtype=np.uint8)


@cache
def _pairs() -> NDArray[np.uint32]:
    """Return the BF16 bits of both nibbles of a byte under a scale byte, uint32 [256 * 256], the low column low."""
    with np.errstate(over="ignore"):
        values = np.ldexp(decode_e2m1(np.arange(16, dtype=np.uint8)), np.arange(256)[:, None] - SCALE_BIAS)
        bits = bf16_bits(values.astype(np.float32)).astype(np.uint32)
    bits[NAN_BYTE] = bf16_bits(np.array([np.nan], dtype=np.float32))[0]
    return (bits[:, None, :] | bits[:, :, None] << np.uint32(16)).reshape(-1)


def check_mxfp4_scales(scale_bytes: NDArray[np.uint8], *, name: str) -> None:
    """Refuse a scale byte that is NaN, also that of an empty group (FormatError)."""
    if scale_bytes.max(initial=0) == NAN_BYTE:
        row, group = (int(index) for index in np.argwhere(scale_bytes == NAN_BYTE)[0])
        raise FormatError(
            f"{name}: MXFP4 scale [{row}, {group}] is byte {NAN_BYTE}, which is NaN; the source is damaged"
        )


def check_exponent(largest_byte: int | None, *, name: str) -> int | None:
    """Return the exponent of the largest scale byte of a non-empty group; FormatError if BF16 has no room for it."""
    if largest_byte is None:
        return None
    exponent = int(largest_byte) - SCALE_BIAS
    if exponent > MAX_EXPONENT:
        raise FormatError(
            f"{name}: an MXFP4 scale is 2**{exponent}, more than the 2**{MAX_EXPONENT} that BF16 has room for; the "
            "source is damaged"
        )
    return exponent
