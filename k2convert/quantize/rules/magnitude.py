"""How large the weights of a tensor are, which is all that a global scale depends on.

Tensors that must share a global scale (gate and up of an expert) are measured one by one and merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k2convert.choices import GROUP_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight, bf16_values, round_to_bf16
from k2convert.quantize.formats.blocks import row_chunks
from k2convert.quantize.formats.int4 import Int4Weight, SourceWeight, check_int4_scales, unpack_int4

_INFINITY_BITS = 0x7F80
_MAGNITUDE_BITS = 0x7FFF


@dataclass(frozen=True, slots=True)
class Magnitude:
    """`scale_max`: the largest INT4 scale (BF16 sources: the same as amax); `amax`: max |w| after BF16 rounding.

    With channel exponents, `scale_max` is the largest s * 2**-a of a column, and the weight is q * s * 2**-a.
    """

    scale_max: float
    amax: float

    def merge(self, other: Magnitude) -> Magnitude:
        """The magnitude of both tensors together."""
        return Magnitude(scale_max=max(self.scale_max, other.scale_max), amax=max(self.amax, other.amax))


def measure(weight: SourceWeight, *, name: str = "weight") -> Magnitude:
    """Measure a weight; FormatError, naming the tensor, if a value is not usable."""
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
