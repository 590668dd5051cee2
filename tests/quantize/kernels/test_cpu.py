"""The CPU kernels give the bytes of rules/ for any weights, split and threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from weight_makers import MAKERS, bf16_weight, int4_from_bits, trained_like

from k2convert.choices import Rule
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.kernels.cpu import convert, measure_magnitude
from k2convert.quantize.rules import RULES

pytestmark = pytest.mark.usefixtures("instructions")

KERNELS: tuple[Rule, ...] = ("mse", "max")
"""Rules with the same kernels come once."""


def own_scale(weight: SourceWeight, rule: Rule) -> float:
    return RULES[rule].global_scale(weight.magnitude())


@lru_cache(maxsize=8)
def by_definition(weight: SourceWeight, rule: Rule, global_scale: float) -> Nvfp4Weight:
    """The bytes that the rule defines, which both sets of instructions must give."""
    return RULES[rule].quantize(weight, global_scale)


def assert_equals_rules(weight: SourceWeight, rule: Rule, global_scale: float) -> None:
    expected = by_definition(weight, rule, global_scale)
    result = convert(weight, rule=rule, global_scale=global_scale).weight
    assert np.array_equal(result.block_scales, expected.block_scales)
    assert np.array_equal(result.packed, expected.packed)


@pytest.mark.slow
@pytest.mark.parametrize("rule", KERNELS)
def test_more_pairs_than_the_buffers_hold(rule: Rule) -> None:
    """Every usable scale in one tensor, and most blocks outside the normal range."""
    rng = np.random.default_rng(9)
    bits = rng.permutation(np.arange(0x7E00))
    weight = int4_from_bits(rng.integers(-8, 8, (bits.size, 32)), bits)
    assert_equals_rules(weight, rule, 1.0)


@pytest.mark.parametrize("rule", KERNELS)
def test_row_splits_and_threads_do_not_matter(rule: Rule) -> None:
    weight = MAKERS["every-scale"]()
    g = own_scale(weight, rule)

    def rows(cut: tuple[int, int]) -> np.ndarray:
        part = convert(weight.select(slice(*cut)), rule=rule, global_scale=g).weight
        return np.concatenate([part.packed, part.block_scales], axis=1)

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(rows, pairwise([0, 1, 2, 100, 101, 999, 1000, weight.shape[0]])))
    assert np.array_equal(np.concatenate(parts), rows((0, weight.shape[0])))


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xBF80, 0xFF80, 0x7E00, 0x8001])
def test_unusable_scales_are_refused_by_name(bits: int) -> None:
    scale_bits = np.full(8, 0x3C00)
    scale_bits[5] = bits
    weight = int4_from_bits(np.ones(256, dtype=np.int64), scale_bits)
    for exponents in (None, np.ones(256, dtype=np.int8)):
        with pytest.raises(FormatError, match=r"experts\.3\.up_proj"):
            measure_magnitude(Int4Weight(weight.packed, weight.scale_bits, exponents), name="experts.3.up_proj")


@pytest.mark.parametrize("rule", sorted(RULES))
def test_empty_weight(rule: Rule) -> None:
    int4 = Int4Weight(np.empty((0, 128), dtype=np.uint8), np.empty((0, 8), dtype=np.uint16))
    for weight in (int4, Bf16Weight(np.empty((0, 256), dtype=np.uint16))):
        assert convert(weight, rule=rule, global_scale=1.0).weight.shape == (0, 256)


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


BF16_MAKERS: dict[str, Callable[[], Tensor]] = {
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
ALL_MAKERS: dict[str, Callable[[], SourceWeight]] = MAKERS | {
    "large": lambda: trained_like(2048, seed=10),
    **{f"bf16-{name}": lambda make=make: bf16_weight(make()) for name, make in BF16_MAKERS.items()},
}


@cache
def weight_of(maker: str) -> SourceWeight:
    return ALL_MAKERS[maker]()


@pytest.mark.quick(24)
@pytest.mark.parametrize("rule", KERNELS)
@pytest.mark.parametrize("maker", ALL_MAKERS)
def test_bytes_and_magnitude_equal_rules(maker: str, rule: Rule) -> None:
    weight = weight_of(maker)
    assert measure_magnitude(weight, name="w") == weight.magnitude()
    assert_equals_rules(weight, rule, own_scale(weight, rule))


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    ("rule", "global_scale"),
    [
        *(("mse", 2.0**exponent) for exponent in (-126, -60, -40, -16, -12, -9, -6, -3, 0, 5, 30, 60, 118, 127)),
        *(("max", float(np.float32(scale))) for scale in (2.0**-149, 1e-40, 1.17e-38, 3e-9, 1.1e-5, 0.75, 1e6, 3.3e38)),
    ],
)
def test_any_global_scale_equals_rules(rule: Rule, global_scale: float) -> None:
    """Tensor after tensor in one thread: one leaves nothing in its buffers for the next."""
    for maker in (
        "trained-minus-eight", "wide-spread", "few-magnitudes", "zeros",
        "bf16-bell", "bf16-outliers", "bf16-short-significands", "bf16-subnormal",
    ):  # fmt: skip
        assert_equals_rules(weight_of(maker), rule, global_scale)
