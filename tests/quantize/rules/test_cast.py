"""The cast of MXFP4 to NVFP4: literal bytes, both libraries' decoders, ModelOpt's casts, and a search of all scales."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from library_decoders import create_decoder
from modelopt.torch.export.shard_cast_utils import mxfp4_kmax, quantize_mxfp4_to_nvfp4, quantize_mxfp4_to_nvfp4_lossless
from numpy.typing import NDArray
from weight_makers import draw, library_values, weight_of

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, decode_e4m3, dequantize_nvfp4, unpack_nibbles
from k2convert.quantize.kernels import cpu
from k2convert.quantize.libraries import ReferenceQuantizer
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.quantizer import NativeQuantizer
from k2convert.records.ledger import metrics_document


def convert(
    weight: Mxfp4Weight, rule: str = "mse", *, partner: Mxfp4Weight | None = None
) -> tuple[Nvfp4Weight, WeightMetrics]:
    quantizer = NativeQuantizer(rule)
    magnitude = quantizer.measure(weight, name="weight")
    if partner is not None:
        magnitude = magnitude.merge(quantizer.measure(partner, name="partner"))
    scale = quantizer.global_scale(magnitude)
    return quantizer.quantize(weight, name="weight", magnitude=magnitude, global_scale=scale)


def values(weight: Mxfp4Weight) -> NDArray[np.float64]:
    return library_values(weight).double().numpy()


LADDER = [
    (8, 0x78), (7, 0x70), (0, 0x38), (-1, 0x30), (-6, 0x08), (-7, 0x04), (-8, 0x02), (-9, 0x01), (-10, 0x01),
]  # fmt: skip


def test_scales_get_these_bytes_and_codes_are_copied() -> None:
    """k_max is 8 here, so m = 0 and d is the group's exponent: 2^8 is 0x78, 2^0 0x38, 2^-6 0x08, 2^-9 0x01."""
    nibbles = np.tile([0x8, 0x7, 0xF, 0x1], (1, 8 * len(LADDER)))
    weight = weight_of(nibbles, np.array([[127 + step for step, _ in LADDER]]))
    result, metrics = convert(weight)
    assert result.global_scale == 1.0
    assert result.block_scales.tolist() == [[byte for _, byte in LADDER for _ in range(2)]]
    assert result.packed[0, :2].tolist() == [0x78, 0x1F]  # -0 is kept
    assert (result.packed[0, :-16] == weight.packed[0, :-16]).all()
    assert result.packed[0, -16:].tolist() == [0x58, 0x0D] * 8  # 6 and -6 become 3 and -3, 0.5 becomes 0
    assert (metrics.below_window_groups, metrics.subnormal_groups, metrics.empty_groups) == (1, 3, 0)
    assert (metrics.min_source_byte, metrics.max_source_byte) == (117, 135)


ROUNDED = {10: "00122345", 11: "00011223", 12: "00000112", 13: "00000001", 14: "00000000", 30: "00000000"}


@pytest.mark.parametrize("steps", ROUNDED)
def test_codes_below_the_window_are_rounded_to_nearest_even_with_their_signs(steps: int) -> None:
    nibbles = np.zeros((1, 64), dtype=np.int64)
    nibbles[0, :16] = np.arange(16)
    nibbles[0, 32:] = 1
    result, metrics = convert(weight_of(nibbles, np.array([[127 + 8 - 8 - steps, 135]])))
    codes = unpack_nibbles(result.packed)[0]
    expected = [int(code) for code in ROUNDED[steps]]
    assert codes[:16].tolist() == expected + [code | 8 for code in expected]
    assert result.block_scales[0].tolist() == [1, 1, 0x78, 0x78]
    assert metrics.below_window_groups == 1


@pytest.mark.parametrize("spread", [0, 1, 10, 14, 15, 17])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_every_value_in_the_window_is_the_sources_by_the_libraries_own_decoders(spread: int, layout: str) -> None:
    weight = draw(np.random.default_rng(spread), low=118 - spread, high=118)
    result, metrics = convert(weight)
    stored = 1 / result.global_scale if layout == "compressed-tensors" else result.global_scale
    theirs = create_decoder(layout)(result.packed, result.block_scales, stored)
    assert torch.equal(theirs.double(), library_values(weight).double())
    assert result.packed is weight.packed
    assert metrics.squared_error == 0.0
    assert metrics.sampled_blocks == 0, "a cast is not compared with max"
    assert metrics_document(metrics)["achieved_to_max"] is None
    assert metrics.equal_nonzero == metrics.num_nonzero
    assert (metrics.below_window_groups, metrics.below_window_tensors) == (0, 0)
    assert metrics.subnormal_tensors == int(spread > 14)


@pytest.mark.parametrize("spread", [0, 14, 17, 18, 30])
def test_modelopts_lossless_cast_has_the_same_scales_and_codes(spread: int) -> None:
    """Its -0 is +0, and its scale of an empty group is another, so these are set aside."""
    gate, up = (draw(np.random.default_rng(spread + n), low=118 - n - spread, high=118 - n) for n in (0, 1))
    result, _ = convert(gate, partner=up)
    packed, scales = (torch.from_numpy(np.ascontiguousarray(a)) for a in (gate.packed, gate.scale_bytes))
    k_max = max(mxfp4_kmax(scales), mxfp4_kmax(torch.from_numpy(up.scale_bytes)))
    codes, block_scales, global_scale, _, exact = quantize_mxfp4_to_nvfp4_lossless(packed, scales, k_max, "cpu")
    assert float(global_scale) == result.global_scale
    in_window = (gate.scale_bytes.astype(int) - 127 >= k_max - 17).repeat(2, axis=1)
    assert exact == in_window.sum() // 2
    theirs = block_scales.view(torch.uint8).numpy()
    assert (theirs[in_window] == result.block_scales[in_window]).all()
    ours = unpack_nibbles(result.packed)
    reference = unpack_nibbles(codes.numpy())
    columns = in_window.repeat(16, axis=1)
    assert (np.where(ours == 8, 0, ours)[columns] == reference[columns]).all()


