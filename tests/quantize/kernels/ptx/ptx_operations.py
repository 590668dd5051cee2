"""The operations of PTX that compute one value per lane, on NumPy arrays of lanes.

Each row has the meaning that the PTX ISA gives the operation, its function, and the types of result and sources. T and
U are the first and the last type of the opcode, W is T at twice the width, and w is T, widened before the function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from panel_reference import fma
from ptx_program import PtxError

Lanes = NDArray[Any]


def dtype_of(type_: str) -> np.dtype[Any]:
    """Return how lanes of a PTX type are computed with; .f32x2 is two .f32 in a 64-bit register."""
    if type_ in ("pred", "f32x2"):
        return np.dtype(bool if type_ == "pred" else np.float32)
    return np.dtype({"b": "u", "u": "u", "s": "i", "f": "f"}[type_[0]] + str(int(type_[1:]) // 8))


def bits_of(type_: str) -> int:
    return {"pred": 1, "f32x2": 64}.get(type_) or int(type_[1:])


def stored(value: Lanes, bits: int) -> Lanes:
    """Return lanes as registers hold them: bool, or unsigned of the register's bits."""
    return value if bits == 1 else value.view(f"u{bits // 8}")


def _fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Compute a * b + c, rounded once."""
    return fma(a, b, c) if a.dtype == np.float32 else _exact_fma(a, b, c)


def _exact_fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Compute a * b + c of FP64, and refuse it if any step lost a bit.

    An exact result needs no rounding, fused or not. The errors of both steps are those of Dekker and Knuth.
    """
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    lost = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    total = product + c
    rest = total - product
    if lost.any() or ((product - (total - rest)) + (c - rest)).any():
        raise PtxError("a sum is not exact")
    return total


def _halves(a: Lanes) -> tuple[Lanes, Lanes]:
    scaled = a * (2.0**27 + 1)
    high = scaled - (scaled - a)
    return high, a - high


def _truncate(value: Lanes) -> Lanes:
    limits = np.iinfo(np.int32)
    return np.nan_to_num(np.trunc(value.astype(np.float64))).clip(limits.min, limits.max)


def _shift_left(value: Lanes, by: Lanes) -> Lanes:
    bits = 8 * value.itemsize
    return np.where(by < bits, value << np.minimum(by, bits - 1).astype(value.dtype), value.dtype.type(0))


def _shift_right(value: Lanes, by: Lanes) -> Lanes:
    """A signed value that is shifted by all of its bits leaves its sign."""
    bits = 8 * value.itemsize
    shifted = value >> np.minimum(by, bits - 1).astype(value.dtype)
    return shifted if value.dtype.kind == "i" else np.where(by < bits, shifted, value.dtype.type(0))


def _field(value: Lanes, start: Lanes, length: Lanes) -> Lanes:
    mask = (np.uint64(1) << np.minimum(length, 32).astype(np.uint64)) - np.uint64(1)
    return (value.astype(np.uint64) >> np.minimum(start, 63).astype(np.uint64)) & mask


