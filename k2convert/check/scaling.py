"""Exact smoothing, as validation sees it: exponents derived from the norms, and the bytes that they ask for.

A result with smoothing has the weight of the norm before a MoE block times 2**a, channel by channel, and the columns
of all that read its output over 2**a: the router, and gate and up of shared and routed experts. Powers of two change no
digit, so every scaled number is the source's times a power of two, or it is wrong. The certificate checks the same by
arithmetic of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.check.results import Offender
from k2convert.checkpoint.reader import Bytes
from k2convert.choices import MAX_COLUMN_EXPONENT
from k2convert.errors import FormatError
from k2convert.models.names import Family, ModulePlace, TensorName, column_scaling, reads_norm
from k2convert.quantize.formats.bf16 import scale_bits, scale_fp32

Exponents = NDArray[np.int8]
"""One number for each hidden channel: int8 [K]."""

_AT_ONCE: Final = 1 << 20
_BITS: Final = {"BF16": np.uint16, "F32": np.uint32}
SCALED_DTYPES: Final = frozenset(_BITS)


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """The exponents a of a result's MoE layers.

    `problems` are norms whose exponents could not be derived, and a ledger that states others, by
    layer: None for what is wrong with all of them.
    """

    exponents: Mapping[int, Exponents]
    problems: Mapping[int | None, Offender]

    def of_copy(self, parts: TensorName, *, family: Family) -> Exponents | None:
        """Return e [K]: the columns of this copied tensor must be the source's times 2**e. None: unchanged."""
        change = column_scaling(parts, family=family)
        exponents = None if change is None else self._of_layer(change.layer)
        if change is None or exponents is None:
            return None
        if change.is_divided:
            return -exponents
        return exponents

    def of_weight(self, parts: ModulePlace | TensorName) -> Exponents | None:
        """Return a [K]: the weight of this module is over 2**a, whatever its format. None: unchanged."""
        if reads_norm(parts):
            return self._of_layer(parts.layer)
        return None

    def _of_layer(self, layer: int | None) -> Exponents | None:
        exponents = None if layer is None else self.exponents.get(layer)
        if exponents is not None and exponents.any():
            return exponents
        return None


NO_SCALING: Final = Scaling({}, {})
"""Every copied tensor must have the source's bytes."""


def derive_exponents(before: Bytes, after: Bytes, *, dtype: str) -> tuple[Exponents, str]:
    """Return the exponents int8 [K] by which the norm weight `after` differs from the source's, and what is wrong.

    Where a channel is not the source's times 2**-4 .. 2**4, its exponent is 0, and the first one is described.
    """
    old = _values(before, dtype)
    new = _values(after, dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        fractions, powers = np.frexp(new / old)
    same = before.view(_BITS[dtype]) == after.view(_BITS[dtype])
    is_power = fractions == 0.5
    exponents = np.where(same | ~is_power, 1, powers) - 1
    fits = same | (is_power & (np.abs(exponents) <= MAX_COLUMN_EXPONENT))
    problem = ""
    channel = int(np.argmin(fits))
    if not fits.all():
        reason = "not a power of two times it"
        if is_power[channel]:
            largest = MAX_COLUMN_EXPONENT
            reason = f"2^{exponents[channel]}, but smoothing uses 2^-{largest} to 2^{largest}"
        problem = f"{np.count_nonzero(~fits):,} of {fits.size:,} channels cannot be smoothing: channel {channel} is "
        problem += f"{new[channel]:g}, the source's is {old[channel]:g}: {reason}"
    return np.where(fits, exponents, 0).astype(np.int8), problem


def misfit(before: Bytes, after: Bytes, *, dtype: str, begin: int, exponents: Exponents) -> str:
    """Return what is wrong with `after`, which must be the source's numbers times 2**exponents; empty if nothing is.

    `begin` is the place of the first byte in the tensor [.., K].
    """
    try:
        expected = _scaled_bytes(before, dtype=dtype, begin=begin, exponents=exponents)
    except FormatError as error:
        return str(error)
    wrong = np.flatnonzero(expected.view(_BITS[dtype]) != after.view(_BITS[dtype]))
    if not wrong.size:
        return ""
    item_bytes = np.dtype(_BITS[dtype]).itemsize
    column = (begin // item_bytes + int(wrong[0])) % exponents.size
    return (
        f"{wrong.size:,} of {expected.size // item_bytes:,} numbers are not the source's times the power of two that "
        f"smoothing has, first in column {column} (2^{exponents[column]})"
    )


def _scaled_bytes(data: Bytes, *, dtype: str, begin: int, exponents: Exponents) -> Bytes:
    bits: NDArray[Any] = data.view(_BITS[dtype])
    scaled = bits.copy()
    for start in range(0, bits.size, _AT_ONCE):
        stop = min(start + _AT_ONCE, bits.size)
        steps = exponents[(begin // bits.itemsize + np.arange(start, stop)) % exponents.size]
        changed = start + np.flatnonzero(steps)  # what is not scaled may be any number
        if dtype == "BF16":
            scaled[changed] = scale_bits(bits[changed], steps[changed - start], name="smoothing")
        else:
            values = scale_fp32(bits[changed].view(np.float32), steps[changed - start], name="smoothing")
            scaled[changed] = values.view(np.uint32)
    return scaled.view(np.uint8)


def _values(data: Bytes, dtype: str) -> NDArray[np.float64]:
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return data.view(np.float32).astype(np.float64)
