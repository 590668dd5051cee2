"""The decoder of written bytes equals a direct evaluation in NumPy, on conversions and on any other bytes."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from weight_makers import MAKERS, bf16_weight, trained_like

from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.cpu import convert
from k2convert.quantize.metrics.measure import measure_decoded
from k2convert.quantize.metrics.weight_metrics import WeightMetrics

ELEMENTS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
GLOBAL_SCALE = float(np.float32(3.1e-5))
"""Not a power of two, so a careless decoder rounds its products."""


ERROR = ("num_weights", "num_nonzero", "equal_nonzero", "energy", "squared_error", "max_error_steps")
"""Figures that any bytes have: other counts are defined for those that a rule writes."""


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1).astype(np.int64)


def evaluate(
    weight: NDArray[np.float64], steps: NDArray[np.float64], packed: NDArray[np.uint8], block_scales: NDArray[np.uint8]
) -> tuple[int, int, float, float, float]:
    """num_nonzero, equal_nonzero, energy, squared error and the largest error over `steps`, one a weight."""
    scales = torch.from_numpy(block_scales.reshape(-1)).view(torch.float8_e4m3fn).double().numpy()
    decoded = ELEMENTS[nibbles(packed)] * np.repeat(scales * GLOBAL_SCALE, 16)
    difference = weight - decoded
    nonzero = weight != 0.0
    sized = np.isfinite(difference) & (steps > 0.0)
    return (
        int(nonzero.sum()),
        int((nonzero & (difference == 0.0)).sum()),
        math.fsum(weight * weight),
        math.fsum(difference * difference) if np.isfinite(difference).all() else math.nan,
        float((np.abs(difference[sized]) / steps[sized]).max(initial=0.0)),
    )


def assert_measured(metrics: WeightMetrics, expected: tuple[int, int, float, float, float]) -> None:
    assert (metrics.num_nonzero, metrics.equal_nonzero) == expected[:2]
    assert math.isclose(metrics.energy, expected[2], rel_tol=1e-14)
    assert metrics.squared_error == pytest.approx(expected[3], rel=1e-13, abs=0, nan_ok=True)
    assert metrics.max_error_steps is None or metrics.max_error_steps == expected[4]


def exact_weights(source: Int4Weight) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Every weight q * s, and every weight's s."""
    steps = np.repeat(source.scales.astype(np.float64).reshape(-1), 32)
    return (nibbles(source.packed) - 8) * steps, steps


def random_bytes(source: Int4Weight, *, seed: int, any_scale: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    rows, columns = source.shape
    packed = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    return packed, rng.integers(0, 256 if any_scale else 0x7F, (rows, columns // 16), dtype=np.uint8)


@pytest.mark.parametrize("any_scale", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_figures_of_any_bytes_equal_a_plain_evaluation_whatever_the_instructions(maker: str, any_scale: bool) -> None:
    """Block scales that are no number make the error None, and leave the rest."""
    source = MAKERS[maker]()
    packed, block_scales = random_bytes(source, seed=len(maker), any_scale=any_scale)
    expected = evaluate(*exact_weights(source), packed, block_scales)
    assert math.isnan(expected[3]) == any_scale
    before = _cpu.instructions()
    figures: set[tuple[str, ...]] = set()
    try:
        for name in {"portable", before}:
            _cpu.use_instructions(name)
            metrics = measure_decoded(source, packed=packed, block_scales=block_scales, global_scale=GLOBAL_SCALE)
            assert_measured(metrics, expected)
            figures.add(tuple(repr(getattr(metrics, name)) for name in ERROR))
    finally:
        _cpu.use_instructions(before)
    assert len(figures) == 1


@pytest.mark.usefixtures("instructions")
def test_one_flipped_bit_is_seen() -> None:
    source = trained_like(1, seed=3)
    result = convert(source, rule="mse", global_scale=2.0**-12).weight
    packed = result.packed
    block_scales = result.block_scales
    before = measure_decoded(source, packed=packed, block_scales=block_scales, global_scale=2.0**-12)
    minus_zero = 0
    for part in (packed.reshape(-1), block_scales.reshape(-1)):
        for index in range(part.size):
            for bit in range(8):
                part[index] ^= 1 << bit
                after = measure_decoded(source, packed=packed, block_scales=block_scales, global_scale=2.0**-12)
                minus_zero += after == before
                part[index] ^= 1 << bit
    zeros = sum(int((half == 0).sum()) for half in (packed & 15, packed >> 4))
    assert minus_zero == zeros


def test_figures_of_bf16_weights_equal_a_plain_evaluation() -> None:
    source = (0.02 * torch.randn(24, 512, generator=torch.Generator().manual_seed(5))).to(torch.bfloat16)
    source[torch.rand(source.shape, generator=torch.Generator().manual_seed(6)) < 0.2] = 0.0
    rng = np.random.default_rng(8)
    packed = rng.integers(0, 256, (24, 256), dtype=np.uint8)
    block_scales = rng.integers(0, 0x7F, (24, 32), dtype=np.uint8)
    metrics = measure_decoded(bf16_weight(source), packed=packed, block_scales=block_scales, global_scale=GLOBAL_SCALE)
    weight = source.double().numpy().reshape(-1)
    assert metrics.max_error_steps is None
    assert_measured(metrics, evaluate(weight, np.zeros_like(weight), packed, block_scales))


@pytest.mark.parametrize("maker", ["trained", "any-bytes", "zeros"])
def test_figures_of_scaled_columns_equal_a_plain_evaluation(maker: str) -> None:
    source = MAKERS[maker]()
    exponents = np.random.default_rng(len(maker)).integers(-4, 5, source.shape[1]).astype(np.int8)
    source = dataclasses.replace(source, channel_exponents=exponents)
    packed, block_scales = random_bytes(source, seed=9, any_scale=False)
    measured = measure_decoded(source, packed=packed, block_scales=block_scales, global_scale=GLOBAL_SCALE)
    powers = np.tile(np.ldexp(1.0, -exponents.astype(int)), source.shape[0])
    weight, steps = (values * powers for values in exact_weights(source))
    assert_measured(measured, evaluate(weight, steps, packed, block_scales))
