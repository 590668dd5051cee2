"""Exponents of channels for the kernel tests, weights for them."""

import numpy as np
from int4_makers import MAKERS

from k2convert.quantize.formats.int4 import Int4Weight

MOST_ROWS = 30


def exponents_of(rng: np.random.Generator, reach: int, columns: int = 256) -> np.ndarray | None:
    if not reach:
        return None
    return np.where(rng.random(columns) < 0.5, 0, rng.integers(-reach, reach + 1, columns)).astype(np.int8)


def some_rows(maker: str, exponents: np.ndarray | None) -> Int4Weight:
    """Rows whose scales can be divided by 2**4 and multiplied by it."""
    weight = MAKERS[maker]()
    bits = weight.scale_bits & 0x7FFF
    fits = (
        ((bits == 0) | ((bits >= 0x0480) & (bits < 0x7C00))).all(axis=1) if exponents is not None else bits[:, 0] >= 0
    )
    chosen = np.flatnonzero(fits)
    chosen = chosen[:: max(1, chosen.size // MOST_ROWS)]
    return Int4Weight(weight.packed[chosen], weight.scale_bits[chosen], exponents)
