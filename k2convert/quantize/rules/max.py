"""The `max` rule: bit for bit what the usual pipeline writes.

compressed-tensors dequantizes INT4 to BF16, then ModelOpt's max calibration quantizes the BF16 weight:

    g    = fp32(amax) / 2688                          amax over all tensors that share g
    s_j  = fp32(amax of the block) / fp32(6 * g)      0 -> 1.0
    b_j  = e4m3(clamp(s_j, 2**-9, 448))               round to nearest even
    x    = fp32(w) / (fp32(b_j) * g)
    code = nearest E2M1, ties to the even code;  sign bit = (x < 0)

A negative that rounds to zero keeps its sign: nibble 0x8. One case differs from ModelOpt (0.47.0), whose result is NaN
there: a set of tensors in which every weight is zero gets g = 1.0, block scales 1.0 and codes 0.

How large the weights of a tensor are, which is all that a global scale depends on.

Tensors that must share a global scale (gate and up of an expert) are measured one by one and merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.int4 import (
    Bf16Weight,
    Int4Weight,
    SourceWeight,
    bf16_values,
    check_int4_scales,
    dequantize_int4,
    round_to_bf16,
    unpack_int4,
)
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_SMALLEST,
    SIGN_BIT,
    Nvfp4Weight,
    decode_e4m3,
    encode_e4m3,
    nearest_code,
    quantize_rows,
    row_chunks,
)
from k2convert.quantize.rules.cast import largest_exponent, largest_weight

_INFINITY_BITS = 0x7F80
_MAGNITUDE_BITS = 0x7FFF


@dataclass(frozen=True, slots=True)
class Magnitude:
    """`scale_max`: the largest INT4 scale (BF16 sources: the same as amax); `amax`: max |w| after BF16 rounding.

    With channel exponents, `scale_max` is the largest s * 2**-a of a column, and the weight is q * s * 2**-a.
    `largest_exponent` is that of the scales of an MXFP4 weight's non-empty groups; None for all others.
    """

    scale_max: float
    amax: float
    largest_exponent: int | None = None

    def merge(self, other: Magnitude) -> Magnitude:
        """The magnitude of both tensors together."""
        found = [e for e in (self.largest_exponent, other.largest_exponent) if e is not None]
        return Magnitude(
            scale_max=max(self.scale_max, other.scale_max),
            amax=max(self.amax, other.amax),
            largest_exponent=max(found, default=None),
        )


def measure(weight: SourceWeight, *, name: str = "weight") -> Magnitude:
    """Measure a weight; FormatError, naming the tensor, if a value is not usable."""
    if isinstance(weight, Mxfp4Weight):
        exponent = largest_exponent(weight, name=name)
        amax = largest_weight(weight)
        return Magnitude(scale_max=amax, amax=amax, largest_exponent=exponent)
    if isinstance(weight, Bf16Weight):
        return _measure_bf16(weight, name=name)
    check_int4_scales(weight.scale_bits, name=name)
    if weight.channel_exponents is not None:
        return _measure_columns(weight)
    return Magnitude(scale_max=float(np.abs(weight.scales).max(initial=0.0)), amax=_int4_amax(weight))


def _measure_bf16(weight: Bf16Weight, *, name: str) -> Magnitude:
    # Magnitudes of BF16 numbers are in the order of their bits.
    largest = (weight.bits & np.uint16(_MAGNITUDE_BITS)).max(initial=0)
    if largest >= _INFINITY_BITS:
        raise FormatError(f"{name}: the weight holds NaN or infinity; the source is damaged")
    amax = float(bf16_values(largest))
    return Magnitude(scale_max=amax, amax=amax)


def _measure_columns(weight: Int4Weight) -> Magnitude:
    scale_max = amax = 0.0
    for start, stop in row_chunks(*weight.shape):
        chunk = weight.rows(start, stop)
        scales_NK = np.abs(chunk.element_scales())
        scale_max = max(scale_max, float(scales_NK.max(initial=0.0)))
        amax = max(amax, float(round_to_bf16(np.abs(unpack_int4(chunk.packed)) * scales_NK).max(initial=0.0)))
    return Magnitude(scale_max=scale_max, amax=amax)


def _int4_amax(weight: Int4Weight) -> float:
    # BF16 rounding is monotone, so the largest |q| of a group gives the group's largest rounded product.
    amax = 0.0
    rows, columns = weight.shape
    for start, stop in row_chunks(rows, columns):
        chunk = weight.rows(start, stop)
        codes_NGE = unpack_int4(chunk.packed).reshape(stop - start, -1, GROUP_SIZE)
        largest_NG = np.abs(codes_NGE).max(axis=-1, initial=0)
        amax = max(amax, float(round_to_bf16(largest_NG * np.abs(chunk.scales)).max(initial=0.0)))
    return amax


AMAX_PER_GLOBAL_SCALE: Final = E2M1_MAX * E4M3_MAX


def max_global_scale(magnitude: Magnitude) -> float:
    """Return g = fp32(amax) / 2688 as one FP32 division; 1.0 if every weight is zero."""
    if magnitude.amax == 0.0:
        return 1.0
    global_scale = np.float32(magnitude.amax) / np.float32(AMAX_PER_GLOBAL_SCALE)
    if not (np.isfinite(global_scale) and global_scale > 0):
        raise FormatError(f"a largest weight of {magnitude.amax!r} gives no usable FP32 global scale")
    return float(global_scale)


def quantize_max(weight: SourceWeight, global_scale: float) -> Nvfp4Weight:
    """Quantize an INT4 or BF16 weight with `max` arithmetic, in bounded memory."""

    def quantize(start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        chunk = weight.rows(start, stop)
        bits = dequantize_int4(chunk).bits if isinstance(chunk, Int4Weight) else chunk.bits
        blocks_ME = bf16_values(bits).reshape(-1, BLOCK_SIZE)
        block_bytes = max_block_scales(np.abs(blocks_ME).max(axis=-1), global_scale)
        return max_nibbles(blocks_ME, max_steps(block_bytes, global_scale)[:, None]), block_bytes

    return quantize_rows(weight.shape, global_scale, quantize)


def max_block_scales(amax_M: NDArray[np.float32], global_scale: float) -> NDArray[np.uint8]:
    """Return E4M3 bytes (uint8, shape of `amax_M`) for block maxima in float32, rounding to FP32 after each step."""
    with np.errstate(over="ignore", under="ignore"):
        scales = amax_M / (np.float32(E2M1_MAX) * np.float32(global_scale))
    scales = np.where(scales == 0, np.float32(1), scales)
    return encode_e4m3(scales.clip(np.float32(E4M3_SMALLEST), np.float32(E4M3_MAX)))


def max_steps(block_bytes: NDArray[np.uint8], global_scale: float) -> NDArray[np.float32]:
    """Return the steps b * g, rounded to FP32."""
    with np.errstate(over="ignore", under="ignore"):
        return decode_e4m3(block_bytes).astype(np.float32) * np.float32(global_scale)


def max_nibbles(weights: NDArray[np.float32], steps: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return nibbles (uint8, shape of `weights`) of float32 weights for FP32 steps b * g that broadcast to them."""
    # Steps can underflow to zero or overflow: the quotient is then infinity, NaN (code 0) or zero.
    with np.errstate(all="ignore"):
        scaled = weights / steps
        return nearest_code(np.abs(scaled), np.float32(1)) | np.uint8(SIGN_BIT) * (scaled < 0)
