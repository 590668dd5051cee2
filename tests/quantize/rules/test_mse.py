"""`mse` is mse: it equals an exhaustive search in fractions, and both libraries decode it exactly."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from exact_search import NORMAL_BYTES, assert_is_best, count_outside_normal, e4m3_value
from hypothesis import example, given, settings
from hypothesis import strategies as st
from weight_makers import any_codes, bf16_from_bits, bf16_weight, blocks_of, int4_weight, trained_like

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Magnitude
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import unpack_nibbles
from k2convert.quantize.kernels.cpu import convert, measure_magnitude
from k2convert.quantize.rules.mse import mse_global_scale, quantize_mse


def own_scale(weight: Int4Weight) -> float:
    return mse_global_scale(weight.magnitude())


def single_elements_and_uniform_blocks(mantissa: int) -> Int4Weight:
    codes = torch.zeros(16, 32, dtype=torch.int8)
    codes[:, 5] = torch.arange(-8, 8)
    codes[:, 16:] = torch.arange(-8, 8).unsqueeze(-1)
    return int4_weight(codes, torch.full((16, 1), mantissa * 2.0**-13, dtype=torch.bfloat16))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "weight",
    [
        trained_like(16, seed=0),
        int4_weight(
            any_codes(60, 384, seed=1), torch.linspace(0.001, 0.05, 60).bfloat16().repeat_interleave(12).view(60, 12)
        ),
        *(single_elements_and_uniform_blocks(mantissa) for mantissa in (128, 147, 208)),
    ],
)
def test_any_blocks_equal_the_exhaustive_search(weight: Int4Weight) -> None:
    assert_is_best(weight, quantize_mse(weight, own_scale(weight)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.lists(st.integers(0, 0x7C00), min_size=2, max_size=2),
    exponent=st.none() | st.integers(-126, 120),
)
@example(seed=4, bits=[1, 0x7F], exponent=None)  # subnormal scales
@example(seed=4, bits=[0x3C2A, 0x3C80], exponent=-7)
def test_any_scales_equal_the_exhaustive_search(seed: int, bits: list[int], exponent: int | None) -> None:
    weight = int4_weight(any_codes(2, 32 * 4, seed=seed), bf16_from_bits(torch.tensor(bits * 4)).reshape(2, 4))
    global_scale = own_scale(weight) if exponent is None else 2.0**exponent
    result = quantize_mse(weight, global_scale)
    assert result.global_scale == global_scale
    assert_is_best(weight, result)


def test_a_zero_scale_and_zero_codes_both_give_an_empty_block() -> None:
    scales = torch.tensor([[0.0, 0.01], [-0.0, 0.01]], dtype=torch.bfloat16)
    codes = any_codes(2, 64, seed=6)
    codes[:, 32:48] = 0
    result = quantize_mse(int4_weight(codes, scales), 2.0**-10)
    assert (result.block_scales[:, :3] == 0x38).all()
    assert not result.packed[:, :24].any()


def test_the_global_scale_is_the_least_power_of_two_that_reaches_two_point_six() -> None:
    """For scales of every size, and for the neighbors of each step: 2.6 * s / 448 is no power of two for any s."""
    edges = [torch.tensor(2.0**exponent * 448 / 2.6).to(torch.bfloat16) for exponent in range(-100, 100)]
    neighbors = [int(edge.view(torch.int16)) + step for edge in edges for step in (-1, 0, 1)]
    for bits in (*range(0x0001, 0x7E00, 7), *neighbors):
        scale_max = float(bf16_from_bits(torch.tensor([bits]))[0])
        g = Fraction(mse_global_scale(Magnitude(scale_max, 0.0, is_int4=True)))
        needed = Fraction(26, 10) * Fraction(scale_max) / 448
        assert g >= needed
        assert g / 2 < needed or g == Fraction(2) ** -126


def test_a_set_of_zero_scales_gets_global_scale_one() -> None:
    assert mse_global_scale(Magnitude(0.0, 0.0, is_int4=True)) == 1.0
    assert mse_global_scale(Magnitude(0.0, 0.0, is_int4=False)) == 1.0


def test_a_global_scale_that_is_not_a_power_of_two_is_refused() -> None:
    with pytest.raises(FormatError, match="power of two"):
        quantize_mse(trained_like(1, 32, seed=0), 0.75)


@pytest.mark.usefixtures("instructions")
def test_blocks_that_want_a_scale_outside_the_normal_range_are_counted() -> None:
    exponents = torch.arange(0, -36, -2, dtype=torch.float64).unsqueeze(-1)
    weight = int4_weight(any_codes(18, 96, seed=13), (200 * torch.exp2(exponents)).to(torch.bfloat16).repeat(1, 3))
    for exponent in (0, -8):
        g = 2.0**exponent
        counted = convert(weight, rule="mse", global_scale=g).outside_normal
        assert counted == count_outside_normal(weight, Fraction(g)) > 0
    ordinary = trained_like(64, 256, seed=1)
    assert convert(ordinary, rule="mse", global_scale=own_scale(ordinary)).outside_normal == 0


@pytest.mark.parametrize(
    ("largest", "exponents"), [(-8, None), (7, None), (0, None), (1, None), (-8, (4, -4, 0)), (7, (-1, 3, 2))]
)
def test_the_global_scale_depends_on_scales_and_not_on_codes(largest: int, exponents: tuple[int, ...] | None) -> None:
    codes = torch.full((8, 96), largest, dtype=torch.int8)
    weight = int4_weight(codes, torch.full((8, 3), 1.3 * 2.0**-7, dtype=torch.bfloat16))
    scale_max = float(weight.scales.max())
    if exponents is not None:
        weight = weight.divide_columns(np.repeat(np.array(exponents, dtype=np.int8), 32), name="w")
        scale_max *= 2.0 ** -min(exponents)
    expected = mse_global_scale(Magnitude(scale_max, 0.0, is_int4=True))
    for magnitude in (weight.magnitude(), measure_magnitude(weight, name="w")):
        assert mse_global_scale(magnitude) == expected


VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest_codes(block: np.ndarray, step: float) -> np.ndarray:
    """Nearest value by exhaustive comparison; of two equally near the even code."""
    distance = np.abs(np.minimum(block / step, 100.0)[:, None] - VALUES)
    rank = distance.argmin(axis=1)
    tied = (rank < 7) & (distance[np.arange(16), rank] == distance[np.arange(16), np.minimum(rank + 1, 7)])
    return np.where(tied & (rank % 2 == 1), rank + 1, rank)


def search(block: np.ndarray, global_scale: float) -> tuple[int, np.ndarray]:
    best = 0x38
    least = np.inf
    if not block.any():
        return best, np.zeros(16, dtype=np.int64)
    for byte in NORMAL_BYTES:
        step = float(e4m3_value(byte)) * global_scale
        error = 0.0
        for w, v in zip(block.tolist(), VALUES[nearest_codes(block, step)].tolist(), strict=True):
            difference = w - v * step
            error += difference * difference
        if error <= least:
            best = byte
            least = error
    return best, nearest_codes(block, float(e4m3_value(best)) * global_scale)


def assert_equals_full_search(weight: torch.Tensor, global_scale: float) -> None:
    result = quantize_mse(bf16_weight(weight), global_scale)
    nibbles = unpack_nibbles(result.packed).reshape(-1, 16)
    blocks = blocks_of(weight).to(torch.float64).numpy()
    for block, written, byte in zip(blocks, nibbles, result.block_scales.reshape(-1).tolist(), strict=True):
        best, codes = search(np.abs(block), global_scale)
        assert byte == best, block
        assert np.array_equal(written, np.where((block < 0) & (codes > 0), codes + 8, codes))


def scale_of(weight: torch.Tensor) -> float:
    return mse_global_scale(bf16_weight(weight).magnitude())


def awkward(seed: int) -> torch.Tensor:
    """Dense, sparse, heavy-tailed, few-valued, tiny and empty blocks."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(12, 64, generator=generator)
    weight[2:4] *= torch.rand(2, 64, generator=generator) < 0.1
    weight[4:6] = weight[4:6] ** 7
    weight[6:8] = torch.round(weight[6:8] * 2) / 2
    weight[8] *= torch.exp2(-torch.arange(64.0) / 2)
    weight[9] *= 2.0**-14
    weight[10, :16] = 0
    weight[11] = 1.5
    return (weight * 0.03).to(torch.bfloat16)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(-124, 100), exponent=st.none() | st.integers(-126, 20))
@example(seed=0, size=0, exponent=None)
@example(seed=2, size=0, exponent=-9)
@example(seed=3, size=-124, exponent=None)  # subnormal weights
def test_awkward_blocks_of_any_size_equal_the_full_search(seed: int, size: int, exponent: int | None) -> None:
    weight = (awkward(seed).to(torch.float32) * 2.0**size).to(torch.bfloat16)
    assert_equals_full_search(weight, scale_of(weight) if exponent is None else 2.0**exponent)


def test_the_global_scale_lets_the_largest_weight_be_a_seven() -> None:
    assert mse_global_scale(Magnitude(7.0, 7.0, is_int4=False)) == mse_global_scale(Magnitude(1.0, 0.0, is_int4=True))
