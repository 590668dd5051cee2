"""The oracle of the search: every normal E4M3 scale, every E2M1 value, in fractions, and no code of the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

E2M1 = (Fraction(0), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(4), Fraction(6))
NORMAL_BYTES = range(0x08, 0x7F)


def e4m3_value(byte: int) -> Fraction:
    """The value of a positive E4M3 byte, from the format's definition."""
    exponent, mantissa = byte >> 3, byte & 7
    if exponent == 0:
        return Fraction(mantissa) * Fraction(2) ** -9
    return Fraction(8 + mantissa) * Fraction(2) ** (exponent - 10)


def nearest(value: Fraction, step: Fraction) -> tuple[int, Fraction]:
    """The code whose v * step is nearest to a non-negative value, ties to the even code, and the squared error."""
    code = min(range(8), key=lambda c: (abs(value - E2M1[c] * step), c % 2))
    return code, (value - E2M1[code] * step) ** 2


@dataclass(frozen=True)
class ExactSearch:
    """All scales tried for one source scale and one global scale: codes and errors of |q| = 0..8 under each."""

    codes: dict[int, tuple[int, ...]]
    errors: dict[int, tuple[Fraction, ...]]

    def error(self, magnitudes: Sequence[int], byte: int) -> Fraction:
        """Squared error of a block with these |q| under a scale."""
        errors = self.errors[byte]
        return sum((magnitudes.count(k) * errors[k] for k in set(magnitudes) - {0}), Fraction(0))

    def best(self, magnitudes: Sequence[int]) -> int:
        """The byte of the best scale, ties to the larger; 0x38 for a block of zeros."""
        if not any(magnitudes) or (not any(self.errors[0x7E]) and not any(self.codes[0x7E])):
            return 0x38
        return min(NORMAL_BYTES, key=lambda byte: (self.error(magnitudes, byte), -byte))


@lru_cache(maxsize=512)
def exact_search(scale: Fraction, global_scale: Fraction) -> ExactSearch:
    """Try every normal scale for the values k * scale, k = 0..8."""
    codes: dict[int, tuple[int, ...]] = {}
    errors: dict[int, tuple[Fraction, ...]] = {}
    for byte in NORMAL_BYTES:
        step = e4m3_value(byte) * global_scale
        pairs = [nearest(k * scale, step) for k in range(9)]
        codes[byte] = tuple(code for code, _ in pairs)
        errors[byte] = tuple(error for _, error in pairs)
    return ExactSearch(codes=codes, errors=errors)
