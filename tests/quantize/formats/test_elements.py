"""E2M1, E4M3 and BF16 equal their definitions, torch and the libraries' own encoders."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from exact_search import E2M1, e4m3_value, nearest
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from weight_makers import bf16_from_bits, codes_of, int4_weight, scales_of

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import bf16_bits, bf16_values, round_to_bf16
from k2convert.quantize.formats.int4 import Int4Weight, check_int4_scales, unpack_int4
from k2convert.quantize.formats.nvfp4 import (
    DOUBLED_VALUES,
    QUADRUPLED_MIDPOINTS,
    check_global_scale,
    decode_e2m1,
    decode_e4m3,
    encode_e4m3,
    nearest_code,
    pack_nibbles,
    unpack_nibbles,
)

ALL_BYTES = np.arange(256, dtype=np.uint8)
UNIT = np.float32(1)


def test_the_value_tables_say_what_the_format_says() -> None:
    assert [Fraction(value, 2) for value in DOUBLED_VALUES] == list(E2M1)
    midpoints = [(low + high) / 2 for low, high in pairwise(E2M1)]
    assert [Fraction(value, 4) for value in QUADRUPLED_MIDPOINTS] == midpoints


def test_ties_go_to_the_even_code_and_large_values_saturate() -> None:
    values = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e30], dtype=np.float32)
    assert nearest_code(values, UNIT).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 7]


def test_rounding_equals_modelopt_on_a_dense_grid() -> None:
    values = torch.linspace(-7, 7, 28_001)
    theirs = NVFP4QTensor._cast_fp4(values.clone()).numpy()
    ours = nearest_code(np.abs(values.numpy()), UNIT) | ((values.numpy() < 0).astype(np.uint8) << 3)
    assert np.array_equal(ours, theirs)


def test_rounding_a_ratio_of_integers_is_exact() -> None:
    for step in (8, 9, 11, 15):
        numerators = np.arange(0, 8 * step)
        expected = [nearest(n, [v * step for v in E2M1]) for n in numerators.tolist()]
        assert nearest_code(numerators, step).tolist() == expected


def test_every_byte_decodes_as_both_libraries_decode_it() -> None:
    decoded = decode_e2m1(unpack_nibbles(ALL_BYTES.reshape(16, 16)))
    theirs = unpack_fp4_from_uint8(torch.from_numpy(ALL_BYTES).view(16, 16), 16, 32, torch.float64).numpy()
    assert np.array_equal(decoded, theirs)
    assert np.array_equal(np.signbit(decoded), np.signbit(theirs))
    assert decoded.reshape(-1)[:2].tolist() == [0.0, 0.0]
    nibbles = torch.from_numpy(unpack_nibbles(ALL_BYTES)).long()
    modelopt = NVFP4QTensor.get_e2m1_values(torch.device("cpu"))[nibbles]
    assert np.array_equal(decoded.reshape(-1), modelopt.to(torch.float64).numpy())


def test_packing_inverts_unpacking_and_equals_compressed_tensors() -> None:
    table = ALL_BYTES.reshape(16, 16)
    nibbles = unpack_nibbles(table)
    assert np.array_equal(pack_nibbles(nibbles), table)
    values = torch.from_numpy(decode_e2m1(nibbles)).to(torch.bfloat16)
    assert np.array_equal(pack_fp4_to_uint8(values).numpy(), table)


def test_every_scale_byte_decodes_to_its_definition_and_as_torch_decodes_it() -> None:
    decoded = decode_e4m3(ALL_BYTES)
    assert [Fraction(value) for value in decoded[:0x7F].tolist()] == [e4m3_value(byte) for byte in range(0x7F)]
    theirs = torch.from_numpy(ALL_BYTES).view(torch.float8_e4m3fn).to(torch.float64).numpy()
    assert np.array_equal(decoded, theirs, equal_nan=True)


def test_scales_round_to_the_nearest_byte_ties_to_even_as_torch_rounds_them() -> None:
    grid = [float(e4m3_value(byte)) for byte in range(0x7F)]
    middles = [(low + high) / 2 for low, high in pairwise(grid)]
    assert encode_e4m3(np.array(grid, dtype=np.float32)).tolist() == list(range(0x7F))
    assert encode_e4m3(np.array(middles, dtype=np.float32)).tolist() == [byte + byte % 2 for byte in range(0x7E)]
    bits = np.arange(0, np.float32(448).view(np.uint32) + 1, 997, dtype=np.uint32)
    near_ties = (np.arange(0x7E, dtype=np.uint32) + 960 << 20) + np.uint32(1 << 19)
    values = np.concatenate([bits, near_ties, near_ties - 1, near_ties + 1]).view(np.float32)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(encode_e4m3(values), theirs)


def test_all_bf16_patterns_have_torchs_values() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    theirs = torch.from_numpy(bits).view(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(bf16_values(bits).view(np.uint32), theirs.view(np.uint32))
    usable = ~np.isnan(theirs)
    assert np.array_equal(bf16_bits(theirs)[usable], bits[usable])


def test_float32_rounds_to_bf16_as_torch_rounds_it() -> None:
    """Numbers of every exponent: every 997th pattern, and around every tie of BF16 some on both sides."""
    spread = np.arange(0, 1 << 32, 997, dtype=np.uint64).astype(np.uint32)
    ties = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000
    values = np.concatenate([spread, ties, ties - 1, ties + 1, ties - 0x8000]).view(np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    is_nan = np.isnan(values)
    assert np.array_equal(bf16_bits(values)[~is_nan], theirs[~is_nan])
    assert np.isnan(round_to_bf16(values[is_nan])).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_global_scale_is_positive_and_finite(scale: float) -> None:
    with pytest.raises(FormatError, match=f"must be a positive finite number, not {scale!r}"):
        check_global_scale(scale)


@pytest.mark.parametrize(
    ("scale", "nearest"),
    [(0.00014277867012424394, "0.00014277867740020156"), (1e300, "inf"), (1e-60, "0.0"), (0.1, "0.10000000149011612")],
)
def test_a_global_scale_that_fp32_does_not_have_is_named_with_the_nearest(scale: float, nearest: str) -> None:
    with pytest.raises(FormatError) as raised:
        check_global_scale(scale)
    assert str(raised.value) == (
        f"the global scale {scale!r} is not exactly representable in FP32 (nearest: {nearest}). "
        "Round it: float(numpy.float32(scale))."
    )
    if 0.0 < float(nearest) < float("inf"):
        check_global_scale(float(nearest))


SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
)


def reference_dequantize(weight: Int4Weight) -> torch.Tensor:
    state = {
        "weight_packed": torch.from_numpy(weight.packed).view(torch.int32),
        "weight_scale": scales_of(weight),
        "weight_shape": torch.tensor(weight.shape),
    }
    return PackedQuantizationCompressor.decompress(state, SCHEME)["weight"]


def test_every_code_in_every_position_unpacks_as_compressed_tensors_unpacks_it() -> None:
    codes = torch.stack([torch.arange(-8, 8, dtype=torch.int8).roll(shift).repeat(2) for shift in range(16)])
    weight = int4_weight(codes, torch.ones(16, 1, dtype=torch.bfloat16))
    assert np.array_equal(unpack_int4(weight.packed), codes.numpy())
    assert np.array_equal(unpack_int4(weight.packed), codes_of(weight).numpy())


def test_dequantizing_equals_compressed_tensors_for_every_scale_and_code() -> None:
    scales = bf16_from_bits(torch.arange(0x7F80))  # every finite BF16 number from zero up, subnormals included
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2).expand(scales.numel(), 32)
    weight = int4_weight(codes, scales.unsqueeze(-1))
    theirs = reference_dequantize(weight)
    assert theirs.dtype == torch.bfloat16
    assert np.array_equal(weight.bits, theirs.view(torch.uint16).numpy())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -1e-3, 3e38])
def test_an_unusable_scale_is_refused_naming_the_tensor_and_the_place(bad: float) -> None:
    scales = torch.full((4, 3), 0.01, dtype=torch.bfloat16)
    scales[2, 1] = bad
    with pytest.raises(FormatError, match=r"layers\.7\.up_proj.*\[2, 1\].*1 of 12"):
        check_int4_scales(scales.view(torch.uint16).numpy(), name="layers.7.up_proj.weight_scale")


def test_zero_subnormal_and_largest_usable_scales_pass() -> None:
    scales = torch.tensor([[0.0, -0.0, 2.0**-133, 2.0**-126, 4.2e37]], dtype=torch.bfloat16)
    check_int4_scales(scales.view(torch.uint16).numpy(), name="w")


@pytest.mark.parametrize(
    ("packed", "scale_bits"),
    [
        (np.zeros((2, 16), dtype=np.int32), np.ones((2, 1), dtype=np.uint16)),
        (np.zeros((2, 16), dtype=np.uint8), np.ones((2, 1), dtype=np.float32)),
        (np.zeros((2, 16), dtype=np.uint8), np.ones((2, 2), dtype=np.uint16)),
        (np.zeros((2, 12), dtype=np.uint8), np.ones((2, 1), dtype=np.uint16)),
        (np.zeros(16, dtype=np.uint8), np.ones(1, dtype=np.uint16)),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(packed: np.ndarray, scale_bits: np.ndarray) -> None:
    with pytest.raises(FormatError):
        Int4Weight(packed=packed, scale_bits=scale_bits)
