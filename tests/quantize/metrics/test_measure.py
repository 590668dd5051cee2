"""Any NVFP4 weight is measured as a direct computation does it; a conversion counts the same; metrics add up."""

import dataclasses
import json
import math
import random
import zlib
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
import torch
from weight_makers import (
    MAKERS,
    any_codes,
    draw,
    exponents_of,
    int4_weight,
    library_values,
    some_rows,
    total_metrics,
    trained_like,
)

from k2convert.choices import Rule
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight, Magnitude, SourceWeight, bf16_values
from k2convert.quantize.formats.int4 import Int4Weight, unpack_int4
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, decode_e4m3, dequantize_nvfp4
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.cpu import convert
from k2convert.quantize.metrics.measure import add_up, measure_quantized
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.quantizer import create_quantizer
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.max import max_global_scale
from k2convert.quantize.rules.mse import mse_global_scale, quantize_mse
from k2convert.records.document import encode, parse

with_both_instructions = pytest.mark.usefixtures("instructions")


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


def values_of(source: SourceWeight) -> np.ndarray:
    if isinstance(source, Mxfp4Weight):
        return library_values(source).double().numpy()
    if isinstance(source, Int4Weight):
        return unpack_int4(source.packed) * np.abs(source.element_scales().astype(np.float64))
    return bf16_values(source.bits).astype(np.float64)


def directly(source: SourceWeight, codes: Nvfp4Weight) -> dict[str, Any]:
    """The figures by their definitions, element by element."""
    wanted = values_of(source)
    written = dequantize_nvfp4(codes)
    same = wanted == written
    differences = [Fraction(a) - Fraction(b) for a, b in zip(wanted.flat, written.flat, strict=True)]
    figures = {
        "energy": sum(Fraction(value) ** 2 for value in wanted.flat),
        "squared_error": sum(difference**2 for difference in differences),
        "num_weights": wanted.size,
        "num_blocks": wanted.size // 16,
        "num_nonzero": int((wanted != 0).sum()),
        "equal_nonzero": int((same & (wanted != 0)).sum()),
        "equal_blocks": int(same.reshape(-1, 16).all(axis=1).sum()),
        "min_scale_byte": int(codes.block_scales.min()),
        "max_scale_byte": int(codes.block_scales.max()),
    }
    if not isinstance(source, Int4Weight):
        return figures | {"num_codes": None}
    q = unpack_int4(source.packed).astype(np.int64)
    s = np.abs(source.element_scales().astype(np.float64))
    live = s > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(live, written / s, 0.0)
        errors = np.where(live, np.abs(wanted - written) / s, 0.0)
    return figures | {
        "num_codes": q.size,
        "recoverable_codes": int((np.rint(steps) == q).sum()),
        "num_five_or_seven": int(np.isin(np.abs(q), (5, 7)).sum()),
        "num_minus_eight": int((q == -8).sum()),
        "max_error_steps": float(errors.max()),
    }


@pytest.mark.quick(8)
@pytest.mark.parametrize("kind", ["even", "narrow", "exponents", "BF16", "MXFP4"])
@pytest.mark.parametrize("maker", ["trained-minus-eight", "any-bytes", "few-magnitudes", "zeros", "wide-spread"])
@with_both_instructions
def test_the_figures_are_those_of_a_direct_computation(maker: str, kind: str) -> None:
    rng = np.random.default_rng(11)
    source: SourceWeight = some_rows(maker, exponents_of(rng, {"narrow": 1, "exponents": 2}.get(kind, 0))).select(
        slice(8)
    )
    if kind == "BF16":
        source = Bf16Weight(source.bits)
    if kind == "MXFP4":
        source = draw(rng, rows=8, low=90, high=118)
        source.packed[1::3] &= 0x88  # empty groups, some of -0
    codes, magnitude, _ = converted(source)
    codes = perturbed(codes, rng)
    figures = measure_quantized(source, codes, name="w", magnitude=magnitude)
    for name, value in directly(source, codes).items():
        measured = getattr(figures, name)
        if isinstance(value, Fraction | float):
            assert math.isclose(measured, value, rel_tol=1e-13), name
        else:
            assert measured == value, name
    assert dict(figures.scale_histogram) == dict(zip(*np.unique(codes.block_scales, return_counts=True), strict=True))
    assert figures.blocks_outside_normal is None
    if kind != "MXFP4":  # a cast is not compared with max
        assert figures.sampled_blocks == figures.num_blocks
        assert math.isclose(figures.sampled_error_achieved, figures.squared_error, rel_tol=1e-13)


