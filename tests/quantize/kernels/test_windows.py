"""Looking at 16 candidates instead of 82 loses nothing; proven by exhaustion.

A block is a histogram of |q| = 1..8 with at most 16 entries: 735,471 of them, and 128 mantissas of s. The full search
here ranges over every shift from 0 to 11, so it also covers candidates beyond those that cpu.py lists.
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import DOUBLED_VALUES
from k2convert.quantize.kernels.cpu import convert

NUM_CANDIDATES = 96
ONE_BF16 = 0x3F80
FIRST_BYTE = 32
"""The E4M3 byte of 8 * 2**-6, the block scale of the first candidate."""


def all_histograms() -> NDArray[np.uint8]:
    """Every way to choose at most 16 of the magnitudes 1..8; uint8 [735471, 8]."""
    histograms = np.zeros((1, 0), dtype=np.uint8)
    left = np.array([16])
    for _ in range(8):
        choices = left + 1
        parent = np.repeat(np.arange(len(left)), choices)
        count = np.arange(choices.sum()) - np.repeat(np.cumsum(choices) - choices, choices)
        histograms = np.concatenate([histograms[parent], count[:, None].astype(np.uint8)], axis=1)
        left = left[parent] - count
    return histograms


def full_errors(mantissa: int) -> NDArray[np.float64]:
    """Errors of |q| = 1..8 in units of (s / 2ms)**2 under mb * 2**j, ascending: float64 [8, 96], all integers."""
    steps = np.array([(8 + c % 8) << (c // 8) for c in range(NUM_CANDIDATES)])
    wanted = 2 * mantissa * np.arange(1, 9)
    return ((wanted[:, None, None] - steps[:, None] * np.array(DOUBLED_VALUES)) ** 2).min(axis=2).astype(np.float64)


def packed_blocks(histograms: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks of 16 INT4 codes with these histograms, half of them negative: uint8 [M, 8]."""
    at_least = np.cumsum(histograms[:, ::-1], axis=1, dtype=np.int64)
    magnitudes = (np.arange(16) < at_least[:, :, None]).sum(axis=1)
    negative = (magnitudes == 8) | (np.arange(16) % 2 == 1)
    nibbles = (8 + np.where(negative, -magnitudes, magnitudes)).astype(np.uint8)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def count_wrong(histograms: NDArray[np.uint8], mantissa: int) -> int:
    """Count histograms whose scale is not the best candidate, last on ties, and blocks wrongly found exact."""
    blocks = packed_blocks(np.concatenate([histograms, histograms[: -len(histograms) % 8]]))
    # s = ms / 128, g = 1/2: candidate c, t = mb * 2**(c // 8) / ms with mb = 8 + c % 8, has b = mb * 2**(c // 8 - 6).
    scale_bits = np.full((1, len(blocks) // 2), mantissa - 128 + ONE_BF16, dtype=np.uint16)
    weight = Int4Weight(blocks.reshape(1, -1), scale_bits)
    result = convert(weight, rule="mse", global_scale=0.5)
    assert result.sums is not None
    errors = full_errors(mantissa)
    sums_M = []
    for start in range(0, len(histograms), 1 << 15):
        sums = histograms[start : start + (1 << 15)].astype(np.float64) @ errors
        sums_M.append(np.stack([NUM_CANDIDATES - 1 - sums[:, ::-1].argmin(axis=1), sums.min(axis=1)]))
    best, least = np.concatenate(sums_M, axis=1)
    expected = best.astype(np.int64) + FIRST_BYTE
    actual = result.weight.block_scales[0].astype(np.int64)[: len(histograms)]
    some = histograms.any(axis=1)
    padded_equal = int((np.concatenate([least, least[: -len(histograms) % 8]]) == 0).sum())
    return int((actual != expected)[some].sum()) + abs(result.sums.equal_blocks - padded_equal)


def test_every_histogram_under_some_mantissas() -> None:
    histograms = all_histograms()
    assert histograms.shape == (735471, 8)
    for mantissa in (128, 183, 255):
        assert count_wrong(histograms[mantissa % 5 :: 5], mantissa) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mantissa", range(128, 256))
def test_every_histogram_under_every_mantissa(mantissa: int) -> None:
    assert count_wrong(all_histograms(), mantissa) == 0
