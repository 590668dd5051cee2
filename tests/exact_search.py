"""The oracle of the search: every normal E4M3 scale, every E2M1 value, exactly, and no arithmetic of the package.

Fractions throughout; within one search they are held over a common denominator, because integers compare faster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from weight_makers import codes_of, scales_of

from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight

E2M1 = (Fraction(0), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(4), Fraction(6))
NORMAL_BYTES = range(0x08, 0x7F)


def e4m3_value(byte: int) -> Fraction:
    """The value of a positive E4M3 byte, from the format's definition."""
    exponent = byte >> 3
    mantissa = byte & 7
    if exponent == 0:
        return Fraction(mantissa) * Fraction(2) ** -9
    return Fraction(8 + mantissa) * Fraction(2) ** (exponent - 10)


def nearest(value: Fraction | int, levels: Sequence[Fraction | int]) -> int:
    """The code whose level is nearest to a non-negative value, ties to the even code."""
    return min(range(8), key=lambda code: (abs(value - levels[code]), code % 2))


@dataclass(frozen=True)
class ExactSearch:
    """All scales tried for one source scale and one global scale: codes and squared errors of |q| = 0..8 under each."""

    codes: dict[int, tuple[int, ...]]
    errors: dict[int, tuple[int, ...]]
    unit: Fraction
    """An error of 1 is this much."""


@dataclass(frozen=True)
class Element:
    """A weight q * scale of a block."""

    q: int
    scale: Fraction


@lru_cache(maxsize=512)
def exact_search(scale: Fraction, global_scale: Fraction) -> ExactSearch:
    """Try every normal scale for the values k * scale, k = 0..8."""
    levels = {byte: [v * e4m3_value(byte) * global_scale for v in E2M1] for byte in NORMAL_BYTES}
    denominator = math.lcm(scale.denominator, *(level.denominator for row in levels.values() for level in row))
    values = [int(k * scale * denominator) for k in range(9)]
    codes: dict[int, tuple[int, ...]] = {}
    errors: dict[int, tuple[int, ...]] = {}
    for byte, row in levels.items():
        integers = [int(level * denominator) for level in row]
        codes[byte] = tuple(nearest(value, integers) for value in values)
        errors[byte] = tuple((value - integers[code]) ** 2 for value, code in zip(values, codes[byte], strict=True))
    return ExactSearch(codes=codes, errors=errors, unit=Fraction(1, denominator**2))


def errors_of(block: Sequence[Element], global_scale: Fraction) -> tuple[dict[int, int], Fraction]:
    """The squared error of a block under each scale, and the unit of these integers."""
    searches = [(exact_search(element.scale, global_scale), abs(element.q)) for element in block]
    least = min(search.unit for search, _ in searches)
    assert all((search.unit / least).denominator == 1 for search, _ in searches)
    rows = [(int(search.unit / least), search.errors, k) for search, k in searches]
    return {byte: sum(factor * errors[byte][k] for factor, errors, k in rows) for byte in NORMAL_BYTES}, least


def live(block: Sequence[Element]) -> list[Element]:
    return [element for element in block if element.q and element.scale]


def blocks_of(weight: Int4Weight) -> list[list[Element]]:
    """The blocks of an INT4 weight, in row-major order."""
    rows, columns = weight.shape
    codes = codes_of(weight).tolist()
    scales = scales_of(weight).tolist()
    steps = {s: Fraction(abs(s)) for s in scales_of(weight).unique().tolist()}
    elements = [Element(codes[row][j], steps[scales[row][j // 32]]) for row in range(rows) for j in range(columns)]
    return [elements[start : start + 16] for start in range(0, len(elements), 16)]


def assert_is_best(weight: Int4Weight, result: Nvfp4Weight) -> None:
    """Every byte is the best scale, ties to the larger, and every nibble the nearest value, ties to even, never -0."""
    g = Fraction(result.global_scale)
    nibbles = np.stack([result.packed & 15, result.packed >> 4], axis=-1).reshape(-1, 16).tolist()
    blocks = blocks_of(weight)
    for block, byte, written in zip(blocks, result.block_scales.reshape(-1).tolist(), nibbles, strict=True):
        best = 0x38
        expected = [0] * 16
        if some := live(block):
            errors, _ = errors_of(some, g)
            best = min(NORMAL_BYTES, key=lambda byte: (errors[byte], -byte))
            codes = [exact_search(e.scale, g).codes[best][abs(e.q)] if e.scale else 0 for e in block]
            expected = [code | (8 if code and e.q < 0 else 0) for code, e in zip(codes, block, strict=True)]
        assert (byte, written) == (best, expected), block


def count_outside_normal(weight: Int4Weight, g: Fraction) -> int:
    """Count blocks that do strictly better with g free by any power of two, which frees the exponent of b."""
    count = 0
    for block in filter(None, map(live, blocks_of(weight))):
        largest = max(element.scale for element in block)
        free = Fraction(2) ** (largest.numerator.bit_length() - largest.denominator.bit_length() - 3)
        own, *others = (errors_of(block, candidate) for candidate in (g, free, free / 64))
        count += min(min(errors.values()) * unit for errors, unit in others) < min(own[0].values()) * own[1]
    return count