@pytest.mark.parametrize("rule", ["mse", "max"])
@pytest.mark.parametrize("maker", MAKERS)
@with_both_instructions
def test_a_conversion_counts_what_is_measured(maker: str, rule: Rule) -> None:
    """Among them every source scale. Without factors a conversion counts pairs of scales, another way to them."""
    source = MAKERS[maker]()
    codes, magnitude, expected = converted(source, rule=rule)
    figures = measure_quantized(source, codes, name="w", magnitude=magnitude, rule=rule)
    by_max = converted(source, rule="max")[2]
    if maker != "every-scale":  # of large ones, some rows are compared
        assert expected.sampled_blocks == expected.num_blocks
        assert expected.sampled_error_max == pytest.approx(by_max.squared_error, rel=1e-12)
    assert expected.squared_error <= by_max.squared_error
    assert parse(WeightMetrics, encode(expected).decode(), where="here") == expected
    for field in dataclasses.fields(WeightMetrics):
        measured = getattr(figures, field.name)
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
    short = Nvfp4Weight(codes.packed[:4], codes.block_scales[:4], codes.global_scale)
    with pytest.raises(FormatError, match=r"w: .*\[4, 256\].*\[8, 256\]"):
        measure_quantized(source, short, name="w", magnitude=magnitude)
    codes.block_scales[3, 3] |= 0x80
    with pytest.raises(FormatError, match="w: an NVFP4 block scale is negative or NaN"):
        measure_quantized(source, codes, name="w", magnitude=magnitude)


@pytest.mark.quick(8)
@pytest.mark.parametrize(("lowest", "highest"), [(0, 0), (-1, 1), (-1, 2), (0, 3), (-4, 4)])
@pytest.mark.parametrize("any_bytes_written", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_instructions_measure_the_same_bits(maker: str, any_bytes_written: bool, lowest: int, highest: int) -> None:
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
        sums = []
        for name in {"portable", before}:
            _cpu.use_instructions(name)
            sums.append(add_up(source, packed, scales, values))
        _cpu.use_instructions(before)
        assert len(set(sums)) == 1


def metrics_of(weight: Int4Weight, rule: Rule, magnitude: Magnitude | None = None) -> WeightMetrics:
    magnitude = magnitude or weight.magnitude()
    result = RULES[rule].quantize(weight, RULES[rule].global_scale(magnitude))
    return measure_quantized(weight, result, name="w", magnitude=magnitude)


def error_of(weight: Int4Weight, result: Nvfp4Weight, rows: slice) -> float:
    """The squared error of some rows."""
    part = Nvfp4Weight(result.packed[rows], result.block_scales[rows], result.global_scale)
    return float(((values_of(weight.select(rows)) - dequantize_nvfp4(part)) ** 2).sum())


def test_one_row_in_256_of_a_large_tensor_is_compared_with_max() -> None:
    weight = trained_like(4096, 4096, seed=4)
    magnitude = weight.magnitude()
    result = convert(weight, rule="mse", global_scale=mse_global_scale(magnitude)).weight
    by_max = convert(weight, rule="max", global_scale=max_global_scale(magnitude)).weight
    runs = [measure_quantized(weight, result, name=name, magnitude=magnitude) for name in ("w", "v", "w")]
    assert runs[0] == runs[2]
    for name, figures in zip("wv", runs, strict=False):
        rows = slice(zlib.crc32(name.encode()) % 256, None, 256)
        assert figures.sampled_blocks == 16 * 4096 // 16
        assert figures.sampled_error_achieved == pytest.approx(error_of(weight, result, rows), rel=1e-12)
        assert figures.sampled_error_max == pytest.approx(error_of(weight, by_max, rows), rel=1e-12)
        assert figures.achieved_to_max == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("rows", "columns", "sampled_rows"), [(64, 1024, 64), (5, 1 << 16, 3), (1, 1 << 16, 1)])
