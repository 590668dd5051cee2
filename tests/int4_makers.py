"""INT4 weights for the kernel tests, each a corner of the format."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from k2convert.quantize.formats.int4 import Int4Weight

USABLE_BITS = 0x7E00
"""BF16 bits below these are zero, subnormal numbers, or normal numbers of which eight times is finite."""


def int4_weight(codes: NDArray[np.int64], scale_bits: NDArray[np.int64]) -> Int4Weight:
    """Pack N * 256 codes -8..7, in order, with the BF16 bits of a scale for every 32 of them, into [N, 256]."""
    rows = codes.size // 256
    nibbles = (codes.reshape(rows, 256) + 8).astype(np.uint8)
    return Int4Weight(nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scale_bits.astype(np.uint16).reshape(rows, 8))


def bf16_bits(values: NDArray[np.float64]) -> NDArray[np.int64]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.int64)


def trained_like(rows: int, *, seed: int, lowest: int = -7) -> Int4Weight:
    """Bell-shaped weights, the group's largest mapped to 7 (or, with -8 in use, to 7.5)."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rows * 8, 32)) * np.exp(0.4 * rng.standard_normal((rows * 8, 1)))
    bits = bf16_bits(0.02 * np.abs(weights).max(axis=1) / (7 if lowest == -7 else 7.5))
    scales = (bits.astype(np.uint32) << 16).view(np.float32)
    return int4_weight(np.clip(np.rint(0.02 * weights / scales[:, None]), lowest, 7).astype(np.int64), bits)


def any_bytes(rows: int = 64, *, seed: int = 1) -> Int4Weight:
    rng = np.random.default_rng(seed)
    return int4_weight(rng.integers(-8, 8, rows * 256), bf16_bits(rng.uniform(0.01, 0.03, rows * 8)))


def every_scale() -> Int4Weight:
    """Every BF16 number that a scale can be, minus zero too, once with few and once with many magnitudes in a block."""
    rng = np.random.default_rng(2)
    bits = np.concatenate([np.arange(USABLE_BITS), np.full(256, 0x8000)])
    dense = rng.integers(-8, 8, (bits.size, 32))
    sparse = rng.integers(-8, 8, (bits.size, 1)) * (rng.random((bits.size, 32)) < 0.2)
    return int4_weight(np.concatenate([dense, sparse]), np.concatenate([bits, bits]))


def few_magnitudes() -> Int4Weight:
    """Blocks of every pair of magnitudes, single and mixed, under mantissas that hit ties and those that do not."""
    rng = np.random.default_rng(3)
    pairs = [(a, b) for a in range(9) for b in range(9)] * 16
    codes = [np.where(rng.random(16) < rng.random(), a, b) * rng.choice([-1, 1], 16) for a, b in pairs]
    blocks = np.clip(np.array(codes), -8, 7).reshape(-1, 32)
    mantissas = rng.choice([0, 16, 32, 64, 96, 112, 127, 1, 85], blocks.shape[0])
    return int4_weight(blocks, 0x3C00 + mantissas)


def constant(code: int) -> Int4Weight:
    return int4_weight(np.full(256 * 16, code), 0x3C00 + np.arange(128))


def single_nonzero() -> Int4Weight:
    rng = np.random.default_rng(4)
    codes = np.zeros((128 * 2, 16), dtype=np.int64)
    codes[np.arange(256), rng.integers(0, 16, 256)] = rng.integers(-8, 8, 256)
    return int4_weight(codes, 0x3B80 + np.arange(128))


def wide_spread() -> Int4Weight:
    """Scales over 2**40: most blocks are best served outside the normal range."""
    rng = np.random.default_rng(5)
    bits = (rng.integers(87, 127, 512) << 7) | rng.integers(0, 128, 512)
    return int4_weight(np.clip(np.rint(3 * rng.standard_normal(512 * 32)), -8, 7).astype(np.int64), bits)


def zeros() -> Int4Weight:
    """Zero blocks, zero groups, zero scales under non-zero codes, minus zero."""
    rng = np.random.default_rng(6)
    codes = rng.integers(-8, 8, (64 * 8, 2, 16)) * (rng.random((64 * 8, 2, 1)) < 0.5)
    return int4_weight(codes, rng.choice([0, 0x8000, 0x3C00, 0x3C55], 64 * 8))


def all_zero() -> Int4Weight:
    return int4_weight(np.zeros(256 * 4, dtype=np.int64), np.zeros(32, dtype=np.int64))


MAKERS: dict[str, Callable[[], Int4Weight]] = {
    "trained": lambda: trained_like(96, seed=7),
    "trained-minus-eight": lambda: trained_like(96, seed=8, lowest=-8),
    "any-bytes": any_bytes,
    "every-scale": every_scale,
    "few-magnitudes": few_magnitudes,
    "all-minus-eight": lambda: constant(-8),
    "all-seven": lambda: constant(7),
    "all-minus-one": lambda: constant(-1),
    "single-nonzero": single_nonzero,
    "wide-spread": wide_spread,
    "zeros": zeros,
    "all-zero": all_zero,
}
