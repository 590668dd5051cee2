"""`imatrix` and channel exponents: the exhaustive search in fractions, `mse` for equal importance, scaling."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from channel_makers import exponents_of
from exact_search import E2M1, NORMAL_BYTES, assert_is_best, count_outside_normal, e4m3_value, nearest
from int4_makers import MAKERS, int4_weight, trained_like

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight, bf16_values, scale_bits, scale_fp32
from k2convert.quantize.formats.int4 import Int4Weight, unpack_int4
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, unpack_nibbles
from k2convert.quantize.kernels.cpu import convert
from k2convert.quantize.rules import quantize_best
from k2convert.quantize.rules.search_bf16 import block_importance
from k2convert.quantize.rules.search_int4 import mse_global_scale


def own_scale(weight: Int4Weight) -> float:
    return mse_global_scale(weight.magnitude())


def any_importance(rng: np.random.Generator, columns: int = 256) -> np.ndarray:
    """Columns of every kind: bell-shaped, flat, a single important one, and extremes side by side."""
    kinds = rng.integers(0, 4, columns // 16).repeat(16)
    bell = np.rint(255 * rng.random(columns) ** 4).clip(1)
    single = np.where(np.arange(columns) % 16 == rng.integers(0, 16), 255, 1)
    extremes = rng.choice([1, 255], columns)
    return np.select([kinds == 0, kinds == 1, kinds == 2], [bell, np.full(columns, 7), single], extremes).astype(
        np.uint8
    )


def assert_same(one: Nvfp4Weight, other: Nvfp4Weight) -> None:
    assert np.array_equal(one.packed, other.packed)
    assert np.array_equal(one.block_scales, other.block_scales)


def few_scales(weight: Int4Weight, exponents: np.ndarray | None) -> Int4Weight:
    """The weight with two of its scales, because each takes the oracle a while, and with channel exponents."""
    kept = weight.scale_bits.reshape(-1)[[0, -1]]
    return Int4Weight(weight.packed, np.resize(kept, weight.scale_bits.shape), exponents)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("maker", "rows", "reach"),
    [
        ("trained", 3, 0),
        ("trained", 3, 2),
        ("any-bytes", 2, 4),
        ("few-magnitudes", 6, 0),
        ("few-magnitudes", 4, 3),
        ("single-nonzero", 2, 4),
        ("zeros", 2, 1),
        ("wide-spread", 1, 4),
    ],
)
def test_every_scale_and_code_is_the_best_one(maker: str, rows: int, reach: int) -> None:
    rng = np.random.default_rng(rows + reach)
    weight = few_scales(MAKERS[maker]().rows(0, rows), exponents_of(rng, reach))
    for step in (0, -6, 7):
        importance = any_importance(rng)
        result = quantize_best(weight, own_scale(weight) * 2.0**step, importance)
        assert_is_best(weight, importance.tolist(), result)


def test_mse_with_channel_exponents_is_the_best_one() -> None:
    rng = np.random.default_rng(5)
    for reach in (1, 4):
        scaled = few_scales(trained_like(3, seed=5), exponents_of(rng, reach))
        assert_is_best(scaled, [1] * 256, quantize_best(scaled, own_scale(scaled)))


def test_a_tie_goes_to_the_larger_scale() -> None:
    # Only the column with |q| = 4 counts, so t = 1, 2, 4 and 8 have no error; its exponent moves all of them.
    codes = np.zeros(256, dtype=np.int64)
    codes[::16] = 4
    for exponent, byte in ((0, 0x50), (3, 0x38), (-2, 0x60)):
        weight = replace(int4_weight(codes, np.full(8, 0x3F80)), channel_exponents=np.full(256, exponent, np.int8))
        result = quantize_best(weight, 1.0, np.full(256, 9, dtype=np.uint8))
        assert (result.block_scales == byte).all()
        assert_is_best(weight, [9] * 256, result)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("value", [1, 7, 255])
def test_equal_importance_is_mse(maker: str, value: int) -> None:
    weight = MAKERS[maker]()
    weight = weight.rows(0, min(weight.shape[0], 200))
    for exponents in (None, exponents_of(np.random.default_rng(value), 4)):
        scaled = replace(weight, channel_exponents=exponents)
        g = own_scale(scaled)
        assert_same(quantize_best(scaled, g, np.full(256, value, dtype=np.uint8)), quantize_best(scaled, g))


def test_the_same_exponent_everywhere_is_another_scale() -> None:
    weight = trained_like(16, seed=3)
    for exponent in (-4, 1, 4):
        scaled = replace(weight, channel_exponents=np.full(256, exponent, dtype=np.int8))
        bits = (weight.scale_bits.astype(np.int32) - (exponent << 7)).astype(np.uint16)
        other = Int4Weight(weight.packed, bits)
        assert_same(quantize_best(scaled, own_scale(scaled)), quantize_best(other, own_scale(scaled)))
        assert scaled.magnitude() == other.magnitude()


@pytest.mark.usefixtures("instructions")
def test_blocks_that_want_a_scale_outside_the_normal_range_are_counted() -> None:
    rng = np.random.default_rng(8)
    weight = few_scales(MAKERS["any-bytes"]().rows(0, 1), exponents_of(rng, 2))
    importance = any_importance(rng)
    counted = 0
    for step in (-8, 7):
        g = own_scale(weight) * 2.0**step
        found = convert(weight, rule="imatrix", global_scale=g, importance=importance).outside_normal
        assert found == count_outside_normal(weight, importance.tolist(), Fraction(g))
        counted += found
    assert counted > 0


def test_bf16_weights_get_the_best_scale_by_importance() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((2, 64)) * np.exp2(rng.integers(-6, 1, (2, 64)))
    values[0, :16] = 0
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    weight = Bf16Weight(bits)
    importance = any_importance(rng, 64)
    g = mse_global_scale(weight.magnitude())
    result = quantize_best(weight, g, importance)
    blocks = bf16_values(bits).reshape(-1, 16).tolist()
    nibbles = unpack_nibbles(result.packed).reshape(-1, 16).tolist()
    for index, (block, byte) in enumerate(zip(blocks, result.block_scales.reshape(-1).tolist(), strict=True)):
        factors = importance.reshape(-1, 16)[index % 4].tolist()
        errors = {b: _bf16_error(block, factors, e4m3_value(b) * Fraction(g)) for b in NORMAL_BYTES}
        if not any(block):
            assert byte == 0x38
            continue
        assert errors[byte] <= min(errors.values()) * (1 + Fraction(1, 10**12))
        levels = [v * e4m3_value(byte) * Fraction(g) for v in E2M1]
        assert [n & 7 for n in nibbles[index]] == [nearest(abs(Fraction(w)), levels) for w in block]


def _bf16_error(block: list[float], factors: list[int], step: Fraction) -> Fraction:
    levels = [v * step for v in E2M1]
    return sum(
        m * min((abs(Fraction(w)) - level) ** 2 for level in levels) for w, m in zip(block, factors, strict=True)
    )


def test_equal_importance_is_mse_for_bf16_weights() -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal((64, 128)) * np.exp2(rng.integers(-20, 1, (64, 1)))
    weight = Bf16Weight((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    for step in (0, -7, 6):
        g = mse_global_scale(weight.magnitude()) * 2.0**step
        assert_same(quantize_best(weight, g, np.full(128, 3, dtype=np.uint8)), quantize_best(weight, g))


def test_importance_is_the_share_of_the_blocks_largest_mean_square() -> None:
    mean_square = np.zeros(64, dtype=np.float32)
    mean_square[:16] = [8, 4, 2, 1, 1e-3, 1e-30, 0, 8, 8 * 1.5 / 255, 8 * 3.4 / 255, 7.9, 3, 5, 6, 7, 8]
    mean_square[32:48] = 1e-38
    mean_square[48:] = np.float32(3e38) * np.linspace(0, 1, 16, dtype=np.float32)
    importance = block_importance(mean_square).tolist()
    assert importance[:16] == [255, 128, 64, 32, 1, 1, 1, 255, 2, 3, 252, 96, 159, 191, 223, 255]
    assert importance[16:48] == [255] * 32
    assert importance[48:] == [max(1, 17 * i) for i in range(16)]
    for wrong in (np.float32(-1), np.float32(np.nan), np.float32(np.inf)):
        with pytest.raises(FormatError, match="finite and not negative"):
            block_importance(np.full(16, wrong))


def test_unusable_importance_is_refused() -> None:
    weight = trained_like(1, seed=0)
    for importance in (np.zeros(256, dtype=np.uint8), np.ones(128, dtype=np.uint8), np.ones(256, dtype=np.int64)):
        with pytest.raises(FormatError, match="importance must be"):
            quantize_best(weight, 1.0, importance)


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
        found = scale_bits(bits[exact], np.array(exponent, dtype=np.int8), name="norm")
        assert np.array_equal(found, (rounded.view(np.uint32) >> 16)[exact])
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
    weight = int4_weight(np.ones(256, dtype=np.int64), scale_bits_of)
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
