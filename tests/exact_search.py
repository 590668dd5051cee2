"""The oracle of the search: every normal E4M3 scale, every E2M1 value, exactly, and no code of the package.

Fractions throughout; within one search they are held over a common denominator, because integers compare faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

E2M1 = (Fraction(0), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(4), Fraction(6))
NORMAL_BYTES = range(0x08, 0x7F)


def e4m3_value(byte: int) -> Fraction:
    """The value of a positive E4M3 byte, from the format's definition."""
    exponent, mantissa = byte >> 3, byte & 7
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

    def error(self, magnitudes: Sequence[int], byte: int) -> Fraction:
        """Squared error of a block with these |q| under a scale."""
        return self._error(magnitudes, byte) * self.unit

    def best(self, magnitudes: Sequence[int]) -> int:
        """The byte of the best scale, ties to the larger; 0x38 for a block of zeros."""
        if not any(magnitudes):
            return 0x38
        return min(NORMAL_BYTES, key=lambda byte: (self._error(magnitudes, byte), -byte))

    def _error(self, magnitudes: Sequence[int], byte: int) -> int:
        errors = self.errors[byte]
        return sum(errors[k] for k in magnitudes)


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


@lru_cache(maxsize=1)
def int4_assignments() -> NDArray[np.int64]:
    """Return every code assignment of |q| = 0..8 that a real scale can give, as doubled values int64 [57, 9]."""
    midpoints = [(low + high) / 2 for low, high in pairwise(E2M1)]
    breakpoints = sorted({k / midpoint for k in range(1, 9) for midpoint in midpoints})
    inner = [(low + high) / 2 for low, high in pairwise(breakpoints)]
    steps = [breakpoints[0] / 2, *inner, breakpoints[-1] * 2]
    # No step is a breakpoint, so no ratio is a midpoint, and counting the midpoints below it needs no tie rule.
    rows = [[int(2 * E2M1[sum(k / step > midpoint for midpoint in midpoints)]) for k in range(9)] for step in steps]
    return np.unique(np.array(rows, dtype=np.int64), axis=0)


def int4_block_bounds(histograms_Mk: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the bound of each block in units of s**2, float64 [M], from counts of |q| = 0..8, int64 [M, 9]."""
    k = np.arange(9, dtype=np.float64)
    values_Ak = int4_assignments().astype(np.float64)
    counts = histograms_Mk.astype(np.float64)
    # All sums are integers below 2**53: exact in any order.
    inner_MA = counts @ (k * values_Ak).T
    norm_MA = counts @ (values_Ak * values_Ak).T
    explained_MA = np.divide(inner_MA * inner_MA, norm_MA, out=np.zeros_like(norm_MA), where=norm_MA > 0)
    return counts @ (k * k) - explained_MA.max(axis=1)
