"""Any NVFP4 codes are measured as a direct computation measures them, and a rule's own codes as that rule's metrics."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from column_makers import exponents_of, importance_of, some_rows
from int4_makers import MAKERS, trained_like
from numpy.typing import NDArray

from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import bf16_values
from k2convert.quantize.formats.int4 import Int4Weight, dequantize_int4, unpack_int4
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.quantize.kernels.codes import measure_codes
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.quantizer import create_quantizer
from k2convert.quantize.rules.magnitude import Magnitude, measure

REACH = [0, 2]


def converted(
    source: Int4Weight, importance: NDArray[np.uint8] | None = None
) -> tuple[Nvfp4Weight, Magnitude, WeightMetrics]:
    quantizer = create_quantizer("native", rule="weighted", device="cpu")
    magnitude = quantizer.measure(source, name="w")
    scale = quantizer.global_scale(magnitude, is_int4=True)
    result, metrics = quantizer.quantize(
        source, name="w", magnitude=magnitude, global_scale=scale, importance=importance
    )
    return result, magnitude, metrics


def perturbed(codes: Nvfp4Weight, rng: np.random.Generator) -> Nvfp4Weight:
    """Change a tenth of the codes and of the block scales to anything that NVFP4 has."""
    packed, scales = codes.packed.copy(), codes.block_scales.copy()
    packed[rng.random(packed.shape) < 0.1] = rng.integers(0, 256)
    chosen = rng.random(scales.shape) < 0.1
    scales[chosen] = rng.integers(0, 0x7F, int(chosen.sum()))
    return Nvfp4Weight(packed, scales, codes.global_scale)


def directly(source: Int4Weight, codes: Nvfp4Weight, importance: NDArray[np.uint8] | None) -> dict[str, Any]:
    """The figures by their definitions, element by element."""
    q, s = unpack_int4(source.packed).astype(np.int64), np.abs(source.element_scales().astype(np.float64))
    wanted, written = q * s, dequantize_nvfp4(codes)
    same = wanted == written
    live = s > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(live, written / s, 0.0)
        errors = np.where(live, np.abs(wanted - written) / s, 0.0)
    differences = [Fraction(a) - Fraction(b) for a, b in zip(wanted.flat, written.flat, strict=True)]
    shares = None if importance is None else np.broadcast_to(importance, q.shape).reshape(-1).tolist()
    energies = [Fraction(value) ** 2 for value in wanted.flat]
    found = {
        "energy": sum(energies),
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
    if shares is not None:
        found["weighted_energy"] = sum(w * e for w, e in zip(shares, energies, strict=True)) / 255
        found["weighted_error"] = sum(w * d**2 for w, d in zip(shares, differences, strict=True)) / 255
    return found


@pytest.mark.parametrize("reach", REACH, ids=["even", "exponents"])
@pytest.mark.parametrize("maker", ["trained-minus-eight", "any-bytes", "few-magnitudes", "zeros", "wide-spread"])
def test_the_figures_are_those_of_a_direct_computation(maker: str, reach: int) -> None:
    rng = np.random.default_rng(11)
    source = some_rows(maker, exponents_of(rng, reach))
    source = Int4Weight(source.packed[:8], source.scale_bits[:8], source.column_exponents)
    importance = importance_of(rng)
    codes, magnitude, _ = converted(source, importance)
    codes = perturbed(codes, rng)
    found = measure_codes(source, codes, name="w", magnitude=magnitude, importance=importance)
    for name, value in directly(source, codes, importance).items():
        measured = getattr(found, name)
        if isinstance(value, int):
            assert measured == value, name
        else:
            assert math.isclose(measured, value, rel_tol=1e-13), name
    assert dict(found.scale_histogram) == dict(zip(*np.unique(codes.block_scales, return_counts=True), strict=True))
    assert found.blocks_outside_normal is None
    assert found.sampled_blocks == found.num_blocks
    assert math.isclose(found.sampled_error_achieved, found.squared_error, rel_tol=1e-13)
    assert found.sampled_error_bound <= found.sampled_error_plain * (1 + 1e-12)


@pytest.mark.parametrize("has_importance", [False, True])
@pytest.mark.parametrize("reach", REACH, ids=["even", "exponents"])
@pytest.mark.parametrize("maker", MAKERS)
def test_the_codes_of_a_rule_have_the_metrics_of_that_rule(maker: str, reach: int, has_importance: bool) -> None:
    """Among them every source scale; the metrics of rules come from counted pairs, another way to the same figures."""
    rng = np.random.default_rng(5)
    source = some_rows(maker, exponents_of(rng, reach))
    importance = importance_of(rng) if has_importance else None
    codes, magnitude, expected = converted(source, importance)
    found = measure_codes(source, codes, name="w", magnitude=magnitude, importance=importance)
    for field in dataclasses.fields(WeightMetrics):
        measured, stated = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "blocks_outside_normal":
            assert measured is None
        elif isinstance(stated, float) and field.name != "max_error_steps":
            assert math.isclose(measured, stated, rel_tol=1e-12), field.name
        else:
            assert measured == stated, field.name


def test_a_bf16_weight_is_measured_like_any_other() -> None:
    source = dequantize_int4(trained_like(8, seed=1))
    quantizer, magnitude = create_quantizer("native", rule="optimal", device="cpu"), measure(source)
    scale = quantizer.global_scale(magnitude, is_int4=False)
    codes, _ = quantizer.quantize(source, name="w", magnitude=magnitude, global_scale=scale)
    codes = perturbed(codes, np.random.default_rng(2))
    found = measure_codes(source, codes, name="w", magnitude=magnitude)
    difference = bf16_values(source.bits).astype(np.float64) - dequantize_nvfp4(codes)
    assert math.isclose(found.squared_error, float((difference**2).sum()), rel_tol=1e-12)
    assert found.num_codes is None


def test_codes_that_do_not_fit_are_refused() -> None:
    source = trained_like(8, seed=1)
    codes, magnitude, _ = converted(source)
    with pytest.raises(FormatError, match=r"w: NVFP4 codes \[4, 256\] for a weight \[8, 256\]"):
        measure_codes(source, codes.rows(0, 4), name="w", magnitude=magnitude)
    codes.block_scales[3, 3] |= 0x80
    with pytest.raises(FormatError, match="w: an NVFP4 block scale is negative or NaN"):
        measure_codes(source, codes, name="w", magnitude=magnitude)
