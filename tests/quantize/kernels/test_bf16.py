"""The BF16 kernels give the bytes and the figures of rules/ and metrics/, from the smallest weights to the largest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from block_makers import bf16_weight
from torch import Tensor

from k2convert.choices import Rule
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.kernels.bf16 import measure_bf16_error, quantize_bf16
from k2convert.quantize.kernels.cpu import KERNELS
from k2convert.quantize.metrics.bf16_error import measure_bf16_error as measure_by_definition
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.magnitude import measure


def bell(seed: int = 0) -> Tensor:
    return (0.02 * torch.randn(32, 512, generator=torch.Generator().manual_seed(seed))).to(torch.bfloat16)


def from_bits(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.astype(np.uint16).reshape(-1, 256)).view(torch.bfloat16)


def every_finite_number() -> Tensor:
    """All BF16 numbers below 2**120, of both signs, in order and shuffled."""
    finite = np.arange(247 << 7)
    shuffled = np.random.default_rng(0).permutation(finite)
    return from_bits(np.concatenate([finite, finite | 0x8000, shuffled, shuffled | 0x8000]))


def short_significands() -> Tensor:
    """Weights of three significant bits: ties between codes and between scales everywhere."""
    rng = np.random.default_rng(1)
    return from_bits((rng.integers(120, 128, 64 * 256) << 7) | (rng.integers(0, 4, 64 * 256) << 5))


def sparse() -> Tensor:
    weight = bell(2)
    weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) < 0.9] = 0.0
    return weight


def outliers() -> Tensor:
    """Blocks of very different size: many of them outside the reach of the normal range."""
    weight = bell(4).to(torch.float64)
    powers = torch.randint(-40, 1, (32, 32, 1), generator=torch.Generator().manual_seed(5)).to(torch.float64)
    return (weight.view(32, 32, 16) * torch.exp2(powers)).view(32, 512).to(torch.bfloat16)


def subnormal() -> Tensor:
    return from_bits(np.random.default_rng(6).integers(0, 128, 16 * 256) | 0x8000)


MAKERS: dict[str, Callable[[], Tensor]] = {
    "bell": bell,
    "every-finite-number": every_finite_number,
    "short-significands": short_significands,
    "sparse": sparse,
    "outliers": outliers,
    "subnormal": subnormal,
    "zeros": lambda: torch.zeros(4, 256, dtype=torch.bfloat16),
    "minus-zeros": lambda: -torch.zeros(4, 256, dtype=torch.bfloat16),
    "constant": lambda: torch.full((4, 256), -0.0123, dtype=torch.bfloat16),
}


def assert_equals_rules(weight: Bf16Weight, rule: Rule, global_scale: float) -> None:
    expected = RULES[rule].quantize_bf16(weight, global_scale)
    result = quantize_bf16(weight, rule=rule, global_scale=global_scale)
    assert np.array_equal(result.block_scales, expected.block_scales)
    assert np.array_equal(result.packed, expected.packed)


@pytest.mark.parametrize("rule", KERNELS)
@pytest.mark.parametrize("maker", MAKERS)
def test_bytes_and_figures_equal_rules(maker: str, rule: Rule) -> None:
    weight = bf16_weight(MAKERS[maker]())
    magnitude = measure(weight)
    scale = RULES[rule].global_scale(magnitude, is_int4=False)
    assert_equals_rules(weight, rule, scale)
    result = quantize_bf16(weight, rule=rule, global_scale=scale)
    figures = measure_bf16_error(weight, result, magnitude=magnitude, sample_seed=77)
    assert figures == measure_by_definition(weight, result, magnitude=magnitude, sample_seed=77)


@pytest.mark.parametrize("exponent", [-126, -60, -16, -9, 0, 30, 118, 127])
def test_optimal_equals_rules_for_any_power_of_two(exponent: int) -> None:
    for maker in ("bell", "outliers", "short-significands"):
        assert_equals_rules(bf16_weight(MAKERS[maker]()), "optimal", 2.0**exponent)


@pytest.mark.parametrize("global_scale", [2.0**-149, 1e-40, 3e-9, 1.1e-5, 0.75, 3.3e38])
def test_plain_equals_rules_for_any_global_scale(global_scale: float) -> None:
    for maker in ("bell", "outliers", "subnormal"):
        assert_equals_rules(bf16_weight(MAKERS[maker]()), "plain", float(np.float32(global_scale)))
