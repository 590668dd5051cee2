"""FP4 activations equal two other implementations, and behave like the kernels at the edges of the range."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from k2convert.forward.moe import quantize_activations, round_to_e2m1

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def activations(seed: int = 0, spread: float = 1.0) -> Tensor:
    """FP32 [64, 512] with outlier channels."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.exp(spread * torch.randn(512, generator=generator))
    return torch.randn(64, 512, generator=generator) * channels


@pytest.mark.parametrize("input_scale", [1.0, 2.0**-7, 0.003])
def test_equals_compressed_tensors(input_scale: float) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, dynamic="local",
        scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    x = activations()
    divisor = torch.tensor([1.0 / input_scale])
    scale, zero = helpers.compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(1, 1), global_scale=divisor)
    theirs = forward.fake_quantize(x, scale, zero, args, global_scale=divisor)
    assert_equal_but_for_rounding_of_scales(quantize_activations(x, input_scale), theirs)


@pytest.mark.parametrize("input_scale", [1.0, 2.0**-7, 0.003])
def test_equals_modelopt(input_scale: float) -> None:
    module = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    x = activations(seed=1)
    global_scale = torch.tensor(input_scale)
    stored, scales, second = module.NVFP4QTensor.quantize(x, 16, weights_scaling_factor_2=global_scale)
    theirs = stored.dequantize(dtype=torch.float32, scale=scales, double_scale=second, block_sizes={-1: 16})
    assert_equal_but_for_rounding_of_scales(quantize_activations(x, input_scale), theirs)


def assert_equal_but_for_rounding_of_scales(ours: Tensor, theirs: Tensor) -> None:
    """Equal to the last bit of FP32, unless amax/6 is within an ulp of the middle between two E4M3 scales.

    The kernel multiplies by reciprocals, the libraries divide; that may round one scale in thousands to its neighbor.
    """
    same = torch.isclose(ours, theirs, rtol=1e-6, atol=0.0).view(-1, 16).all(dim=-1)
    assert float(same.float().mean()) > 0.998


def test_rounding_is_to_nearest_with_ties_to_the_even_code() -> None:
    halves = torch.arange(0, 6.5, 1 / 32)
    x = torch.cat([halves, torch.nextafter(halves, torch.tensor(0.0)), torch.nextafter(halves, torch.tensor(9.0))])
    for value, rounded in zip(x.tolist(), round_to_e2m1(x).tolist(), strict=True):
        distances = [abs(Fraction(value) - Fraction(grid)) for grid in E2M1]
        nearest = [code for code, distance in enumerate(distances) if distance == min(distances)]
        expected = nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)
        assert rounded == E2M1[expected], value
    assert torch.equal(round_to_e2m1(-x), -round_to_e2m1(x))


def test_values_beyond_the_range_saturate() -> None:
    x = torch.full((1, 16), 5000.0)
    assert torch.equal(quantize_activations(x, 1.0), torch.full((1, 16), 6 * 448.0))
    assert torch.equal(quantize_activations(-x, 2.0**-4), torch.full((1, 16), -6 * 448.0 / 16))


def test_blocks_below_the_smallest_scale_are_flushed() -> None:
    # Half of the smallest subnormal E4M3 scale, 2^-9, times 6: the tie at 2^-10 goes to zero.
    flushed = torch.full((1, 16), 6 * 2.0**-10)
    assert torch.equal(quantize_activations(flushed, 1.0), torch.zeros(1, 16))
    assert torch.equal(quantize_activations(torch.zeros(3, 32), 1.0), torch.zeros(3, 32))
    retained = torch.full((1, 16), 6 * 2.0**-10 * 1.01)
    assert float(quantize_activations(retained, 1.0).abs().min()) > 0
    assert float(quantize_activations(flushed, 2.0**-5).abs().min()) > 0


def test_not_a_number_does_not_disappear() -> None:
    x = torch.full((1, 32), 6.0)
    x[0, 3] = float("nan")
    result = quantize_activations(x, 1.0)
    assert bool(result[0, :16].isnan().any())
    assert torch.equal(result[0, 16:], x[0, 16:])
