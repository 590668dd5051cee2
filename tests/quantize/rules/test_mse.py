"""`mse` is mse: it equals an exhaustive search in fractions, and both libraries decode it exactly."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from exact_search import assert_is_best, count_outside_normal
from hypothesis import example, given, settings
from hypothesis import strategies as st
from library_decoders import create_decoder
from weight_makers import any_codes, bf16_from_bits, blocks_of, codes_of, int4_weight, scales_of, trained_like

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Magnitude
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.quantize.kernels.cpu import convert, measure_magnitude
from k2convert.quantize.rules import quantize_best
from k2convert.quantize.rules.search_int4 import mse_global_scale


def exact_weight(weight: Int4Weight) -> torch.Tensor:
    """q * s in float64: at most eleven bits, so exact."""
    rows, columns = weight.shape
    groups = codes_of(weight).view(rows, -1, 32).to(torch.float64)
    return (groups * scales_of(weight).to(torch.float64).unsqueeze(-1)).view(rows, columns)


def decode(result: Nvfp4Weight) -> torch.Tensor:
    return torch.from_numpy(dequantize_nvfp4(result))


def own_scale(weight: Int4Weight) -> float:
    return mse_global_scale(weight.magnitude())


def single_elements_and_uniform_blocks(mantissa: int) -> Int4Weight:
    codes = torch.zeros(16, 32, dtype=torch.int8)
    codes[:, 5] = torch.arange(-8, 8)
    codes[:, 16:] = torch.arange(-8, 8).unsqueeze(-1)
    return int4_weight(codes, torch.full((16, 1), mantissa * 2.0**-13, dtype=torch.bfloat16))


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
    assert_is_best(weight, quantize_best(weight, own_scale(weight)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.lists(st.integers(0, 0x7C00), min_size=2, max_size=2),
    exponent=st.none() | st.integers(-126, 120),
)
@example(seed=4, bits=[1, 0x7F], exponent=None)  # subnormal scales
@example(seed=4, bits=[0x3C2A, 0x3C80], exponent=-7)
def test_any_scales_under_any_global_scale_equal_the_exhaustive_search(
    seed: int, bits: list[int], exponent: int | None
) -> None:
    weight = int4_weight(any_codes(2, 32 * 4, seed=seed), bf16_from_bits(torch.tensor(bits * 4)).reshape(2, 4))
    global_scale = own_scale(weight) if exponent is None else 2.0**exponent
    result = quantize_best(weight, global_scale)
    assert result.global_scale == global_scale
    assert_is_best(weight, result)


def test_a_zero_scale_and_zero_codes_both_give_an_empty_block() -> None:
    scales = torch.tensor([[0.0, 0.01], [-0.0, 0.01]], dtype=torch.bfloat16)
    codes = any_codes(2, 64, seed=6)
    codes[:, 32:48] = 0
    result = quantize_best(int4_weight(codes, scales), 2.0**-10)
    assert (result.block_scales[:, :3] == 0x38).all()
    assert not result.packed[:, :24].any()


def test_blocks_without_five_and_seven_are_kept_exactly_if_the_scale_allows() -> None:
    kept = torch.tensor([0, 1, -1, 2, -2, 3, -3, 4, -4, 6, -6, -8], dtype=torch.int8)
    pick = torch.randint(0, len(kept), (64, 128), generator=torch.Generator().manual_seed(9))
    mantissas = 16 * torch.randint(8, 16, (64, 4), generator=torch.Generator().manual_seed(10))
    weight = int4_weight(kept[pick], (mantissas * 2.0**-15).to(torch.bfloat16))
    assert torch.equal(decode(quantize_best(weight, own_scale(weight))), exact_weight(weight))


@pytest.mark.parametrize("odd", [5, 7])
def test_a_five_or_seven_with_another_magnitude_is_never_kept(odd: int) -> None:
    rows = [[odd, other] + [0] * 14 for other in (1, 2, 3, 4, 5, 6, 7, -8) if abs(other) != odd]
    codes = torch.tensor(rows, dtype=torch.int8).repeat(128, 2)
    mantissas = torch.arange(128, 256).repeat_interleave(len(rows)).unsqueeze(-1)
    weight = int4_weight(codes, (mantissas * 2.0**-15).to(torch.bfloat16))
    differs = exact_weight(weight) != decode(quantize_best(weight, own_scale(weight)))
    assert blocks_of(differs).any(dim=-1).all()


def test_both_libraries_decode_exactly_v_times_b_times_g() -> None:
    weight = int4_weight(any_codes(48, 512, seed=11), (torch.rand(48, 16) * 0.1).to(torch.bfloat16))
    result = quantize_best(weight, own_scale(weight))
    exact = decode(result)
    for layout, stored in (("modelopt", result.global_scale), ("compressed-tensors", 1 / result.global_scale)):
        decoded = create_decoder(layout)(result.packed, result.block_scales, stored)
        assert torch.equal(decoded.to(torch.float64), exact)


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
        quantize_best(trained_like(1, 32, seed=0), 0.75)


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
def test_the_global_scale_depends_on_the_scales_and_not_on_the_codes(
    largest: int, exponents: tuple[int, ...] | None
) -> None:
    codes = torch.full((8, 96), largest, dtype=torch.int8)
    weight = int4_weight(codes, torch.full((8, 3), 1.3 * 2.0**-7, dtype=torch.bfloat16))
    scale_max = float(weight.scales.max())
    if exponents is not None:
        weight = weight.divide_columns(np.repeat(np.array(exponents, dtype=np.int8), 32), name="w")
        scale_max *= 2.0 ** -min(exponents)
    expected = mse_global_scale(Magnitude(scale_max, 0.0, is_int4=True))
    for magnitude in (weight.magnitude(), measure_magnitude(weight, name="w")):
        assert mse_global_scale(magnitude) == expected
