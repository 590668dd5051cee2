"""Metrics equal what an element-by-element comparison of source and decoded result says, and add up."""

import json
import math
import random
import zlib
from typing import get_args

import numpy as np
import pytest
import torch
from block_makers import any_codes, codes_of, int4_weight, scales_of, total_metrics, trained_like
from numpy.typing import NDArray

from k2convert.choices import Rule
from k2convert.quantize.formats.bf16 import Bf16Weight, Magnitude
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, dequantize_nvfp4
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules import RULES, quantize_best
from k2convert.quantize.rules.max import max_global_scale, quantize_max
from k2convert.quantize.rules.search_int4 import mse_global_scale
from k2convert.records.document import encode, parse


def convert(weight: Int4Weight, rule: Rule, magnitude: Magnitude | None = None) -> WeightMetrics:
    magnitude = magnitude or weight.magnitude()
    result = RULES[rule].quantize(weight, RULES[rule].global_scale(magnitude))
    return measure_quantized(weight, result, name="w", magnitude=magnitude)


def errors_of(weight: Int4Weight, result: Nvfp4Weight) -> NDArray[np.float64]:
    """The squared error of each row."""
    exact = codes_of(weight).double() * scales_of(weight).double().repeat_interleave(32, dim=-1)
    return ((exact.numpy() - dequantize_nvfp4(result)) ** 2).sum(axis=1)


def test_one_row_in_256_of_a_large_tensor_is_compared_with_max() -> None:
    weight = trained_like(4096, 4096, seed=4)
    magnitude = weight.magnitude()
    result = quantize_best(weight, mse_global_scale(magnitude))
    by_max = quantize_max(weight, max_global_scale(magnitude))
    runs = [measure_quantized(weight, result, name=name, magnitude=magnitude) for name in ("w", "v", "w")]
    assert runs[0] == runs[2]
    for name, found in zip("wv", runs, strict=False):
        rows = slice(zlib.crc32(name.encode()) % 256, None, 256)
        assert found.sampled_blocks == 16 * 4096 // 16
        assert found.sampled_error_achieved == pytest.approx(errors_of(weight, result)[rows].sum(), rel=1e-12)
        assert found.sampled_error_max == pytest.approx(errors_of(weight, by_max)[rows].sum(), rel=1e-12)
        assert found.achieved_to_max == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("rows", "columns", "sampled_rows"), [(64, 1024, 64), (5, 1 << 16, 3), (1, 1 << 16, 1)])
def test_a_small_or_flat_tensor_is_compared_with_max_in_at_least_two_rows(
    rows: int, columns: int, sampled_rows: int
) -> None:
    found = convert(trained_like(rows, columns, seed=2), "mse")
    assert found.sampled_blocks == sampled_rows * columns // 16
    assert found.achieved_to_max == pytest.approx(0.5, abs=0.03)


def test_a_wide_spread_of_scales_is_flagged_for_the_shared_set() -> None:
    codes = any_codes(2, 32, seed=5)
    near = int4_weight(codes, torch.tensor([[1.0], [2.0**-13]]).to(torch.bfloat16))
    far = int4_weight(codes, torch.tensor([[1.0], [0.99 * 2.0**-13]]).to(torch.bfloat16))
    assert convert(near, "mse").scale_spread_exceeded == 0
    assert convert(far, "mse").scale_spread_exceeded == 1
    partner = Magnitude(scale_max=2.0, amax=16.0, is_int4=True)
    assert convert(near, "mse", near.magnitude().merge(partner)).scale_spread_exceeded == 1
    assert total_metrics(convert(w, "mse") for w in (near, far, far)).scale_spread_exceeded == 2


@pytest.mark.parametrize("rule", get_args(Rule))
def test_an_empty_tensor_and_a_tensor_of_zeros_have_finite_figures(rule: Rule) -> None:
    zeros = int4_weight(torch.zeros(4, 64, dtype=torch.int8), torch.full((4, 2), 0.01, dtype=torch.bfloat16))
    metrics = convert(zeros, rule)
    assert (metrics.energy, metrics.squared_error, metrics.relative_mse) == (0.0, 0.0, 0.0)
    assert metrics.sqnr_db == math.inf
    assert metrics.equal_blocks == metrics.num_blocks == 16
    nothing = Int4Weight(np.zeros((0, 32), dtype=np.uint8), np.zeros((0, 2), dtype=np.uint16))
    metrics = convert(nothing, rule)
    assert metrics.num_weights == 0
    assert metrics.min_scale_byte is None


def test_metrics_survive_json_exactly() -> None:
    metrics = convert(trained_like(8, 256, seed=0), "mse")
    assert parse(WeightMetrics, encode(metrics).decode(), where="here") == metrics
    record = json.loads(encode(metrics))
    del record["energy"]
    with pytest.raises(ValueError, match="energy is missing"):
        parse(WeightMetrics, json.dumps(record), where="here")


def test_totals_are_sums_in_any_order_and_skip_what_a_tensor_does_not_have() -> None:
    parts = [convert(trained_like(8, 256, seed=seed), "mse") for seed in range(6)]
    bf16 = Bf16Weight(trained_like(8, 256, seed=9).bits)
    magnitude = bf16.magnitude()
    result = quantize_best(bf16, mse_global_scale(magnitude))
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
