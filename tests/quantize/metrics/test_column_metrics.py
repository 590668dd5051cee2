"""Figures of weights with importance or column exponents: sums over all weights, taken in float64 one by one."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from int4_makers import any_bytes

from k2convert.quantize.formats.bf16 import Bf16Weight, bf16_values
from k2convert.quantize.formats.columns import divide_columns
from k2convert.quantize.formats.int4 import Int4Weight, dequantize_int4, unpack_int4
from k2convert.quantize.formats.nvfp4 import dequantize_nvfp4
from k2convert.quantize.metrics.weight_metrics import WeightMetrics, check_metrics, total_metrics
from k2convert.quantize.quantizer import create_quantizer

RNG = np.random.default_rng(0)
IMPORTANCE = RNG.integers(1, 256, 256).astype(np.uint8)
EXPONENTS = RNG.integers(-2, 3, 256).astype(np.int8)


def converted(source: Int4Weight | Bf16Weight, rule: str = "weighted") -> tuple[np.ndarray, WeightMetrics]:
    quantizer = create_quantizer("native", rule=rule, device="cpu")
    magnitude = quantizer.measure(source, name="w")
    g = quantizer.global_scale(magnitude, is_int4=isinstance(source, Int4Weight))
    result, metrics = quantizer.quantize(source, name="w", magnitude=magnitude, global_scale=g, importance=IMPORTANCE)
    return dequantize_nvfp4(result), metrics


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("is_int4", [False, True])
def test_weighted_sums_are_sums_over_all_weights(is_int4: bool, is_scaled: bool) -> None:
    source: Int4Weight | Bf16Weight = any_bytes(rows=16)
    if not is_int4:
        source = dequantize_int4(source)
    if is_scaled:
        source = divide_columns(source, EXPONENTS, name="w")
    if isinstance(source, Int4Weight):
        exact = unpack_int4(source.packed) * source.element_scales().astype(np.float64)
    else:
        exact = bf16_values(source.bits).astype(np.float64)
    written, metrics = converted(source)
    error = exact - written
    shares = IMPORTANCE / 255
    assert metrics.energy == pytest.approx((exact**2).sum(), rel=1e-12)
    assert metrics.squared_error == pytest.approx((error**2).sum(), rel=1e-12)
    assert metrics.weighted_energy == pytest.approx((exact**2 * shares).sum(), rel=1e-12)
    assert metrics.weighted_error == pytest.approx((error**2 * shares).sum(), rel=1e-12)
    assert metrics.num_weights == exact.size
    assert metrics.num_blocks == exact.size // 16
    assert metrics.num_nonzero == np.count_nonzero(exact)
    assert metrics.equal_nonzero == ((exact != 0) & (error == 0)).sum()
    assert metrics.equal_blocks == (error.reshape(-1, 16) == 0).all(axis=1).sum()
    assert metrics.sampled_error_achieved == pytest.approx(metrics.squared_error, rel=1e-12)
    assert metrics.sampled_error_bound <= metrics.sampled_error_achieved
    _, unweighted = converted(source, "optimal")
    assert unweighted.weighted_error is None
    assert unweighted.squared_error <= metrics.squared_error


def test_records_keep_the_weighted_sums_and_old_records_stay_valid() -> None:
    _, metrics = converted(any_bytes(rows=4))
    record = json.loads(json.dumps(metrics.to_dict()))
    check_metrics(record, where="shard")
    assert WeightMetrics.from_dict(record) == metrics
    assert total_metrics([metrics, metrics]).weighted_error == 2 * (metrics.weighted_error or 0)
    without = replace(metrics, weighted_energy=None, weighted_error=None)
    old = without.to_dict()
    assert "weighted_error" not in old
    check_metrics(old, where="shard")
    assert WeightMetrics.from_dict(old) == without
    del record["weighted_energy"]
    with pytest.raises(ValueError, match="weighted_energy"):
        check_metrics(record, where="shard")
    with pytest.raises(ValueError, match="weighted_energy"):
        WeightMetrics.from_dict(record)
