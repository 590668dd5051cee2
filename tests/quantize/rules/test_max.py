"""`max` is ModelOpt's NVFP4 quantization, byte for byte, except where ModelOpt writes NaN."""

import numpy as np
import pytest
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from weight_makers import any_codes, bf16_from_bits, bf16_tensor, bf16_weight, int4_weight, trained_like

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight, Magnitude, SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import unpack_nibbles
from k2convert.quantize.rules.max import max_global_scale, quantize_max


def assert_equals_modelopt(weight: SourceWeight, magnitude: Magnitude) -> None:
    bf16 = bf16_tensor(Bf16Weight(weight.bits))
    scale_2 = torch.tensor(magnitude.amax) / (6 * 448.0)
    quantized, block_scales, _ = NVFP4QTensor.quantize(bf16, 16, weights_scaling_factor_2=scale_2)
    ours = quantize_max(weight, max_global_scale(magnitude))
    assert ours.global_scale == float(scale_2)
    assert np.array_equal(ours.block_scales, block_scales.view(torch.uint8).numpy())
    assert np.array_equal(ours.packed, quantized._quantized_data.numpy())


def awkward() -> Int4Weight:
    bits = torch.randint(1, 0x7C00, (96, 8), generator=torch.Generator().manual_seed(2))
    return int4_weight(any_codes(96, 256, seed=2), bf16_from_bits(bits))


# The second weight is more than one chunk.
@pytest.mark.parametrize("weight", [trained_like(64, 2048, seed=0), trained_like(1200, 1024, seed=1), awkward()])
def test_int4_weights_equal_modelopt(weight: Int4Weight) -> None:
    assert_equals_modelopt(weight, weight.magnitude())
    larger = Magnitude(scale_max=1.0, amax=5.0, is_int4=True)
    shared = weight.magnitude().merge(larger)
    assert shared.amax == max(weight.magnitude().amax, 5.0)
    assert_equals_modelopt(weight, shared)


@pytest.mark.parametrize("exponent", [-133, -126, -60, 0, 100])
def test_bf16_weights_of_any_size_equal_modelopt(exponent: int) -> None:
    weight = (torch.randn(32, 256, generator=torch.Generator().manual_seed(4)) * 2.0**exponent).to(torch.bfloat16)
    weight[3] = 0
    weight[5, :16] *= 2.0**-20
    source = bf16_weight(weight)
    assert_equals_modelopt(source, source.magnitude())


def test_the_sign_of_a_negative_that_rounds_to_zero_stays() -> None:
    weight = torch.full((1, 16), 6.0, dtype=torch.bfloat16)
    weight[0, 1], weight[0, 2] = -0.1, -0.0
    nibbles = unpack_nibbles(quantize_max(bf16_weight(weight), 1.0).packed)
    assert nibbles[0, :3].tolist() == [0x7, 0x8, 0x0]


def test_a_block_of_zeros_gets_scale_one_and_zero_codes() -> None:
    weight = torch.zeros(1, 32, dtype=torch.bfloat16)
    weight[0, 0] = 1.0
    source = bf16_weight(weight)
    result = quantize_max(source, max_global_scale(source.magnitude()))
    assert result.block_scales[0, 1] == 0x38
    assert not result.packed[0, 8:].any()


@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_a_tensor_of_zeros_is_finite_where_modelopt_writes_nan(scale: float) -> None:
    weight = int4_weight(torch.zeros(4, 64, dtype=torch.int8), torch.full((4, 2), scale, dtype=torch.bfloat16))
    magnitude = weight.magnitude()
    assert magnitude.amax == 0.0
    result = quantize_max(weight, max_global_scale(magnitude))
    assert result.global_scale == 1.0
    assert (result.block_scales == 0x38).all()
    assert not result.packed.any()


def test_measuring_gives_the_largest_scale_and_the_largest_rounded_weight() -> None:
    weight = int4_weight(any_codes(64, 128, seed=5), torch.rand(64, 4).to(torch.bfloat16))
    magnitude = weight.magnitude()
    assert magnitude.amax == float(bf16_tensor(Bf16Weight(weight.bits)).abs().max())
    assert magnitude.scale_max == float(weight.scales.max())


def test_a_damaged_bf16_weight_is_refused_by_name() -> None:
    weight = torch.ones(2, 16, dtype=torch.bfloat16)
    weight[1, 3] = float("nan")
    with pytest.raises(FormatError, match="shared_experts"):
        bf16_weight(weight).magnitude(name="model.layers.1.mlp.shared_experts.up_proj.weight")
    with pytest.raises(FormatError, match=r"uint16.*float32"):
        Bf16Weight(np.ones((2, 16), dtype=np.float32))  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"multiple of 16.*\[2, 24\]"):
        Bf16Weight(np.ones((2, 24), dtype=np.uint16))
