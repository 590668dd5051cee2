"""BF16 weights of a source, and what the class of every source format offers.

BF16 numbers are their 16 bits, the upper half of an FP32 number: bit 15 is the sign, 14..7 the exponent, 6..0 the
mantissa. NumPy has no such type, so weights are held as uint16 and computed in float32, where each is exact.

Smoothing moves powers of two between a norm and the columns of what reads its output. A channel's norm weight is
multiplied by 2**a and the column of every consumer is divided by it. Only exponents change, so the model's function is
the same to the last bit, and so is every number here: what cannot be scaled exactly is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, MAX_COLUMN_EXPONENT
from k2convert.errors import FormatError
from k2convert.quantize.formats.nvfp4 import row_slices

_NAN_BITS: Final = 0x7FC0
_INFINITY_BITS: Final = 0x7F80
MAGNITUDE_BITS: Final = 0x7FFF
"""All bits but the sign. Magnitudes of BF16 numbers are in the order of these bits."""


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Size of the weights of a tensor, which is all that a global scale depends on.

    Tensors that must share a global scale (gate and up of an expert) are measured one by one and merged.

    scale_max          largest INT4 scale, with channel exponents the largest s * 2**-a of a column; amax for others
    amax               max |w| after BF16 rounding
    is_int4            whether a weight is INT4
    largest_exponent   that of the scales of an MXFP4 weight's non-empty groups; None for all others
    """

    scale_max: float
    amax: float
    is_int4: bool
    largest_exponent: int | None = None

    def merge(self, other: Magnitude) -> Magnitude:
        """The magnitude of both tensors together."""
        exponents = [e for e in (self.largest_exponent, other.largest_exponent) if e is not None]
        return Magnitude(
            scale_max=max(self.scale_max, other.scale_max),
            amax=max(self.amax, other.amax),
            is_int4=self.is_int4 or other.is_int4,
            largest_exponent=max(exponents, default=None),
        )


class SourceWeight(Protocol):
    """A weight of a source checkpoint. Each source format is one class, with the members that Bf16Weight describes.

    `bits` are exact, or rounded once to BF16, ties to even. `channel_exponents` are int8 [K] in -4..4, if they are kept
    beside the numbers: column j is over 2**a_j.
    """

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def bits(self) -> NDArray[np.uint16]: ...
    @property
    def channel_exponents(self) -> NDArray[np.int8] | None: ...
    def select(self, rows: slice) -> SourceWeight: ...
    def values(self) -> NDArray[np.float32]: ...
    def magnitude(self, *, name: str = "weight") -> Magnitude: ...
    def divide_columns(self, exponents: NDArray[np.int8], *, name: str) -> SourceWeight: ...


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

    @property
    def channel_exponents(self) -> None:
        """Exponents are in the numbers."""
        return None

    def select(self, rows: slice) -> Bf16Weight:
        """A view of the rows of a slice."""
        return Bf16Weight(self._bits[rows])

    def values(self) -> NDArray[np.float32]:
        """The values float32 [N, K], exact."""
        return bf16_values(self.bits)

    def magnitude(self, *, name: str = "weight") -> Magnitude:
        """The magnitude; FormatError, naming the tensor, if a value is NaN or infinite."""
        largest = (self.bits & np.uint16(MAGNITUDE_BITS)).max(initial=0)
        if largest >= _INFINITY_BITS:
            raise FormatError(f"{name}: the weight holds NaN or infinity; the source is damaged")
        amax = float(bf16_values(largest))
        return Magnitude(scale_max=amax, amax=amax, is_int4=False)

    def divide_columns(self, exponents: NDArray[np.int8], *, name: str) -> Bf16Weight:
        """The weight with column j over 2**exponents[j], int8 [K] in -4..4; FormatError if it is not exact."""
        check_channel_exponents(exponents, self.shape[1])
        if exponents.any():
            return Bf16Weight(scale_bits(self.bits, -exponents, name=name))
        return self


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


def check_channel_exponents(exponents: NDArray[np.int8], columns: int) -> None:
    """Refuse exponents that are not int8 [K] in -4..4 (FormatError)."""
    if exponents.dtype != np.int8 or exponents.shape != (columns,):
        raise FormatError(f"channel exponents must be int8 [{columns}], not {describe(exponents)}")
    if columns and (exponents.min() < -MAX_COLUMN_EXPONENT or exponents.max() > MAX_COLUMN_EXPONENT):
        raise FormatError(
            f"channel exponents must be in {-MAX_COLUMN_EXPONENT}..{MAX_COLUMN_EXPONENT}, "
            f"not {int(exponents.min())}..{int(exponents.max())}"
        )


def scale_bits(bits: NDArray[np.uint16], exponents: NDArray[np.int8], *, name: str) -> NDArray[np.uint16]:
    """Return BF16 bits times 2**exponents, which broadcast to them; FormatError if a number would not be exact."""
    scaled = np.empty_like(bits)
    exponents = np.broadcast_to(exponents, bits.shape).reshape(-1, *bits.shape[-1:])
    source = bits.reshape(exponents.shape)
    target = scaled.reshape(exponents.shape)
    for rows in row_slices(*exponents.shape):
        # Exact in float32, which has room for sixteen times the largest BF16 number's bits below the smallest.
        wide = scale_fp32(bf16_values(source[rows]), exponents[rows], name=name).view(np.uint32)
        _require_exact((wide & np.uint32(0xFFFF)) == 0, name)
        target[rows] = (wide >> np.uint32(16)).astype(np.uint16)
    return scaled


def scale_fp32(values: NDArray[np.float32], exponents: NDArray[np.int8], *, name: str) -> NDArray[np.float32]:
    """Return float32 values times 2**exponents, which broadcast to them; FormatError if a number would not be exact."""
    steps = exponents.astype(np.int32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = np.ldexp(values, steps)
        _require_exact(np.isfinite(scaled) & (np.ldexp(scaled, -steps) == values), name)
    return scaled


def _require_exact(exact: NDArray[Any], name: str) -> None:
    if not exact.all():
        raise FormatError(
            f"{name}: {int(np.count_nonzero(~exact))} of {exact.size} numbers overflow or lose bits if they are "
            "scaled by their power of two. Smoothing must leave such channels as they are."
        )
