"""Importance and exponents of channels for the kernel tests, weights for them."""

import numpy as np
from int4_makers import MAKERS, int4_weight

from k2convert.quantize.formats.int4 import Int4Weight

MOST_ROWS = 30


def importance_of(rng: np.random.Generator, columns: int = 256) -> np.ndarray:
    kinds = rng.integers(0, 3, columns // 16).repeat(16)
    bell = np.rint(255 * rng.random(columns) ** 4).clip(1)
    return np.select([kinds == 0, kinds == 1], [bell, 7], rng.choice([1, 255], columns)).astype(np.uint8)


def exponents_of(rng: np.random.Generator, reach: int, columns: int = 256) -> np.ndarray | None:
    if not reach:
        return None
    return np.where(rng.random(columns) < 0.5, 0, rng.integers(-reach, reach + 1, columns)).astype(np.int8)


def hostile_columns(seed: int, rows: int = 256) -> tuple[Int4Weight, np.ndarray]:
    """Blocks with one exponent, a few or all of -4..4, of few or many magnitudes, under every mantissa.

    Their importance can all but ignore most elements.
    """
    rng = np.random.default_rng(seed)
    columns = 256
    blocks = 16

    def per_block(*choices: float) -> np.ndarray:
        return rng.choice(choices, blocks).repeat(16)

    reach = rng.integers(0, 5, blocks).repeat(16)
    common = rng.integers(-4, 5, blocks).repeat(16)
    exponents = np.where(rng.random(columns) < per_block(0.1, 0.3, 1), rng.integers(-reach, reach + 1), 0)
    exponents = np.where(per_block(0, 0, 0, 1) == 1, common, exponents)
    importance = np.where(rng.random(columns) < per_block(0.1, 0.5, 1), rng.integers(1, 256, columns), 1)
    importance = np.where(per_block(0, 0, 1) == 1, rng.choice([1, 255], columns), importance)
    most = rng.integers(1, 9, (rows, blocks)).repeat(16, axis=1)
    codes = rng.integers(-most, np.minimum(most, 7) + 1) * (rng.random((rows, columns)) < per_block(0.2, 0.7, 1))
    bits = rng.integers(118, 123, rows * 8) << 7 | rng.permutation(np.arange(rows * 8) % 128)
    weight = int4_weight(codes, bits)
    return Int4Weight(weight.packed, weight.scale_bits, exponents.astype(np.int8)), importance.astype(np.uint8)


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
