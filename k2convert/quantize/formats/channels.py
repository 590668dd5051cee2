"""Powers of two on the columns of a weight, which smoothing moves between a norm and what reads its output.

A channel's norm weight is multiplied by 2**a and the column of every consumer is divided by it. Only exponents change,
so the model's function is the same to the last bit, and so is every number here: what cannot be scaled exactly is
refused.

    BF16, FP32    the exponent of each number is changed; FormatError if a number overflows or loses a bit
    INT4          codes and scales stay; the weight carries the exponents, and every s * 2**-a is an exact BF16 number
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import GROUP_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.int4 import (
    FIRST_UNUSABLE_BITS,
    MINUS_ZERO_BITS,
    Bf16Weight,
    Int4Weight,
    SourceWeight,
    bf16_values,
    check_channel_exponents,
    check_int4_scales,
)
from k2convert.quantize.formats.nvfp4 import row_chunks


def divide_columns(weight: SourceWeight, exponents: NDArray[np.int8], *, name: str) -> SourceWeight:
    """Return the weight with column j divided by 2**exponents[j], int8 [K] in -4..4; FormatError if it is not exact."""
    check_channel_exponents(exponents, weight.shape[1])
    if isinstance(weight, Bf16Weight):
        return Bf16Weight(scale_bits(weight.bits, -exponents, name=name)) if exponents.any() else weight
    if weight.channel_exponents is not None:
        exponents = weight.channel_exponents + exponents
    check_int4_scales(weight.scale_bits, name=name)
    by_group_GE = exponents.reshape(-1, GROUP_SIZE)
    for extreme_G in (by_group_GE.min(axis=1, initial=0), by_group_GE.max(axis=1, initial=0)):
        divided = scale_bits(weight.scale_bits, -extreme_G, name=f"{name}: INT4 scales")
        if ((divided >= FIRST_UNUSABLE_BITS) & (divided != MINUS_ZERO_BITS)).any():
            raise FormatError(f"{name}: an INT4 scale divided by its column's power of two is 2**125 or more")
    return Int4Weight(weight.packed, weight.scale_bits, exponents)


def scale_bits(bits: NDArray[np.uint16], exponents: NDArray[np.int8], *, name: str) -> NDArray[np.uint16]:
    """Return BF16 bits times 2**exponents, which broadcast to them; FormatError if a number would not be exact."""
    scaled = np.empty_like(bits)
    rows = np.broadcast_to(exponents, bits.shape).reshape(-1, *bits.shape[-1:])
    source = bits.reshape(rows.shape)
    target = scaled.reshape(rows.shape)
    for start, stop in row_chunks(*rows.shape):
        # Exact in float32, which has room for sixteen times the largest BF16 number's bits below the smallest.
        wide = scale_fp32(bf16_values(source[start:stop]), rows[start:stop], name=name).view(np.uint32)
        _require_exact((wide & np.uint32(0xFFFF)) == 0, name)
        target[start:stop] = (wide >> np.uint32(16)).astype(np.uint16)
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
