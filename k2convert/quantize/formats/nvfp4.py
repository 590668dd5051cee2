"""NVFP4 weights: E2M1 elements, an E4M3 scale for every 16 input columns, one FP32 scale for the tensor.

    packed        uint8 [N, K/2]    two E2M1 nibbles per byte, the even column low
    block_scales  uint8 [N, K/16]   b, E4M3 bytes, row-major (not swizzled)
    global_scale  FP32              g; the weight is v * b * g

    E2M1   bit 3: sign, 2..1: exponent, 0: mantissa; the code is the low three bits. No infinity, no NaN; 0x8 is -0.

        code   0    1    2    3    4    5    6    7
        value  0   0.5   1   1.5   2    3    4    6

    E4M3   bit 7: sign, 6..3: exponent, 2..0: mantissa; normal: (8 + mantissa) * 2**(exponent - 10), exponent 1..15.
           The "fn" kind, without infinity. Block scales are positive. Bytes 0x01-0x07 are subnormal (below 2**-6;
           Hopper's Marlin path flushes them to zero) and 0x7F is NaN, so the safe bytes are 0x08 (2**-6) to 0x7E (448).

Authority: OCP Microscaling Formats v1.0, section 5.3.3, and OCP 8-bit Floating Point v1.0 for the elements; ModelOpt's
NVFP4QTensor (0.47.0) and compressed-tensors' nvfp4-pack-quantized (0.19.0), which stores 1/g, for the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.errors import FormatError

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
    return np.take(_VALUES, scale_bytes, mode="clip")  # no byte is out of range, so nothing is clipped


def _all_values() -> NDArray[np.float64]:
    exponents = np.arange(128) >> 3
    mantissas = np.arange(128) & 7
    positive = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0))
    positive[0x7F] = np.nan
    return np.concatenate([positive, -positive])


_VALUES: Final = _all_values()


CHUNK_ELEMENTS: Final = 1 << 20
"""Weights handled at once. Working memory is a small multiple of it, for a tensor of any size."""

BLOCKS_PER_GROUP: Final = GROUP_SIZE // BLOCK_SIZE


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of the rows, of about CHUNK_ELEMENTS weights."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4Weight:
    """An NVFP4 projection: `packed` uint8 [N, K/2], `block_scales` uint8 [N, K/16], `global_scale` exact in FP32.

    FormatError if dtypes, shapes or the global scale are not usable.
    """

    packed: NDArray[np.uint8]
    block_scales: NDArray[np.uint8]
    global_scale: float

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if self.packed.dtype != np.uint8 or self.block_scales.dtype != np.uint8:
            raise FormatError("NVFP4 codes and block scales must be uint8")
        if columns % BLOCK_SIZE or self.block_scales.shape != (rows, columns // BLOCK_SIZE):
            raise FormatError(
                f"NVFP4 codes [{rows}, {columns}] need block scales [{rows}, {columns}/{BLOCK_SIZE}], "
                f"not {list(self.block_scales.shape)}"
            )
        check_global_scale(self.global_scale)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.packed.shape[0], 2 * self.packed.shape[1]


def quantize_rows(
    shape: tuple[int, int],
    global_scale: float,
    quantize: Callable[[slice], tuple[NDArray[np.uint8], NDArray[np.uint8]]],
) -> Nvfp4Weight:
    """Return a weight [N, K], made a few rows at a time.

    `quantize` returns nibbles uint8 [M, 16] and E4M3 bytes uint8 [M] of the blocks of some rows.
    """
    rows, columns = shape
    packed = np.empty((rows, columns // 2), dtype=np.uint8)
    block_scales = np.empty((rows, columns // BLOCK_SIZE), dtype=np.uint8)
    for some in row_slices(rows, columns):
        nibbles, scale_bytes = quantize(some)
        packed[some] = pack_nibbles(nibbles.reshape(-1, columns))
        block_scales[some] = scale_bytes.reshape(-1, columns // BLOCK_SIZE)
    return Nvfp4Weight(packed=packed, block_scales=block_scales, global_scale=global_scale)


def check_global_scale(global_scale: float) -> None:
    """Refuse a global scale that is not positive, finite and exactly representable in FP32 (FormatError)."""
    if not (math.isfinite(global_scale) and global_scale > 0):
        raise FormatError(f"the global scale must be a positive finite number, not {global_scale!r}")
    with np.errstate(over="ignore"):
        nearest = float(np.float32(global_scale))
    if nearest != global_scale:
        raise FormatError(
            f"the global scale {global_scale!r} is not exactly representable in FP32 (nearest: {nearest!r}). "
            "Round it: float(numpy.float32(scale))."
        )


def dequantize_nvfp4(weight: Nvfp4Weight) -> NDArray[np.float64]:
    """Return v * b * g as float64 [N, K], exact: the product has at most 30 significant bits."""
    rows, columns = weight.shape
    values_NBE = decode_e2m1(unpack_nibbles(weight.packed)).reshape(rows, columns // BLOCK_SIZE, BLOCK_SIZE)
    scales_NB = decode_e4m3(weight.block_scales) * weight.global_scale
    return (values_NBE * scales_NB[:, :, None]).reshape(rows, columns)
