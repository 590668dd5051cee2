"""Any NVFP4 weight is measured as a direct computation measures it, and what a conversion counts on the way is that."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from channel_makers import exponents_of, some_rows
from int4_makers import MAKERS, any_bytes, trained_like

from k2convert.choices import Rule
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight, Magnitude, SourceWeight, bf16_values
from k2convert.quantize.formats.int4 import Int4Weight, unpack_int4
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, decode_e4m3, dequantize_nvfp4
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.metrics.measure import add_up, measure_quantized
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.quantizer import create_quantizer
from k2convert.records.document import encode, parse

pytestmark = pytest.mark.usefixtures("instructions")


def converted(source: SourceWeight, rule: Rule = "mse") -> tuple[Nvfp4Weight, Magnitude, WeightMetrics]:
    quantizer = create_quantizer("native", rule=rule)
    magnitude = quantizer.measure(source, name="w")
    scale = quantizer.global_scale(magnitude)
    result, metrics = quantizer.quantize(source, name="w", magnitude=magnitude, global_scale=scale)
    return result, magnitude, metrics


def perturbed(codes: Nvfp4Weight, rng: np.random.Generator) -> Nvfp4Weight:
    """Change a tenth of the codes and of the block scales to anything that NVFP4 has."""
    packed = codes.packed.copy()
    scales = codes.block_scales.copy()
    packed[rng.random(packed.shape) < 0.1] = rng.integers(0, 256)
    chosen = rng.random(scales.shape) < 0.1
    scales[chosen] = rng.integers(0, 0x7F, int(chosen.sum()))
    return Nvfp4Weight(packed, scales, codes.global_scale)


def directly(source: Int4Weight, codes: Nvfp4Weight) -> dict[str, Any]:
    """The figures by their definitions, element by element."""
    q = unpack_int4(source.packed).astype(np.int64)
    s = np.abs(source.element_scales().astype(np.float64))
    wanted = q * s
    written = dequantize_nvfp4(codes)
    same = wanted == written
    live = s > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(live, written / s, 0.0)
        errors = np.where(live, np.abs(wanted - written) / s, 0.0)
    differences = [Fraction(a) - Fraction(b) for a, b in zip(wanted.flat, written.flat, strict=True)]
    return {
        "energy": sum(Fraction(value) ** 2 for value in wanted.flat),
        "squared_error": sum(difference**2 for difference in differences),
        "num_weights": q.size,
        "num_codes": q.size,
        "num_blocks": q.size // 16,
        "num_nonzero": int((wanted != 0).sum()),
        "equal_nonzero": int((same & (wanted != 0)).sum()),
        "equal_blocks": int(same.reshape(-1, 16).all(axis=1).sum()),
        "recoverable_codes": int((np.rint(steps) == q).sum()),
        "num_five_or_seven": int(np.isin(np.abs(q), (5, 7)).sum()),
        "num_minus_eight": int((q == -8).sum()),
        "max_error_steps": float(errors.max()),
        "min_scale_byte": int(codes.block_scales.min()),
        "max_scale_byte": int(codes.block_scales.max()),
    }


@pytest.mark.quick(8)
@pytest.mark.parametrize("reach", [0, 1, 2], ids=["even", "narrow", "exponents"])
@pytest.mark.parametrize("maker", ["trained-minus-eight", "any-bytes", "few-magnitudes", "zeros", "wide-spread"])
def test_the_figures_are_those_of_a_direct_computation(maker: str, reach: int) -> None:
    rng = np.random.default_rng(11)
    source = some_rows(maker, exponents_of(rng, reach))
    source = Int4Weight(source.packed[:8], source.scale_bits[:8], source.channel_exponents)
    codes, magnitude, _ = converted(source)
    codes = perturbed(codes, rng)
    found = measure_quantized(source, codes, name="w", magnitude=magnitude)
    for name, value in directly(source, codes).items():
        measured = getattr(found, name)
        if isinstance(value, int):
            assert measured == value, name
        else:
            assert math.isclose(measured, value, rel_tol=1e-13), name
    assert dict(found.scale_histogram) == dict(zip(*np.unique(codes.block_scales, return_counts=True), strict=True))
    assert found.blocks_outside_normal is None
    assert found.sampled_blocks == found.num_blocks
    assert math.isclose(found.sampled_error_achieved, found.squared_error, rel_tol=1e-13)


@pytest.mark.parametrize("rule", ["mse", "max"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_conversion_counts_what_is_measured(maker: str, rule: Rule) -> None:
    """Among them every source scale. Without factors a conversion counts pairs of scales, another way to them."""
    source = MAKERS[maker]()
    codes, magnitude, expected = converted(source, rule=rule)
    found = measure_quantized(source, codes, name="w", magnitude=magnitude, rule=rule)
    if rule == "max":
        assert found.sampled_blocks == found.num_blocks
    for field in dataclasses.fields(WeightMetrics):
        measured = getattr(found, field.name)
        stated = getattr(expected, field.name)
        if field.name == "blocks_outside_normal":
            assert measured is None
        elif isinstance(stated, float) and field.name != "max_error_steps":
            assert math.isclose(measured, stated, rel_tol=1e-12), field.name
        else:
            assert measured == stated, field.name


def test_codes_that_do_not_fit_are_refused() -> None:
    source = trained_like(8, seed=1)
    codes, magnitude, _ = converted(source)
    with pytest.raises(FormatError, match=r"w: .*\[4, 256\].*\[8, 256\]"):
        measure_quantized(source, codes.rows(0, 4), name="w", magnitude=magnitude)
    codes.block_scales[3, 3] |= 0x80
    with pytest.raises(FormatError, match="w: an NVFP4 block scale is negative or NaN"):
        measure_quantized(source, codes, name="w", magnitude=magnitude)


@pytest.mark.quick(8)
@pytest.mark.parametrize(("lowest", "highest"), [(0, 0), (-1, 1), (-1, 2), (0, 3), (-4, 4)])
@pytest.mark.parametrize("any_bytes_written", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_both_instructions_measure_the_same_to_the_last_bit(
    maker: str, any_bytes_written: bool, lowest: int, highest: int
) -> None:
    rng = np.random.default_rng(3)
    source = MAKERS[maker]()
    if highest:
        source = some_rows(maker, rng.integers(lowest, highest + 1, 256).astype(np.int8))
    for rule in ("mse", "max"):
        codes = converted(source, rule=rule)[0]
        packed = codes.packed
        scales = codes.block_scales
        if any_bytes_written:
            packed = rng.integers(0, 256, packed.shape, np.uint8)
            scales = rng.integers(0, 127, scales.shape, np.uint8)
        values = decode_e4m3(np.arange(256, dtype=np.uint8) & 0x7F) * codes.global_scale
        before = _cpu.instructions()
        found = []
        for name in {"portable", before}:
            _cpu.use_instructions(name)
            found.append(add_up(source, packed, scales, values))
        _cpu.use_instructions(before)
        assert len(set(found)) == 1


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("is_int4", [False, True])
def test_sums_are_sums_over_all_weights(is_int4: bool, is_scaled: bool) -> None:
    rng = np.random.default_rng(0)
    exponents = exponents_of(rng, 2)
    source: Int4Weight | Bf16Weight = any_bytes(rows=16)
    if not is_int4:
        source = Bf16Weight(source.bits)
    if is_scaled and exponents is not None:
        source = source.divide_columns(exponents, name="w")
    if isinstance(source, Int4Weight):
        exact = unpack_int4(source.packed) * source.element_scales().astype(np.float64)
    else:
        exact = bf16_values(source.bits).astype(np.float64)
    (written, _, metrics), (_, _, by_max) = (converted(source, rule) for rule in ("mse", "max"))
    error = exact - dequantize_nvfp4(written)
    assert metrics.energy == pytest.approx((exact**2).sum(), rel=1e-12)
    assert metrics.squared_error == pytest.approx((error**2).sum(), rel=1e-12)
    assert metrics.num_nonzero == np.count_nonzero(exact)
    assert metrics.equal_nonzero == ((exact != 0) & (error == 0)).sum()
    assert metrics.equal_blocks == (error.reshape(-1, 16) == 0).all(axis=1).sum()
    assert metrics.sampled_error_achieved == pytest.approx(metrics.squared_error, rel=1e-12)
    assert metrics.sampled_error_max == pytest.approx(by_max.squared_error, rel=1e-12)
    assert metrics.squared_error < metrics.sampled_error_max
    assert by_max.achieved_to_max == pytest.approx(1.0, rel=1e-12)
    assert (metrics.num_codes is None) == (not is_int4)
    assert parse(WeightMetrics, encode(metrics).decode(), where="here") == metrics
