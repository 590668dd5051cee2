"""On a real device the kernels give the same bytes and figures as on the CPU."""

import zlib
from dataclasses import fields, replace

import numpy as np
import pytest
from channel_makers import exponents_of, importance_of, some_rows
from int4_makers import MAKERS, trained_like

from k2convert.choices import Rule
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels import cpu, cuda
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.quantizer import create_quantizer
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.max import measure


def assert_same_figures(one: WeightMetrics, other: WeightMetrics) -> None:
    """Sums may differ by the order of their terms: a device counts nothing on the way."""
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert a == (pytest.approx(b, rel=1e-12) if isinstance(b, float) else b), field.name


def scale_of(weight: Int4Weight, rule: Rule) -> float:
    return RULES[rule].global_scale(measure(weight), is_int4=True)


def assert_same_on_device(
    weight: Int4Weight, rule: Rule, global_scale: float, importance: np.ndarray | None = None
) -> None:
    expected = cpu.convert(weight, rule=rule, global_scale=global_scale, importance=importance)
    found = cuda.convert(weight, rule=rule, global_scale=global_scale, importance=importance, device="cuda")
    assert np.array_equal(found.weight.block_scales, expected.weight.block_scales)
    assert np.array_equal(found.weight.packed, expected.weight.packed)
    assert found.outside_normal == expected.outside_normal


@pytest.mark.parametrize("rule", sorted(cuda.RULES_WITH_KERNEL))
@pytest.mark.parametrize("maker", MAKERS)
def test_kernels_equal_the_cpu(maker: str, rule: Rule) -> None:
    weight = MAKERS[maker]()
    assert_same_on_device(weight, rule, scale_of(weight, rule))


@pytest.mark.parametrize("exponent", [-126, -40, -9, -3, 0, 60, 127])
def test_mse_equals_the_cpu_for_any_power_of_two(exponent: int) -> None:
    for maker in ("trained-minus-eight", "wide-spread", "few-magnitudes"):
        assert_same_on_device(MAKERS[maker](), "mse", 2.0**exponent)


@pytest.mark.parametrize("global_scale", [2.0**-149, 1e-40, 3e-9, 1.1e-5, 0.75, 3.3e38])
def test_max_equals_the_cpu_for_any_global_scale(global_scale: float) -> None:
    for maker in ("trained-minus-eight", "wide-spread", "zeros"):
        assert_same_on_device(MAKERS[maker](), "max", float(np.float32(global_scale)))


@pytest.mark.parametrize("reach", [0, 1, 4])
@pytest.mark.parametrize("maker", MAKERS)
def test_columns_equal_the_cpu(maker: str, reach: int) -> None:
    rng = np.random.default_rng(zlib.crc32(maker.encode()) + reach)
    weight = some_rows(maker, exponents_of(rng, reach))
    best = scale_of(weight, "imatrix")
    for step in (0, -7, 6):
        assert_same_on_device(weight, "imatrix", max(best * 2.0**step, 2.0**-126), importance_of(rng))
    if reach:
        assert_same_on_device(weight, "mse", best)


@pytest.mark.parametrize("rule", sorted(cuda.RULES_WITH_KERNEL))
def test_large_tensor_equals_the_cpu(rule: Rule) -> None:
    weight = trained_like(16384, seed=11)
    assert_same_on_device(weight, rule, scale_of(weight, rule))
    for reach in (0, 2) if rule == "imatrix" else ():
        rng = np.random.default_rng(reach)
        weight = replace(weight, channel_exponents=exponents_of(rng, reach))
        assert_same_on_device(weight, rule, scale_of(weight, rule), importance_of(rng))


@pytest.mark.parametrize("rule", sorted(cuda.RULES_WITH_KERNEL))
def test_quantizers_agree_to_the_last_figure(rule: Rule) -> None:
    rng = np.random.default_rng(5)
    weight = trained_like(512, seed=14, lowest=-8)
    for reach, importance in ((0, None), (0, importance_of(rng)), (3, importance_of(rng))):
        source = replace(weight, channel_exponents=exponents_of(rng, reach))
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
        assert_same_figures(metrics, same_metrics)
