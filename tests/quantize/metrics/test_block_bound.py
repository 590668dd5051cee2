"""The bound holds for every block and every scale, and is reached by some real scale."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from block_makers import any_codes, int4_weight, trained_like
from exact_search import E2M1, exact_search, int4_assignments, int4_block_bounds

from k2convert.quantize.formats.int4 import unpack_int4
from k2convert.quantize.kernels import _cpu

VALUES = [float(value) for value in E2M1]


def bound_of_int4(magnitudes: np.ndarray, exponents: np.ndarray | None = None) -> float:
    """The kernel's bound of a block of |q| with the scale 1, in front of a block of zeros."""
    nibbles = np.concatenate([np.where(magnitudes == 8, 0, 8 + magnitudes), np.full(16, 8)]).astype(np.uint8)
    packed = nibbles[0::2] | nibbles[1::2] << 4
    nothing = np.zeros(16, dtype=np.uint8)
    both = None if exponents is None else np.concatenate([exponents, np.zeros(16, dtype=np.int8)])
    scale_bits = np.array([0x3F80], dtype=np.uint16)
    return _cpu.sample_int4(packed, scale_bits, both, nothing, nothing[:2], np.zeros(256), 0, 2, 1.0)[2]


def bound_of_bf16(values: np.ndarray) -> float:
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    nothing = np.zeros(8, dtype=np.uint8)
    return _cpu.sample_bf16(bits, nothing, nothing[:1], np.zeros(256), 0, 1, 1.0)[2]


def bounds_of(histograms: np.ndarray) -> np.ndarray:
    """The kernels' bound of each block in units of s**2, as INT4 and as BF16 weights."""
    bounds = []
    for histogram in histograms.tolist():
        magnitudes = np.repeat(np.arange(9), histogram)
        bounds.append(bound_of_int4(magnitudes))
        assert abs(bounds[-1] - bound_of_bf16(magnitudes)) <= 1e-9
    return np.array(bounds)


def nearest_values(t: float) -> tuple[int, ...]:
    return tuple(int(2 * min(VALUES, key=lambda v: abs(k - v * t))) for k in range(9))


def some_histograms() -> np.ndarray:
    weights = (trained_like(8, 256, seed=0), int4_weight(any_codes(32, 256, seed=1), torch.ones(32, 8).bfloat16()))
    magnitudes = np.concatenate([np.abs(unpack_int4(weight.packed)).reshape(-1, 16) for weight in weights])
    return (magnitudes[:, :, None] == np.arange(9)).sum(axis=1)


def test_there_are_at_most_57_assignments_and_a_fine_sweep_finds_no_other() -> None:
    known = {tuple(row) for row in int4_assignments().tolist()}
    assert len(known) <= 57
    swept = {nearest_values(t) for t in np.geomspace(0.1, 40.0, 10_007)}
    assert swept <= known
    assert len(known - swept) <= 2  # only intervals narrower than the sweep may be missed


def test_the_bound_is_the_minimum_over_all_real_scales() -> None:
    histograms = some_histograms()
    bounds = bounds_of(histograms)
    assert np.allclose(bounds, int4_block_bounds(histograms), rtol=0, atol=1e-9)
    k = np.arange(9)
    least = np.full(len(histograms), np.inf)
    values = np.array(VALUES)
    for t in np.geomspace(0.1, 40.0, 4001):
        residual = np.min(np.abs(k[:, None] - values * t), axis=1)
        least = np.minimum(least, histograms @ (residual * residual))
    assert (bounds <= least + 1e-9).all()
    assert np.allclose(bounds, least, rtol=2e-3, atol=2e-4)


def test_the_bound_equals_its_value_in_fractions() -> None:
    histograms = some_histograms()[::7]
    for histogram, bound in zip(histograms.tolist(), bounds_of(histograms).tolist(), strict=True):
        energy = Fraction(sum(n * k * k for k, n in enumerate(histogram)))
        explained = [Fraction(0)]
        for values in int4_assignments().tolist():
            norm = sum(n * v * v for n, v in zip(histogram, values, strict=True))
            if norm:
                inner = sum(n * k * v for k, (n, v) in enumerate(zip(histogram, values, strict=True)))
                explained.append(Fraction(inner * inner, norm))
        exact = energy - max(explained)
        assert bound >= 0
        assert abs(Fraction(bound) - exact) <= Fraction(1, 10**11)


def test_no_scale_of_the_exhaustive_search_beats_the_bound() -> None:
    histograms = some_histograms()[::11]
    search = exact_search(Fraction(177, 2**14), Fraction(1, 2**13))
    for histogram, bound in zip(histograms.tolist(), bounds_of(histograms).tolist(), strict=True):
        least = min(sum(n * e for n, e in zip(histogram, errors, strict=True)) for errors in search.errors.values())
        assert (Fraction(bound) - Fraction(1, 10**11)) * Fraction(177, 2**14) ** 2 <= least * search.unit


@pytest.mark.parametrize("reach", [0, 1, 3, 4])
def test_the_bound_with_exponents_is_the_bound_of_the_values(reach: int) -> None:
    rng = np.random.default_rng(reach)
    for _ in range(200):
        magnitudes = rng.integers(0, 9, 16)
        exponents = rng.integers(-reach, reach + 1, 16).astype(np.int8)
        expected = bound_of_bf16(np.ldexp(magnitudes, -exponents.astype(int)))
        assert np.isclose(bound_of_int4(magnitudes, exponents), expected, rtol=1e-12, atol=1e-12)