_ROWS: dict[str, tuple[str, Callable[..., Lanes], str]] = {
    "mov": ("d = a", lambda a: a, "T T"),
    "cvt": ("d = a: sign- or zero-extended, or its low bits; a wider float", lambda a: a, "T U"),
    "cvt.rn": ("d = a, an integer, to the nearest float, ties to even", lambda a: a, "T u32"),
    "cvt.rzi": ("d = a towards zero, clamped to the range of d; 0 if a is NaN", _truncate, "s32 f32"),
    "add": ("d = a + b; integers wrap", np.add, "T T T"),
    "sub": ("d = a - b; integers wrap", np.subtract, "T T T"),
    "sub.rn": ("d = a - b, of floats, to the nearest, ties to even", np.subtract, "T T T"),
    "div.rn": ("d = a / b, to the nearest, ties to even", np.divide, "T T T"),
    "div": ("d = a / b of integers, towards zero", lambda a, b: (a - np.fmod(a, b)) // b, "T T T"),
    "abs": ("d = |a|", np.abs, "T T"),
    "neg": ("d = -a", np.negative, "T T"),
    "add.rn": ("d = a + b, of floats, to the nearest, ties to even", np.add, "T T T"),
    "mul.rn": ("d = a * b, of floats, to the nearest, ties to even", np.multiply, "T T T"),
    "mul.lo": ("d = the low half of a * b", np.multiply, "T T T"),
    "mul.wide": ("d = all of a * b", np.multiply, "W w w"),
    "mad.lo": ("d = the low half of a * b + c", lambda a, b, c: a * b + c, "T T T T"),
    "mad.wide": ("d = all of a * b, plus c", lambda a, b, c: a * b + c, "W w w W"),
    "fma.rn": ("d = a * b + c, rounded once; of FP64 only if that is exact", _fma, "T T T T"),
    "rem": ("d = a % b, with the sign of a", np.fmod, "T T T"),
    "min": ("d = the smaller; of a number and NaN the number", np.fmin, "T T T"),
    "max": ("d = the larger; of a number and NaN the number", np.fmax, "T T T"),
    "min.three": ("d = the smallest number of three", lambda a, b, c: np.fmin(np.fmin(a, b), c), "T T T T"),
    "max.three": ("d = the largest number of three", lambda a, b, c: np.fmax(np.fmax(a, b), c), "T T T T"),
    "and": ("d = a & b", np.bitwise_and, "T T T"),
    "or": ("d = a | b", np.bitwise_or, "T T T"),
    "xor": ("d = a ^ b", np.bitwise_xor, "T T T"),
    "not": ("d = ~a", np.invert, "T T"),
    "shl": ("d = a << b; 0 from all bits on", _shift_left, "T T u32"),
    "shr": ("d = a >> b; the sign, or 0, from all bits on", _shift_right, "T T u32"),
    "bfe": ("d = c bits of a from bit b on, zero-extended", _field, "u32 u32 u32 u32"),
    "selp": ("d = c ? a : b", lambda a, b, c: np.where(c, a, b), "T T T pred"),
    "setp.eq": ("p = a == b; false for NaN", np.equal, "pred T T"),
    "setp.ne": ("p = a != b; false for NaN", lambda a, b: (a < b) | (a > b), "pred T T"),
    "setp.lt": ("p = a < b; false for NaN", np.less, "pred T T"),
    "setp.le": ("p = a <= b; false for NaN", np.less_equal, "pred T T"),
    "setp.gt": ("p = a > b; false for NaN", np.greater, "pred T T"),
    "setp.num": ("p: neither is NaN", lambda a, b: ~(np.isnan(a) | np.isnan(b)), "pred T T"),
    "setp.nan": ("p: one is NaN", lambda a, b: np.isnan(a) | np.isnan(b), "pred T T"),
    "setp.ge": ("p = a >= b; false for NaN", np.greater_equal, "pred T T"),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """A function of lanes, and the types that its result and its sources have in registers."""

    function: Callable[..., Lanes]
    result: str
    sources: tuple[str, ...]


def find_operation(opcode: str, types: tuple[str, ...]) -> Operation:
    """Return the operation of an opcode and its types; PtxError if it is not in this file."""
    if opcode not in _ROWS or not types:
        raise PtxError(f"{opcode} is not known")
    _, function, signature = _ROWS[opcode]
    names = {"T": types[0], "U": types[-1], "W": f"{types[0][0]}{2 * bits_of(types[0])}", "w": types[0]}
    result, *sources = (names.get(name, name) for name in signature.split())
    if types != ((result, sources[0]) if opcode.startswith("cvt") else (sources[0],)):
        raise PtxError(f"{opcode} of {' '.join(types)} is not known")
    dtype = dtype_of(result)
    if "w" in signature:
        return Operation(lambda a, b, *c: function(a.astype(dtype), b.astype(dtype), *c), result, tuple(sources))
    return Operation(lambda *given: function(*given).astype(dtype, copy=False), result, tuple(sources))
