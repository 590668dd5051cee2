"""On a real device the kernels give the same bytes and figures as on the CPU."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from column_makers import assert_same_column_counts, exponents_of, importance_of, some_rows
from int4_makers import MAKERS, assert_same_counts, trained_like

from k2convert.choices import Rule
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels import columns, cpu, cuda, cuda_columns
from k2convert.quantize.quantizer import create_quantizer
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.magnitude import measure


def scale_of(weight: Int4Weight, rule: Rule) -> float:
    return RULES[rule].global_scale(measure(weight), is_int4=True)


def assert_same_on_device(weight: Int4Weight, rule: Rule, global_scale: float) -> None:
    expected, expected_counts = cpu.convert_int4(weight, rule=rule, global_scale=global_scale)
    result, counts = cuda.convert_int4(weight, rule=rule, global_scale=global_scale, device="cuda")
    assert np.array_equal(result.block_scales, expected.block_scales)
    assert np.array_equal(result.packed, expected.packed)
    assert_same_counts(counts, expected_counts)


@pytest.mark.parametrize("rule", cuda.KERNELS)
@pytest.mark.parametrize("maker", MAKERS)
def test_kernels_equal_the_cpu(maker: str, rule: Rule) -> None:
    weight = MAKERS[maker]()
    assert_same_on_device(weight, rule, scale_of(weight, rule))


@pytest.mark.parametrize("exponent", [-126, -40, -9, -3, 0, 60, 127])
def test_optimal_equals_the_cpu_for_any_power_of_two(exponent: int) -> None:
    for maker in ("trained-minus-eight", "wide-spread", "few-magnitudes"):
        assert_same_on_device(MAKERS[maker](), "optimal", 2.0**exponent)


@pytest.mark.parametrize("global_scale", [2.0**-149, 1e-40, 3e-9, 1.1e-5, 0.75, 3.3e38])
def test_plain_equals_the_cpu_for_any_global_scale(global_scale: float) -> None:
    for maker in ("trained-minus-eight", "wide-spread", "zeros"):
        assert_same_on_device(MAKERS[maker](), "plain", float(np.float32(global_scale)))


def assert_same_columns_on_device(
    weight: Int4Weight, importance: np.ndarray | None, global_scale: float, rule: Rule = "weighted"
) -> None:
    expected, expected_counts = columns.convert_columns(
        weight, rule=rule, global_scale=global_scale, importance=importance
    )
    result, counts = cuda_columns.convert_columns(
        weight, rule=rule, global_scale=global_scale, importance=importance, device="cuda"
    )
    assert np.array_equal(result.block_scales, expected.block_scales)
    assert np.array_equal(result.packed, expected.packed)
    assert_same_column_counts(counts, expected_counts)


@pytest.mark.parametrize("reach", [0, 1, 4])
@pytest.mark.parametrize("maker", MAKERS)
def test_columns_equal_the_cpu(maker: str, reach: int) -> None:
    rng = np.random.default_rng(zlib.crc32(maker.encode()) + reach)
    weight = some_rows(maker, exponents_of(rng, reach))
    best = scale_of(weight, "weighted")
    for step in (0, -7, 6):
        assert_same_columns_on_device(weight, importance_of(rng), max(best * 2.0**step, 2.0**-126))
    if reach:
        assert_same_columns_on_device(weight, None, best, rule="optimal")


@pytest.mark.parametrize("reach", [0, 2])
def test_large_tensor_with_importance_equals_the_cpu(reach: int) -> None:
    rng = np.random.default_rng(reach)
    weight = trained_like(16384, seed=13)
    weight = Int4Weight(weight.packed, weight.scale_bits, exponents_of(rng, reach))
    assert_same_columns_on_device(weight, importance_of(rng), scale_of(weight, "weighted"))


@pytest.mark.parametrize("rule", ["weighted", "optimal", "plain"])
def test_quantizers_agree_on_columns_to_the_last_figure(rule: Rule) -> None:
    rng = np.random.default_rng(5)
    weight = trained_like(512, seed=14, lowest=-8)
    for reach in (0, 3):
        source = Int4Weight(weight.packed, weight.scale_bits, exponents_of(rng, reach))
        importance = importance_of(rng)
        converted = []
        for device in ("cpu", "cuda"):
            quantizer = create_quantizer("native", rule=rule, device=device)
            magnitude = quantizer.measure(source, name="w")
            scale = quantizer.global_scale(magnitude, is_int4=True)
            converted.append(
                quantizer.quantize(source, name="w", magnitude=magnitude, global_scale=scale, importance=importance)
            )
        (here, metrics), (there, same_metrics) = converted
        assert np.array_equal(here.packed, there.packed)
        assert np.array_equal(here.block_scales, there.block_scales)
        assert metrics == same_metrics


@pytest.mark.parametrize("rule", cuda.KERNELS)
def test_large_tensor_equals_the_cpu(rule: Rule) -> None:
    weight = trained_like(16384, seed=11)
    assert_same_on_device(weight, rule, scale_of(weight, rule))


@pytest.mark.parametrize("rule", cuda.KERNELS)
def test_quantizers_agree_to_the_last_figure(rule: Rule) -> None:
    weight = trained_like(512, seed=12, lowest=-8)
    converted = []
    for device in ("cpu", "cuda"):
        quantizer = create_quantizer("native", rule=rule, device=device)
        magnitude = quantizer.measure(weight, name="w")
        scale = quantizer.global_scale(magnitude, is_int4=True)
        converted.append(quantizer.quantize(weight, name="w", magnitude=magnitude, global_scale=scale))
    (here, metrics), (there, same_metrics) = converted
    assert np.array_equal(here.packed, there.packed)
    assert np.array_equal(here.block_scales, there.block_scales)
    assert metrics == same_metrics
