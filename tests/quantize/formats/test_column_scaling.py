"""Columns are multiplied and divided by powers of two exactly, or the tensor is refused by name."""

import numpy as np
import pytest
from weight_makers import MAKERS, exponents_of, int4_from_bits, some_rows, trained_like

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight, bf16_values, scale_bits, scale_fp32
from k2convert.quantize.formats.int4 import Int4Weight, unpack_int4
from k2convert.quantize.kernels.cpu import convert, measure_magnitude
from k2convert.quantize.rules.mse import mse_global_scale


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("maker", MAKERS)
def test_a_divided_int4_weight_is_converted_as_the_bf16_weight_that_it_rounds_to(maker: str) -> None:
    weight = some_rows(maker, exponents_of(np.random.default_rng(1), 4))
    rounded = Bf16Weight(weight.bits)
    magnitude = measure_magnitude(weight, name="w")
    assert magnitude.amax == rounded.magnitude().amax
    for rule, scale in (("max", max(magnitude.amax, 1e-30) / 2688), ("mse", mse_global_scale(magnitude))):
        of_int4, of_bf16 = (convert(w, rule=rule, global_scale=float(np.float32(scale))) for w in (weight, rounded))
        assert np.array_equal(of_int4.weight.packed, of_bf16.weight.packed)
        assert np.array_equal(of_int4.weight.block_scales, of_bf16.weight.block_scales)


def test_the_same_exponent_everywhere_is_another_scale() -> None:
    weight = trained_like(16, seed=3)
    for exponent in (-4, 1, 4):
        scaled = weight.divide_columns(np.full(256, exponent, dtype=np.int8), name="w")
        bits = (weight.scale_bits.astype(np.int32) - (exponent << 7)).astype(np.uint16)
        assert scaled.magnitude() == Int4Weight(weight.packed, bits).magnitude()


def test_dividing_columns_is_exact() -> None:
    rng = np.random.default_rng(3)
    weight = trained_like(4, seed=4)
    exponents = exponents_of(rng, 4)
    scaled = weight.divide_columns(exponents, name="w")
    assert isinstance(scaled, Int4Weight)
    expected = bf16_values(weight.bits) / np.exp2(exponents.astype(np.float32))
    assert np.array_equal(bf16_values(scaled.bits), expected)
    as_bf16 = Bf16Weight(weight.bits).divide_columns(exponents, name="w")
    assert isinstance(as_bf16, Bf16Weight)
    assert np.array_equal(bf16_values(as_bf16.bits), expected)
    assert np.array_equal(unpack_int4(scaled.packed), unpack_int4(weight.packed))
    back = scaled.divide_columns(-exponents, name="w")
    assert isinstance(back, Int4Weight)
    assert back.channel_exponents is None
    assert weight.divide_columns(np.zeros(256, dtype=np.int8), name="w").channel_exponents is None


def test_scaling_every_bf16_number_is_exact_or_refused() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bf16_values(bits).astype(np.float64)
    for exponent in (-4, -1, 0, 3, 4):
        wanted = values * 2.0**exponent
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = wanted.astype(np.float32)
        exact = np.isfinite(wanted) & (rounded == wanted) & (rounded.view(np.uint32) & 0xFFFF == 0)
        scaled = scale_bits(bits[exact], np.array(exponent, dtype=np.int8), name="norm")
        assert np.array_equal(scaled, (rounded.view(np.uint32) >> 16)[exact])
        for refused in bits[~exact][:: max(1, int((~exact).sum()) // 20)]:
            with pytest.raises(FormatError, match="norm: 1 of 1 numbers"):
                scale_bits(np.array([refused]), np.array([exponent], dtype=np.int8), name="norm")


def test_scaling_fp32_numbers_is_exact_or_refused() -> None:
    values = np.array([[1.5, -3e-30, 0.0], [2.0**127, 1.0, 1.0]], dtype=np.float32)
    scaled = scale_fp32(values, np.array([-1, 4, 2], dtype=np.int8), name="router")
    assert np.array_equal(scaled, values * np.array([0.5, 16, 4], dtype=np.float32))
    for value, exponent in ((2.0**127, 1), (2.0**-126 + 2.0**-149, -1), (np.inf, 1), (np.nan, 0)):
        with pytest.raises(FormatError, match="router"):
            scale_fp32(np.array([value], dtype=np.float32), np.array([exponent], dtype=np.int8), name="router")


@pytest.mark.parametrize(("bits", "exponent"), [(0x7D80, -1), (0x0001, 1), (0x7D80, -4), (0x00C3, 3)])
def test_an_int4_scale_that_cannot_be_divided_is_refused(bits: int, exponent: int) -> None:
    scale_bits_of = np.full(8, 0x3C00)
    scale_bits_of[3] = bits
    weight = int4_from_bits(np.ones(256, dtype=np.int64), scale_bits_of)
    exponents = np.zeros(256, dtype=np.int8)
    exponents[3 * 32 + 5] = exponent
    with pytest.raises(FormatError, match=r"experts\.3\.up_proj"):
        weight.divide_columns(exponents, name="experts.3.up_proj")
    exponents[:] = 0
    exponents[5] = exponent
    assert isinstance(weight.divide_columns(exponents, name="w"), Int4Weight)


def test_exponents_that_do_not_fit_are_refused() -> None:
    weight = trained_like(1, seed=0)
    for exponents in (np.ones(255, dtype=np.int8), np.ones(256, dtype=np.int64), np.full(256, 5, dtype=np.int8)):
        with pytest.raises(FormatError, match="channel exponents must be"):
            weight.divide_columns(exponents, name="w")
