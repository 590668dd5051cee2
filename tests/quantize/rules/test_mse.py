"""`mse` is mse: it equals an exhaustive search in fractions, and both libraries decode it exactly."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from block_makers import any_codes, bf16_from_bits, blocks_of, codes_of, int4_weight, scales_of, trained_like
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from exact_search import exact_search
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from k2convert.errors import FormatError
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4, unpack_nibbles
from k2convert.quantize.kernels.cpu import convert
from k2convert.quantize.rules.max import Magnitude, measure
from k2convert.quantize.rules.mse import mse_global_scale, quantize_mse


def exact_weight(weight: Int4Weight) -> torch.Tensor:
    """q * s in float64: at most eleven bits, so exact."""
    rows, columns = weight.shape
    groups = codes_of(weight).view(rows, -1, 32).to(torch.float64)
    return (groups * scales_of(weight).to(torch.float64).unsqueeze(-1)).view(rows, columns)


def decode(result: Nvfp4Weight) -> torch.Tensor:
    return torch.from_numpy(dequantize_nvfp4(result))


def block_errors(weight: Int4Weight, result: Nvfp4Weight) -> torch.Tensor:
    return blocks_of((exact_weight(weight) - decode(result)) ** 2).sum(dim=-1)


def own_scale(weight: Int4Weight) -> float:
    return mse_global_scale(measure(weight), is_int4=True)


def assert_equals_exhaustive_search(weight: Int4Weight, global_scale: float) -> None:
    """Every byte and every nibble is what the search in fractions gives; the error difference is exactly zero."""
    result = quantize_mse(weight, global_scale)
    codes = blocks_of(codes_of(weight)).tolist()
    nibbles = unpack_nibbles(result.packed).reshape(-1, 16).tolist()
    scales = scales_of(weight).repeat_interleave(2, dim=-1).flatten().to(torch.float64).tolist()
    searches = {scale: exact_search(Fraction(scale), Fraction(global_scale)) for scale in set(scales)}
    for scale, block, written, byte in zip(
        scales, codes, nibbles, result.block_scales.reshape(-1).tolist(), strict=True
    ):
        search, magnitudes = searches[scale], [abs(q) for q in block]
        best = search.best(magnitudes) if scale else 0x38
        assert search.error(magnitudes, byte) - search.error(magnitudes, best) == Fraction(0)
        assert byte == best, (scale, block)
        signed = [search.codes[byte][abs(q)] | (8 if q < 0 and search.codes[byte][abs(q)] else 0) for q in block]
        assert written == (signed if scale else [0] * 16)


def test_trained_like_blocks_equal_the_exhaustive_search() -> None:
    weight = trained_like(16, 256, seed=0)
    assert_equals_exhaustive_search(weight, own_scale(weight))


def test_awkward_blocks_equal_the_exhaustive_search() -> None:
    scales = (torch.rand(60, 1, generator=torch.Generator().manual_seed(1)) * 0.05).to(torch.bfloat16)
    weight = int4_weight(any_codes(60, 384, seed=1), scales.expand(60, 12).contiguous())
    assert_equals_exhaustive_search(weight, own_scale(weight))


@pytest.mark.parametrize("mantissa", [128, 129, 144, 160, 170, 191, 192, 224, 240, 255])
def test_chosen_mantissas_equal_the_exhaustive_search(mantissa: int) -> None:
    scales = torch.full((8, 4), mantissa * 2.0**-14, dtype=torch.bfloat16)
    weight = int4_weight(any_codes(8, 128, seed=mantissa), scales)
    assert_equals_exhaustive_search(weight, own_scale(weight))


def test_scales_of_every_size_with_one_large_one_equal_the_exhaustive_search() -> None:
    exponents = torch.arange(0, -48, -2, dtype=torch.float64)
    scales = (170 * torch.exp2(exponents)).to(torch.bfloat16).unsqueeze(-1)
    weight = int4_weight(any_codes(24, 32, seed=3), scales)
    assert_equals_exhaustive_search(weight, own_scale(weight))


@pytest.mark.parametrize("exponent", [-126, -40, -16, -12, -10, -8, -7, -6, -4, 0, 4, 10, 100])
def test_any_power_of_two_as_global_scale_equals_the_exhaustive_search(exponent: int) -> None:
    scales = torch.tensor([[0.0101], [0.0202], [0.0156]], dtype=torch.bfloat16)
    weight = int4_weight(any_codes(3, 32 * 6, seed=4), scales.expand(3, 6).contiguous())
    assert_equals_exhaustive_search(weight, 2.0**exponent)


@pytest.mark.parametrize("bits", [1, 2, 3, 0x55, 0x7F, 0x80, 0xFF])
def test_subnormal_scales_equal_the_exhaustive_search(bits: int) -> None:
    weight = int4_weight(any_codes(2, 96, seed=bits), bf16_from_bits(torch.full((2, 3), bits)))
    assert own_scale(weight) == 2.0**-126
    assert_equals_exhaustive_search(weight, 2.0**-126)


def test_every_single_element_and_every_uniform_block_equals_the_exhaustive_search() -> None:
    single = torch.zeros(16, 32, dtype=torch.int8)
    single[:, 5] = torch.arange(-8, 8)
    single[:, 16:] = torch.arange(-8, 8).unsqueeze(-1)
    for mantissa in (128, 147, 208):
        weight = int4_weight(single, torch.full((16, 1), mantissa * 2.0**-13, dtype=torch.bfloat16))
        assert_equals_exhaustive_search(weight, own_scale(weight))


def test_a_zero_scale_and_zero_codes_both_give_an_empty_block() -> None:
    scales = torch.tensor([[0.0, 0.01], [-0.0, 0.01]], dtype=torch.bfloat16)
    codes = any_codes(2, 64, seed=6)
    codes[:, 32:48] = 0
    result = quantize_mse(int4_weight(codes, scales), 2.0**-10)
    assert (result.block_scales[:, :3] == 0x38).all()
    assert not result.packed[:, :24].any()


def test_blocks_without_five_and_seven_are_kept_exactly_if_the_scale_allows() -> None:
    kept = torch.tensor([0, 1, -1, 2, -2, 3, -3, 4, -4, 6, -6, -8], dtype=torch.int8)
    pick = torch.randint(0, len(kept), (64, 128), generator=torch.Generator().manual_seed(9))
    mantissas = 16 * torch.randint(8, 16, (64, 4), generator=torch.Generator().manual_seed(10))
    weight = int4_weight(kept[pick], (mantissas * 2.0**-15).to(torch.bfloat16))
    assert torch.equal(decode(quantize_mse(weight, own_scale(weight))), exact_weight(weight))


@pytest.mark.parametrize("odd", [5, 7])
def test_a_five_or_seven_with_another_magnitude_is_never_kept(odd: int) -> None:
    rows = [[odd, other] + [0] * 14 for other in (1, 2, 3, 4, 5, 6, 7, -8) if abs(other) != odd]
    codes = torch.tensor(rows, dtype=torch.int8).repeat(128, 2)
    mantissas = torch.arange(128, 256).repeat_interleave(len(rows)).unsqueeze(-1)
    weight = int4_weight(codes, (mantissas * 2.0**-15).to(torch.bfloat16))
    assert (block_errors(weight, quantize_mse(weight, own_scale(weight))) > 0).all()


def test_both_libraries_decode_exactly_v_times_b_times_g() -> None:
    weight = int4_weight(any_codes(48, 512, seed=11), (torch.rand(48, 16) * 0.1).to(torch.bfloat16))
    result = quantize_mse(weight, own_scale(weight))
    exact, packed = decode(result), torch.from_numpy(result.packed)
    block_scales = torch.from_numpy(result.block_scales).view(torch.float8_e4m3fn)
    modelopt = NVFP4QTensor(torch.Size(result.shape), torch.float32, packed).dequantize(
        torch.float32, scale=block_scales, double_scale=torch.tensor(result.global_scale), block_sizes={-1: 16}
    )
    assert torch.equal(modelopt.to(torch.float64), exact)
    weights = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    state = {
        "weight_packed": packed,
        "weight_scale": block_scales,
        "weight_global_scale": torch.tensor([1 / result.global_scale]),
    }
    decoded = NVFP4PackedCompressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=weights))
    assert torch.equal(decoded["weight"].to(torch.float64), exact)


def test_the_global_scale_is_the_least_power_of_two_that_reaches_two_point_six() -> None:
    for bits in range(0x0001, 0x7E00, 7):
        scale_max = float(bf16_from_bits(torch.tensor([bits]))[0])
        g = Fraction(mse_global_scale(Magnitude(scale_max, 0.0), is_int4=True))
        needed = Fraction(26, 10) * Fraction(scale_max) / 448
        assert g >= needed
        assert g / 2 < needed or g == Fraction(2) ** -126


def test_the_global_scale_is_exact_at_its_steps() -> None:
    # 2.6 * s / 448 is not a power of two for any BF16 number s, so each step has neighbors on both of its sides.
    for exponent in range(-100, 100):
        edge = Fraction(2) ** exponent * 448 / Fraction(26, 10)
        below = torch.tensor(float(edge), dtype=torch.float64).to(torch.bfloat16)
        bits = int(below.view(torch.int16))
        neighbors = [float(bf16_from_bits(torch.tensor([bits + step]))[0]) for step in (-1, 0, 1)]
        for scale_max in neighbors:
            expected = exponent if Fraction(scale_max) <= edge else exponent + 1
            assert mse_global_scale(Magnitude(scale_max, 0.0), is_int4=True) == 2.0**expected


def test_a_set_of_zero_scales_gets_global_scale_one() -> None:
    assert mse_global_scale(Magnitude(0.0, 0.0), is_int4=True) == 1.0
    assert mse_global_scale(Magnitude(0.0, 0.0), is_int4=False) == 1.0


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
        assert counted == count_by_exhaustive_search(weight, g) > 0
    ordinary = trained_like(64, 256, seed=1)
    assert convert(ordinary, rule="mse", global_scale=own_scale(ordinary)).outside_normal == 0


def count_by_exhaustive_search(weight: Int4Weight, global_scale: float) -> int:
    """Count blocks that do strictly better when g is free by any power of two, which frees the exponent of b."""
    count = 0
    scales = scales_of(weight).repeat_interleave(2, dim=-1).flatten().to(torch.float64).tolist()
    for scale, block in zip(scales, blocks_of(codes_of(weight)).tolist(), strict=True):
        magnitudes = [abs(q) for q in block]
        if any(magnitudes):
            own = exact_search(Fraction(scale), Fraction(global_scale))
            # With this g the normal scales reach from t = 2**-10 to t = 56; no scale outside that range can be best.
            free = exact_search(Fraction(scale), Fraction(2) ** (math.frexp(scale)[1] - 4))
            least = [min(search.error(magnitudes, byte) for byte in search.errors) for search in (own, free)]
            count += least[1] < least[0]
    return count
