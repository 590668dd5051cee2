"""INT4 unpacking and dequantisation equal compressed-tensors bit for bit, and bad scales are refused by name."""

from __future__ import annotations

import pytest
import torch
from block_makers import any_codes, bf16_from_bits, int4_weight
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from k2convert.errors import FormatError
from k2convert.quantize.formats.int4 import Int4Weight, check_int4_scales, dequantize_int4, unpack_int4

SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
)


def reference_dequantize(weight: Int4Weight) -> torch.Tensor:
    state = {
        "weight_packed": weight.packed.view(torch.int32),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return PackedQuantizationCompressor.decompress(state, SCHEME)["weight"]


def test_every_code_in_every_position_unpacks_as_compressed_tensors_unpacks_it() -> None:
    codes = torch.stack([torch.arange(-8, 8, dtype=torch.int8).roll(shift).repeat(2) for shift in range(16)])
    weight = int4_weight(codes, torch.ones(16, 1, dtype=torch.bfloat16))
    assert torch.equal(unpack_int4(weight.packed), codes)
    assert torch.equal(unpack_int4(weight.packed), unpack_from_int32(weight.packed.view(torch.int32), 4, codes.shape))


def test_dequantising_equals_compressed_tensors_for_every_scale_and_code() -> None:
    scales = bf16_from_bits(torch.arange(0x7F80))  # every finite BF16 number from zero up, subnormals included
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2).expand(scales.numel(), 32)
    weight = int4_weight(codes, scales.unsqueeze(-1))
    ours, theirs = dequantize_int4(weight), reference_dequantize(weight)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_dequantising_a_random_matrix_equals_compressed_tensors() -> None:
    scales = (torch.rand(24, 8, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    weight = int4_weight(any_codes(24, 256, seed=1), scales)
    assert torch.equal(dequantize_int4(weight), reference_dequantize(weight))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -1e-3, 3e38])
def test_an_unusable_scale_is_refused_naming_the_tensor_and_the_place(bad: float) -> None:
    scales = torch.full((4, 3), 0.01, dtype=torch.bfloat16)
    scales[2, 1] = bad
    with pytest.raises(FormatError, match=r"layers\.7\.up_proj.*\[2, 1\].*1 of 12"):
        check_int4_scales(scales, name="layers.7.up_proj.weight_scale")


def test_zero_subnormal_and_largest_usable_scales_pass() -> None:
    scales = torch.tensor([[0.0, -0.0, 2.0**-133, 2.0**-126, 4.2e37]], dtype=torch.bfloat16)
    check_int4_scales(scales, name="w")


@pytest.mark.parametrize(
    ("packed", "scales"),
    [
        (torch.zeros(2, 16, dtype=torch.int32), torch.ones(2, 1, dtype=torch.bfloat16)),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1)),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 2, dtype=torch.bfloat16)),
        (torch.zeros(2, 12, dtype=torch.uint8), torch.ones(2, 1, dtype=torch.bfloat16)),
        (torch.zeros(16, dtype=torch.uint8), torch.ones(1, dtype=torch.bfloat16)),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(packed: torch.Tensor, scales: torch.Tensor) -> None:
    with pytest.raises(FormatError):
        Int4Weight(packed=packed, scales=scales)
