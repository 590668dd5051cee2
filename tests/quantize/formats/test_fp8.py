"""FP8 equals compressed-tensors and torch.float8_e4m3fn bit for bit: every BF16 value under many scales, and edges."""

import numpy as np
import pytest
import torch

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import bf16_bits
from k2convert.quantize.formats.fp8 import decode_fp8, quantize_fp8
from k2convert.quantize.metrics.measure import measure_fp8

FINITE = np.arange(0x7F80, dtype=np.uint16)
"""The bits of every BF16 number >= 0."""


def every_value() -> np.ndarray:
    """Rows with all BF16 numbers up to a largest one, and their negatives: powers of two, odd numbers, subnormals."""
    largest = [1, 2, 0x7F, 0x80, 0x81, 0x3F80, 0x3FA5, 0x4049, 0x43E0, 0x3DCD, 0x0234, 0x7F7F]
    rows = [np.where(bits >= FINITE, FINITE, FINITE % (bits + 1)) for bits in largest]
    return np.stack([np.concatenate([row, row | np.uint16(0x8000)]) for row in rows])


def edges() -> np.ndarray:
    """Rows of zeros of both signs, of subnormal numbers, of the largest numbers, and with one value."""
    generator = np.random.default_rng(0)
    rows = np.zeros((6, 96), dtype=np.float32)
    rows[0] = -0.0
    rows[1] = generator.integers(-127, 128, 96) * 2.0**-133
    rows[2] = generator.choice([-1, 1], 96) * 2.0**127 * 1.9921875
    rows[3, 5] = -3.0
    rows[4] = 2.0 ** generator.integers(-40, 1, 96)
    rows[5] = 448 * generator.choice([1, 1.0625 / 2, 2**-17, 2**-18, 1.5 * 2**-18, 3 * 2.0**-19], 96)
    return bf16_bits(rows)


ROWS = {
    "every BF16 value": every_value,
    "edges": edges,
    "random rows": lambda: bf16_bits(np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)),
    "no rows": lambda: np.empty((0, 16), dtype=np.uint16),
}


def in_torch(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("name", ROWS)
def test_it_is_torch_s_cast_under_the_largest_value_of_each_row(name: str) -> None:
    bits = ROWS[name]()
    weight = quantize_fp8(bits, name=name)
    values = in_torch(bits).float()
    largest = values.abs().amax(dim=1, keepdim=True) if len(values) else torch.empty(0, 1)
    scales = torch.where(largest > 0, largest / 448, 1.0)
    codes = (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(weight.scales, scales.numpy())
    assert np.array_equal(weight.codes, codes.view(torch.uint8).numpy())
    assert not np.isin(weight.codes, (0x7F, 0xFF)).any()
    decoded = codes.double() * scales.double()
    assert np.array_equal(decode_fp8(weight.codes, weight.scales), decoded.numpy())


@pytest.mark.parametrize("name", ["every BF16 value", "random rows"])
def test_it_is_what_compressed_tensors_writes(name: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    bits = ROWS[name]()
    bits = bits[(bits & 0x7FFF).max(axis=1) >= 0x0234]  # the library puts its epsilon for scales below that
    args = quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    values = in_torch(bits).float()
    least, most = torch.aminmax(values, dim=1, keepdim=True)
    scales, zero = calculate_qparams(least, most, args)
    codes = quantize(values, scales, zero, args, dtype=torch.float8_e4m3fn)
    weight = quantize_fp8(bits, name=name)
    assert np.array_equal(weight.scales, scales.numpy())
    theirs = codes.view(torch.uint8).numpy()
    is_zero = (values / scales == 0).numpy()  # the library adds a zero point of 0, and -0 + 0 is 0
    assert np.array_equal(np.where(is_zero, 0, weight.codes), theirs)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_values_that_are_not_finite_are_refused(bits: int) -> None:
    weight = np.zeros((4, 32), dtype=np.uint16)
    weight[2, 7] = bits
    with pytest.raises(FormatError, match="shard: weight: the weight has NaN or infinite values"):
        quantize_fp8(weight, name="shard: weight")


def test_figures_are_those_of_the_decoded_values() -> None:
    bits = edges()[3:]
    weight = quantize_fp8(bits, name="weight")
    found = measure_fp8(bits, weight.codes, weight.scales)
    exact = in_torch(bits).double().numpy()
    error = decode_fp8(weight.codes, weight.scales) - exact
    assert found.num_weights == bits.size
    assert found.energy == pytest.approx((exact**2).sum(), rel=1e-12)
    assert found.squared_error == pytest.approx((error**2).sum(), rel=1e-12)
    assert (found.num_nonzero, found.equal_nonzero) == (
        np.count_nonzero(exact),
        np.count_nonzero((error == 0) & (exact != 0)),
    )
