"""The kernels for importance and column exponents give the bytes, counts and figures of rules/ and metrics/."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from column_makers import assert_same_column_counts, exponents_of, importance_of, some_rows
from int4_makers import MAKERS, int4_weight, trained_like

from k2convert.choices import Rule
from k2convert.errors import FormatError
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels.columns import convert_columns, figures_of_columns, measure_columns
from k2convert.quantize.metrics.int4_error import measure_error, pair_figures
from k2convert.quantize.metrics.pair_counts import count_pairs
from k2convert.quantize.quantizer import create_quantizer
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.magnitude import measure
from k2convert.quantize.rules.weighted import quantize_weighted

pytestmark = pytest.mark.usefixtures("instructions")


def assert_equals_rules(weight: Int4Weight, rule: Rule, global_scale: float, importance: np.ndarray | None) -> None:
    by_importance = RULES[rule].quantize_weighted
    if importance is None:
        expected = RULES[rule].quantize_int4(weight, global_scale)
    else:
        assert by_importance is not None
        expected = by_importance(weight, global_scale, importance)
    result, counts = convert_columns(weight, rule=rule, global_scale=global_scale, importance=importance)
    assert np.array_equal(result.block_scales, expected.block_scales)
    assert np.array_equal(result.packed, expected.packed)
    expected_counts = count_pairs(weight, expected, rule=rule, importance=importance)
    assert_same_column_counts(counts, expected_counts)
    figures = pair_figures(expected_counts, rule=rule, global_scale=global_scale)
    assert figures_of_columns(counts, rule=rule, global_scale=global_scale) == figures


@pytest.mark.parametrize("reach", [0, 1, 4])
@pytest.mark.parametrize("maker", MAKERS)
def test_weighted_equals_rules(maker: str, reach: int) -> None:
    rng = np.random.default_rng(zlib.crc32(maker.encode()) + reach)
    weight = some_rows(maker, exponents_of(rng, reach))
    g = RULES["weighted"].global_scale(measure(weight), is_int4=True)
    for global_scale in {max(g * 2.0**step, 2.0**-126) for step in (0, -7, 6)}:
        assert_equals_rules(weight, "weighted", global_scale, importance_of(rng))


@pytest.mark.parametrize("rule", ["optimal", "plain"])
@pytest.mark.parametrize("maker", MAKERS)
def test_exponents_equal_rules(maker: str, rule: Rule) -> None:
    rng = np.random.default_rng(zlib.crc32(maker.encode()))
    for reach in (2, 4):
        weight = some_rows(maker, exponents_of(rng, reach))
        assert measure_columns(weight, name="w") == measure(weight)
        assert_equals_rules(weight, rule, RULES[rule].global_scale(measure(weight), is_int4=True), None)


@pytest.mark.parametrize("reach", [0, 2])
def test_row_splits_and_threads_do_not_matter(reach: int) -> None:
    rng = np.random.default_rng(reach)
    weight, importance = trained_like(67, seed=1), importance_of(rng)
    weight = Int4Weight(weight.packed, weight.scale_bits, exponents_of(rng, reach))
    g = RULES["weighted"].global_scale(measure(weight), is_int4=True)

    def convert(rows: tuple[int, int]) -> np.ndarray:
        result, _ = convert_columns(weight.rows(*rows), rule="weighted", global_scale=g, importance=importance)
        return np.concatenate([result.packed, result.block_scales], axis=1)

    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(convert, pairwise([0, 1, 3, 40, 67])))
    assert np.array_equal(np.concatenate(parts), convert((0, 67)))


@pytest.mark.parametrize("rule", ["weighted", "optimal", "plain"])
def test_the_quantizer_gives_the_figures_of_the_definition(rule: Rule) -> None:
    rng = np.random.default_rng(7)
    weight, importance = trained_like(40, seed=2), importance_of(rng) if rule == "weighted" else None
    quantizer = create_quantizer("native", rule=rule, device="cpu")
    for reach in (0, 1, 3, 4):
        source = Int4Weight(weight.packed, weight.scale_bits, exponents_of(rng, reach))
        magnitude = quantizer.measure(source, name="w")
        assert magnitude == measure(source)
        g = quantizer.global_scale(magnitude, is_int4=True)
        result, metrics = quantizer.quantize(
            source, name="w", magnitude=magnitude, global_scale=g, importance=importance
        )
        seed = zlib.crc32(b"w")
        assert metrics == measure_error(
            source, result, rule=rule, magnitude=magnitude, sample_seed=seed, importance=importance
        )


def test_bf16_weights_by_importance_equal_rules() -> None:
    rng = np.random.default_rng(4)
    values = rng.standard_normal((24, 256)) * np.exp2(rng.integers(-12, 1, (24, 256)))
    values[3, :32] = 0
    weight = Bf16Weight((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    importance = importance_of(rng)
    quantizer = create_quantizer("native", rule="weighted", device="cpu")
    magnitude = quantizer.measure(weight, name="w")
    for step in (0, -8, 9, 119):
        g = quantizer.global_scale(magnitude, is_int4=False) * 2.0**step
        result, metrics = quantizer.quantize(
            weight, name="w", magnitude=magnitude, global_scale=g, importance=importance
        )
        expected = quantize_weighted(weight, g, importance)
        assert np.array_equal(result.packed, expected.packed)
        assert np.array_equal(result.block_scales, expected.block_scales)
        assert metrics == measure_error(
            weight, expected, rule="weighted", magnitude=magnitude, sample_seed=zlib.crc32(b"w"), importance=importance
        )


def test_unusable_scales_are_refused_by_name() -> None:
    scale_bits = np.full(8, 0x3C00)
    scale_bits[5] = 0x7F80
    weight = int4_weight(np.ones(256, dtype=np.int64), scale_bits)
    weight = Int4Weight(weight.packed, weight.scale_bits, np.ones(256, dtype=np.int8))
    with pytest.raises(FormatError, match=r"experts\.3\.up_proj"):
        measure_columns(weight, name="experts.3.up_proj")


def test_empty_weight() -> None:
    empty = Int4Weight(np.empty((0, 128), dtype=np.uint8), np.empty((0, 8), dtype=np.uint16))
    result, counts = convert_columns(empty, rule="weighted", global_scale=1.0, importance=np.ones(256, dtype=np.uint8))
    assert result.shape == (0, 256)
    assert counts.keys.size == 0
