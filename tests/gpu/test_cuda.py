"""On a real device: the same bytes and figures as on the CPU, by the kernels and by `formats` itself."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from int4_makers import MAKERS, assert_same_counts, trained_like

from k2convert.choices import Rule
from k2convert.quantize.formats.arrays import as_arrays
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels import cpu, cuda
from k2convert.quantize.quantizer import create_quantizer
from k2convert.quantize.rules.magnitude import Magnitude, measure
from k2convert.quantize.rules.optimal import optimal_global_scale, quantize_optimal
from k2convert.quantize.rules.optimal_bf16 import quantize_optimal_bf16
from k2convert.quantize.rules.plain import plain_global_scale, quantize_plain

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def scale_of(magnitude: Magnitude, rule: Rule) -> float:
    return plain_global_scale(magnitude) if rule == "plain" else optimal_global_scale(magnitude, is_int4=True)


def assert_same_on_device(weight: Int4Weight, rule: Rule, global_scale: float) -> None:
    arrays, expected_counts = cpu.convert_int4(as_arrays(weight), rule=rule, global_scale=global_scale)
    expected = arrays.to_torch()
    result, counts = cuda.convert_int4(weight.to(CUDA), rule=rule, global_scale=global_scale)
    assert torch.equal(result.block_scales.cpu(), expected.block_scales)
    assert torch.equal(result.packed.cpu(), expected.packed)
    assert_same_counts(counts, expected_counts)


@pytest.mark.parametrize("rule", get_args(Rule))
@pytest.mark.parametrize("maker", MAKERS)
def test_kernels_equal_the_cpu(maker: str, rule: Rule) -> None:
    weight = MAKERS[maker]()
    assert_same_on_device(weight, rule, scale_of(measure(weight), rule))


@pytest.mark.parametrize("exponent", [-126, -40, -9, -3, 0, 60, 127])
def test_optimal_equals_the_cpu_for_any_power_of_two(exponent: int) -> None:
    for maker in ("trained-minus-eight", "wide-spread", "few-magnitudes"):
        assert_same_on_device(MAKERS[maker](), "optimal", 2.0**exponent)


@pytest.mark.parametrize("global_scale", [2.0**-149, 1e-40, 3e-9, 1.1e-5, 0.75, 3.3e38])
def test_plain_equals_the_cpu_for_any_global_scale(global_scale: float) -> None:
    for maker in ("trained-minus-eight", "wide-spread", "zeros"):
        assert_same_on_device(MAKERS[maker](), "plain", float(np.float32(global_scale)))


@pytest.mark.parametrize("rule", get_args(Rule))
def test_large_tensor_equals_the_cpu(rule: Rule) -> None:
    weight = trained_like(16384, seed=11)
    assert_same_on_device(weight, rule, scale_of(measure(weight), rule))


@pytest.mark.parametrize("maker", ["trained", "zeros", "wide-spread"])
def test_formats_give_the_same_bytes_on_the_device(maker: str) -> None:
    weight = MAKERS[maker]()
    magnitude = measure(weight)
    for rule, quantize in (("plain", quantize_plain), ("optimal", quantize_optimal)):
        scale = scale_of(magnitude, rule)
        here, there = quantize(weight, scale), quantize(weight.to(CUDA), scale).to(CPU)
        assert torch.equal(here.packed, there.packed)
        assert torch.equal(here.block_scales, there.block_scales)


def test_bf16_weights_give_the_same_bytes_on_the_device() -> None:
    weight = (0.02 * torch.randn(64, 512, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    for quantize, scale in ((quantize_plain, 1.1e-5), (quantize_optimal_bf16, 2.0**-16)):
        here, there = quantize(weight, scale), quantize(weight.to(CUDA), scale).to(CPU)
        assert torch.equal(here.packed, there.packed)
        assert torch.equal(here.block_scales, there.block_scales)


@pytest.mark.parametrize("rule", get_args(Rule))
def test_quantizers_agree_to_the_last_figure(rule: Rule) -> None:
    weight = trained_like(512, seed=12, lowest=-8)
    converted = []
    for device in ("cpu", "cuda"):
        quantizer = create_quantizer("native", rule=rule, device=device)
        magnitude = quantizer.measure(as_arrays(weight), name="w")
        scale = quantizer.global_scale(magnitude, is_int4=True)
        converted.append(quantizer.quantize(as_arrays(weight), name="w", magnitude=magnitude, global_scale=scale))
    (here, metrics), (there, same_metrics) = converted
    assert np.array_equal(here.packed, there.packed)
    assert np.array_equal(here.block_scales, there.block_scales)
    assert metrics == same_metrics