@pytest.mark.parametrize("spread", [0, 5, 17, 30])
def test_rule_max_is_modelopts_conversion_without_its_cast_byte_for_byte(spread: int) -> None:
    weight = draw(np.random.default_rng(spread), low=118 - spread, high=118)
    result, metrics = convert(weight, "max")
    codes, scales, global_scale, _ = quantize_mxfp4_to_nvfp4(
        torch.from_numpy(np.ascontiguousarray(weight.packed)), torch.from_numpy(weight.scale_bytes), None, "cpu"
    )
    assert (codes.numpy() == result.packed).all()
    assert (scales.view(torch.uint8).numpy() == result.block_scales).all()
    assert float(global_scale) == result.global_scale
    assert metrics.lossless_tensors is metrics.below_window_groups is None
    reference = ReferenceQuantizer()
    magnitude = reference.measure(weight, name="weight")
    again, same = reference.quantize(weight, name="weight", magnitude=magnitude, global_scale=result.global_scale)
    assert (again.packed == result.packed).all()
    error = metrics.squared_error
    assert same.sampled_error_max == pytest.approx(error, rel=1e-12)
    assert replace(same, sampled_error_achieved=error, sampled_error_max=error) == metrics


@pytest.mark.parametrize("step", [-10, -11, -12, -13, -14])
def test_no_other_scale_has_less_error_below_the_window(step: int) -> None:
    rng = np.random.default_rng(-step)
    nibbles = rng.integers(0, 16, (200, 64))
    nibbles[:, 32:] |= 1
    scales = np.tile([127 + 100 + step, 127 + 108], (200, 1))
    weight = weight_of(nibbles, scales)
    result, _ = convert(weight)
    assert result.global_scale == 2.0**100
    exact = values(weight)[:, :32].reshape(-1, 16) / result.global_scale
    written = dequantize_nvfp4(result)[:, :32].reshape(-1, 16) / result.global_scale
    achieved = ((exact - written) ** 2).sum(axis=1)
    points = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for scale in decode_e4m3(np.arange(1, 127, dtype=np.uint8)):
        nearest = np.abs(np.abs(exact)[:, :, None] - points * scale).min(axis=2)
        assert ((nearest**2).sum(axis=1) >= achieved).all()


@pytest.mark.usefixtures("instructions")
def test_kernels_measure_as_the_definition_does() -> None:
    weight = draw(np.random.default_rng(11), low=3, high=250)
    weight.packed[:, ::2] &= 0x99
    assert cpu.measure_magnitude(weight, name="w") == weight.magnitude(name="w")
    assert weight.magnitude().amax == np.abs(values(weight)).max() == Bf16Weight(weight.bits).magnitude().amax


@pytest.mark.parametrize("high", [120, 127 + 125])
def test_bf16_bits_are_those_of_compressed_tensors(high: int) -> None:
    weight = draw(np.random.default_rng(1), low=0, high=high)
    assert torch.equal(torch.from_numpy(weight.bits.view(np.int16)), library_values(weight).view(torch.int16))


def empty_but(scales: list[int], used: int) -> Mxfp4Weight:
    nibbles = np.tile([0, 8], (1, 16 * len(scales)))
    nibbles[0, 32 * used : 32 * used + 32] = 3
    return weight_of(nibbles, np.array([scales]))


def test_empty_groups_do_not_count_for_the_global_scale() -> None:
    result, metrics = convert(empty_but([0, 254, 120, 119], used=2))
    assert result.global_scale == 2.0 ** (120 - 127 - 8)
    assert result.block_scales.tolist() == [[0x38, 0x38, 0x38, 0x38, 0x78, 0x78, 0x70, 0x70]]
    assert metrics.empty_groups == 3
    assert metrics.squared_error == 0.0


def test_a_set_of_only_minus_zero_has_the_global_scale_one() -> None:
    weight = weight_of(np.full((2, 64), 8), np.array([[127, 0], [254, 135]]))
    result, metrics = convert(weight)
    assert result.global_scale == 1.0
    assert result.block_scales.tolist() == [[0x38, 0x38, 0x38, 0x38], [0x38, 0x38, 0x78, 0x78]]
    assert (result.packed == 0x88).all()
    assert (metrics.energy, metrics.min_source_byte, metrics.max_source_byte) == (0.0, None, None)


def test_the_least_scales_are_exact_too() -> None:
    """Byte 0 is 2^-127, a number. The global scale stays normal, so that 1/g is one too."""
    weight = draw(np.random.default_rng(5), low=0, high=3)
    result, metrics = convert(weight)
    assert result.global_scale == 2.0**-126
    assert (dequantize_nvfp4(result) == values(weight)).all()
    assert metrics.squared_error == 0.0


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (empty_but([120, 255], used=0), r"w: MXFP4 scale \[0, 1\] is byte 255, which is NaN; the source is damaged"),
        (empty_but([253, 120], used=0), r"w: an MXFP4 scale is 2\*\*126, more than the 2\*\*125"),
    ],
)
def test_scales_without_a_bf16_number_are_refused(weight: Mxfp4Weight, message: str) -> None:
    for refuse in (Mxfp4Weight.magnitude, cpu.measure_magnitude):
        with pytest.raises(FormatError, match=message):
            refuse(weight, name="w")
