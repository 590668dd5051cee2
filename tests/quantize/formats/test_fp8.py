"""FP8 equals compressed-tensors, ModelOpt and torch.float8_e4m3fn bit for bit: all BF16 values, many scales, edges."""

import numpy as np
import pytest
import torch

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import bf16_bits
from k2convert.quantize.formats.fp8 import (
    Encode,
    Fp8Weight,
    block_amax,
    decode_fp8,
    encode_fp8,
    quantize_fp8,
    quantize_fp8_blocks,
)
from k2convert.quantize.kernels import cpu
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


ENCODERS = {"definition": encode_fp8, "kernel": cpu.encode_fp8}


@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)
@pytest.mark.parametrize("name", ROWS)
def test_it_is_torch_s_cast_under_the_largest_value_of_each_row(name: str, encode: Encode) -> None:
    bits = ROWS[name]()
    weight = quantize_fp8(bits, name=name, encode=encode)
    values = in_torch(bits).float()
    largest = values.abs().amax(dim=1, keepdim=True) if len(values) else torch.empty(0, 1)
    scales = torch.where(largest > 0, largest / 448, 1.0)
    codes = (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(weight.scales, scales.numpy())
    assert np.array_equal(weight.codes, codes.view(torch.uint8).numpy())
    assert not np.isin(weight.codes, (0x7F, 0xFF)).any()
    decoded = codes.double() * scales.double()
    assert np.array_equal(decode_fp8(weight, slice(None)), decoded.numpy())


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
    figures = measure_fp8(bits, weight)
    exact = in_torch(bits).double().numpy()
    error = decode_fp8(weight, slice(None)) - exact
    assert figures.num_weights == bits.size
    assert figures.energy == pytest.approx((exact**2).sum(), rel=1e-12)
    assert figures.squared_error == pytest.approx((error**2).sum(), rel=1e-12)
    assert (figures.num_nonzero, figures.equal_nonzero) == (
        np.count_nonzero(exact),
        np.count_nonzero((error == 0) & (exact != 0)),
    )


SHAPES = [(256, 384), (300, 130), (96, 256), (1, 128), (130, 1), (0, 128)]


def blocks_of(shape: tuple[int, int]) -> np.ndarray:
    """Random rows with blocks of zeros, of one value, of the largest numbers and of subnormal ones."""
    values = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    values[:128, :128] *= 2.0**-130
    values[128:, :128] = 0
    values[128:129, 128:129] = 7 * 2.0**120
    return bf16_bits(values)


def spread(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """One scale for each weight: the scale of its block."""
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_are_torch_s_cast_under_the_least_power_of_two(shape: tuple[int, int], encode: Encode) -> None:
    bits = blocks_of(shape)
    weight = quantize_fp8_blocks(bits, name="weight", encode=encode)
    scales = torch.from_numpy(weight.scales)
    values = in_torch(bits).float()
    assert weight.scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            largest = values[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128].abs().max().double().item()
            least = 2.0 ** np.ceil(np.log2(largest / 448)) if largest else 1.0
            assert scales[row, column] == max(least, 2.0**-126)
    codes = (values / spread(scales, shape)).to(torch.float8_e4m3fn)
    assert np.array_equal(weight.codes, codes.view(torch.uint8).numpy())
    assert not np.isin(weight.codes, (0x7F, 0xFF)).any()
    decoded = codes.double() * spread(scales.double(), shape)
    assert np.array_equal(decode_fp8(weight, slice(None)), decoded.numpy())
    assert np.array_equal(decode_fp8(weight, slice(100, 140)), decoded.numpy()[100:140])


def in_modelopt(weight: Fp8Weight) -> torch.Tensor:
    """The weight float32 [N, K] by ModelOpt's own decoder."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    codes = torch.from_numpy(weight.codes).view(torch.float8_e4m3fn)
    stored = qtensor.FP8QTensor(codes.shape, torch.float32, codes)
    sizes = {-2: 128, -1: 128}
    return stored.dequantize(torch.float32, scale=torch.from_numpy(weight.scales), block_sizes=sizes)


@pytest.mark.parametrize("shape", [(256, 384), (300, 130), (96, 256)], ids=str)
def test_modelopt_decodes_blocks_to_the_same_numbers(shape: tuple[int, int]) -> None:
    weight = quantize_fp8_blocks(blocks_of(shape), name="weight")
    assert np.array_equal(in_modelopt(weight).double().numpy(), decode_fp8(weight, slice(None)))


def test_modelopt_quantizes_to_the_same_codes_under_these_scales() -> None:
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    bits = bf16_bits(np.random.default_rng(3).standard_normal((300, 256)).astype(np.float32))
    weight = quantize_fp8_blocks(bits, name="weight")
    values = in_torch(bits).float()
    quantized, scales = qtensor.FP8QTensor.quantize(values, block_sizes={-2: 128, -1: 128})
    assert np.array_equal(weight.scales, torch.exp2(torch.ceil(torch.log2(scales))).numpy())
    quantized, _ = qtensor.FP8QTensor.quantize(values, torch.from_numpy(weight.scales), block_sizes={-2: 128, -1: 128})
    assert np.array_equal(weight.codes, quantized._quantized_data.view(torch.uint8).numpy())


def test_partners_have_the_scales_of_both() -> None:
    first, second = (bf16_bits(factor * blocks) for factor, blocks in zip((1, 20), _two(), strict=True))
    amax = np.concatenate([block_amax(bits, name="both") for bits in (first, second)]).max(axis=0)
    left, right = (quantize_fp8_blocks(bits, name="each", shared=amax) for bits in (first, second))
    rows = {tuple(row) for row in (*left.scales, *right.scales)}
    alone = [quantize_fp8_blocks(bits, name="alone").scales.max(axis=0) for bits in (first, second)]
    assert rows == {tuple(np.maximum(*alone))}


def _two() -> list[np.ndarray]:
    generator = np.random.default_rng(5)
    return [generator.standard_normal((rows, 256)).astype(np.float32) for rows in (576, 300)]


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_blocks_with_values_that_are_not_finite_are_refused(bits: int) -> None:
    weight = np.zeros((130, 32), dtype=np.uint16)
    weight[129, 7] = bits
    with pytest.raises(FormatError, match="shard: weight: the weight has NaN or infinite values"):
        quantize_fp8_blocks(weight, name="shard: weight")


def test_powers_of_two_lose_nothing_where_engines_make_them() -> None:
    """31.5 dB, as scales of amax / 448 have before an engine rounds them up and codes the numbers again."""
    bits = bf16_bits(np.random.default_rng(7).standard_normal((512, 512)).astype(np.float32))
    weight = quantize_fp8_blocks(bits, name="weight")
    assert np.array_equal(np.frexp(weight.scales)[0], np.full(weight.scales.shape, 0.5))
    assert measure_fp8(bits, weight).sqnr_db > 31.4


def any_bytes(rows: int, columns: int, scales: tuple[int, int]) -> Fp8Weight:
    """Every code but NaN under scales from 2**-126 to the largest."""
    generator = np.random.default_rng(rows)
    codes = generator.choice(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]), (rows, columns))
    return Fp8Weight(codes, np.ldexp(np.float32(1.5), generator.integers(-126, 100, scales)).astype(np.float32))


@pytest.mark.parametrize(
    ("rows", "columns", "scales"),
    [(6, 96, (6, 1)), (3, 1500, (3, 1)), (1, 300, (1, 3)), (300, 130, (3, 2)), (5, 7, (1, 1)), (0, 8, (0, 1))],
)
def test_the_kernel_measures_what_the_decoder_gives(rows: int, columns: int, scales: tuple[int, int]) -> None:
    weight = any_bytes(rows, columns, scales)
    decoded = decode_fp8(weight, slice(None))
    bits = bf16_bits(decoded.astype(np.float32))  # some are equal
    bits[:, ::5] = 0x8000
    exact = in_torch(bits).double().numpy() if bits.size else np.zeros(bits.shape)
    figures = measure_fp8(bits, weight)
    assert figures.energy == pytest.approx((exact**2).sum(), rel=1e-12)
    assert figures.squared_error == pytest.approx(((decoded - exact) ** 2).sum(), rel=1e-12)
    assert figures.num_nonzero == np.count_nonzero(exact)
    assert figures.equal_nonzero == np.count_nonzero((exact == decoded) & (exact != 0))


@pytest.mark.parametrize("part", ["code", "scale"])
def test_damage_has_no_error_that_is_a_number(part: str) -> None:
    weight = any_bytes(4, 128, (4, 1))
    if part == "code":
        weight.codes[2, 100] = 0xFF
    else:
        weight.scales[2] = np.inf
    bits = bf16_bits(np.ones((4, 128), dtype=np.float32))
    assert np.isnan(measure_fp8(bits, weight).squared_error)
