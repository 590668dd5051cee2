"""INT4 unpacking and dequantization equal compressed-tensors bit for bit, and bad scales are refused by name."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from weight_makers import bf16_from_bits, codes_of, int4_weight, scales_of

from k2convert.errors import FormatError
from k2convert.quantize.formats.int4 import Int4Weight, check_int4_scales, unpack_int4

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