def test_a_small_or_flat_tensor_is_compared_with_max_in_two_rows(rows: int, columns: int, sampled_rows: int) -> None:
    figures = metrics_of(trained_like(rows, columns, seed=2), "mse")
    assert figures.sampled_blocks == sampled_rows * columns // 16
    assert figures.achieved_to_max == pytest.approx(0.5, abs=0.03)


def test_a_wide_spread_of_scales_is_flagged_for_the_shared_set() -> None:
    codes = any_codes(2, 32, seed=5)
    near = int4_weight(codes, torch.tensor([[1.0], [2.0**-13]]).to(torch.bfloat16))
    far = int4_weight(codes, torch.tensor([[1.0], [0.99 * 2.0**-13]]).to(torch.bfloat16))
    assert metrics_of(near, "mse").scale_spread_exceeded == 0
    assert metrics_of(far, "mse").scale_spread_exceeded == 1
    partner = Magnitude(scale_max=2.0, amax=16.0, is_int4=True)
    assert metrics_of(near, "mse", near.magnitude().merge(partner)).scale_spread_exceeded == 1
    assert total_metrics(metrics_of(w, "mse") for w in (near, far, far)).scale_spread_exceeded == 2


@pytest.mark.parametrize("rule", get_args(Rule))
def test_an_empty_tensor_and_a_tensor_of_zeros_have_finite_figures(rule: Rule) -> None:
    zeros = int4_weight(torch.zeros(4, 64, dtype=torch.int8), torch.full((4, 2), 0.01, dtype=torch.bfloat16))
    metrics = metrics_of(zeros, rule)
    assert (metrics.energy, metrics.squared_error, metrics.relative_mse) == (0.0, 0.0, 0.0)
    assert metrics.sqnr_db == math.inf
    assert metrics.equal_blocks == metrics.num_blocks == 16
    nothing = Int4Weight(np.zeros((0, 32), dtype=np.uint8), np.zeros((0, 2), dtype=np.uint16))
    metrics = metrics_of(nothing, rule)
    assert metrics.num_weights == 0
    assert metrics.min_scale_byte is None


def test_a_record_without_a_figure_is_refused() -> None:
    record = json.loads(encode(metrics_of(trained_like(8, seed=0), "mse")))
    del record["energy"]
    with pytest.raises(ValueError, match="energy is missing"):
        parse(WeightMetrics, json.dumps(record), where="here")


def test_totals_are_sums_in_any_order_and_skip_what_a_tensor_does_not_have() -> None:
    parts = [metrics_of(trained_like(8, seed=seed), "mse") for seed in range(6)]
    bf16 = Bf16Weight(trained_like(8, seed=9).bits)
    magnitude = bf16.magnitude()
    result = quantize_mse(bf16, mse_global_scale(magnitude))
    parts.append(measure_quantized(bf16, result, name="w", magnitude=magnitude))
    total = total_metrics(parts)
    shuffled = parts.copy()
    random.Random(0).shuffle(shuffled)
    assert total_metrics(shuffled) == total
    assert total.num_weights == 7 * 2048
    assert total.num_codes == 6 * 2048
    assert total.recoverable_codes == sum(part.recoverable_codes or 0 for part in parts)
    assert total.squared_error == math.fsum(part.squared_error for part in parts)
    with pytest.raises(ValueError, match="no metrics"):
        total_metrics([])
