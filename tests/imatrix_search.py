"""The oracle of the search by importance and by column: every normal E4M3 scale for every element, in fractions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from exact_search import NORMAL_BYTES, exact_search

from k2convert.quantize.formats.int4 import Int4Weight, unpack_int4
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, unpack_nibbles


@dataclass(frozen=True)
class Element:
    """A weight q * scale of a block, with its importance."""

    q: int
    scale: Fraction
    importance: int


def error(block: Sequence[Element], byte: int, global_scale: Fraction) -> Fraction:
    """The weighted squared error of a block under a scale."""
    total = Fraction(0)
    for element in block:
        search = exact_search(element.scale, global_scale)
        total += element.importance * search.errors[byte][abs(element.q)] * search.unit
    return total


def best(block: Sequence[Element], global_scale: Fraction) -> int:
    """The byte of the best scale, ties to the larger; 0x38 for a block of zeros."""
    block = [element for element in block if element.q and element.scale]
    if not block:
        return 0x38
    # One common unit, because integers compare faster.
    units = [exact_search(element.scale, global_scale).unit for element in block]
    least = min(units)
    errors = [
        (element.importance * int(unit / least), exact_search(element.scale, global_scale).errors, abs(element.q))
        for element, unit in zip(block, units, strict=True)
    ]
    assert all((unit / least).denominator == 1 for unit in units)
    return min(NORMAL_BYTES, key=lambda byte: (sum(factor * table[byte][k] for factor, table, k in errors), -byte))


def nibble(element: Element, byte: int, global_scale: Fraction) -> int:
    """The nearest value of an element under a scale, ties to the even code, never -0."""
    code = exact_search(element.scale, global_scale).codes[byte][abs(element.q)] if element.scale else 0
    return code | (8 if code and element.q < 0 else 0)


def blocks_of(weight: Int4Weight, importance: Sequence[int]) -> list[list[Element]]:
    """The blocks of an INT4 weight, in row-major order."""
    rows, columns = weight.shape
    exponents = [0] * columns if weight.channel_exponents is None else weight.channel_exponents.tolist()
    codes, scales = unpack_int4(weight.packed).tolist(), weight.scales.tolist()
    elements = [
        Element(codes[row][j], Fraction(abs(scales[row][j // 32])) / Fraction(2) ** exponents[j], int(importance[j]))
        for row in range(rows)
        for j in range(columns)
    ]
    return [elements[start : start + 16] for start in range(0, len(elements), 16)]


def assert_is_best(weight: Int4Weight, importance: Sequence[int], result: Nvfp4Weight) -> None:
    """Every byte and every nibble is what the search in fractions gives."""
    g = Fraction(result.global_scale)
    nibbles = unpack_nibbles(result.packed).reshape(-1, 16).tolist()
    blocks = blocks_of(weight, importance)
    for block, byte, written in zip(blocks, result.block_scales.reshape(-1).tolist(), nibbles, strict=True):
        assert byte == best(block, g), block
        is_empty = all(not element.q or not element.scale for element in block)
        assert written == ([0] * 16 if is_empty else [nibble(element, byte, g) for element in block]), block
