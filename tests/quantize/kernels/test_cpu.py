"""The CPU kernels give the bytes and the figures of rules/ and metrics/ for any weights, split and threads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from int4_makers import MAKERS, assert_same_counts, int4_weight, trained_like
from safetensors.torch import load_file

from k2convert.choices import Rule
from k2convert.errors import FormatError
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.kernels.cpu import KERNELS, convert_int4, figures_of_counts, measure_int4, sample_int4_error
from k2convert.quantize.metrics.int4_error import pair_figures
from k2convert.quantize.metrics.pair_counts import PairCounts, count_pairs, merge_counts
from k2convert.quantize.metrics.sampled_error import sample_error
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.magnitude import Magnitude, measure

pytestmark = pytest.mark.usefixtures("instructions")


def bits_of(scales: torch.Tensor) -> np.ndarray:
    return scales.view(torch.uint16).numpy()


def own_scale(weight: Int4Weight, rule: Rule) -> float:
    return RULES[rule].global_scale(measure(weight), is_int4=True)


def assert_equals_rules(weight: Int4Weight, rule: Rule, global_scale: float) -> None:
    expected = RULES[rule].quantize_int4(weight, global_scale)
    result, counts = convert_int4(weight, rule=rule, global_scale=global_scale)
    assert np.array_equal(result.block_scales, expected.block_scales)
    assert np.array_equal(result.packed, expected.packed)
    assert_same_counts(counts, count_pairs(weight, expected, rule=rule))


@pytest.mark.parametrize("rule", KERNELS)
@pytest.mark.parametrize("maker", MAKERS)
def test_bytes_and_counts_equal_rules(maker: str, rule: Rule) -> None:
    weight = MAKERS[maker]()
    assert_equals_rules(weight, rule, own_scale(weight, rule))


@pytest.mark.parametrize("exponent", [-126, -40, -12, -9, -6, -3, 0, 5, 60, 127])
def test_optimal_equals_rules_for_any_power_of_two(exponent: int) -> None:
    for maker in ("trained-minus-eight", "wide-spread", "few-magnitudes", "zeros"):
        assert_equals_rules(MAKERS[maker](), "optimal", 2.0**exponent)


@pytest.mark.parametrize("global_scale", [2.0**-149, 1e-40, 1.17e-38, 3e-9, 1.1e-5, 0.75, 1e6, 3.3e38])
def test_plain_equals_rules_for_any_global_scale(global_scale: float) -> None:
    for maker in ("trained-minus-eight", "wide-spread", "zeros"):
        assert_equals_rules(MAKERS[maker](), "plain", float(np.float32(global_scale)))


@pytest.mark.parametrize("rule", KERNELS)
def test_every_projection_of_the_tiny_checkpoint(tiny: Path, rule: Rule) -> None:
    index = json.loads((tiny / "model.safetensors.index.json").read_text())["weight_map"]
    shard = load_file(tiny / index["model.layers.1.mlp.experts.0.gate_proj.weight_packed"])
    modules = [name.removesuffix("_packed") for name in shard if name.endswith("weight_packed")]
    for module in modules:
        packed = shard[module + "_packed"].numpy()
        weight = Int4Weight(packed.view(np.uint8), bits_of(shard[module + "_scale"]))
        assert_equals_rules(weight, rule, own_scale(weight, rule))
    assert len(modules) == 48


@pytest.mark.parametrize("rule", KERNELS)
def test_row_splits_and_threads_do_not_matter(rule: Rule) -> None:
    weight = MAKERS["every-scale"]()
    scale = own_scale(weight, rule)
    whole, whole_counts = convert_int4(weight, rule=rule, global_scale=scale)
    cuts = [0, 1, 2, 100, 101, 999, 1000, weight.shape[0]]

    def convert(rows: tuple[int, int]) -> tuple[Nvfp4Weight, PairCounts]:
        return convert_int4(weight.rows(*rows), rule=rule, global_scale=scale)

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(convert, pairwise(cuts)))
    assert np.array_equal(np.concatenate([part.packed for part, _ in parts]), whole.packed)
    assert np.array_equal(np.concatenate([part.block_scales for part, _ in parts]), whole.block_scales)
    assert_same_counts(merge_counts([counts for _, counts in parts]), whole_counts)


@pytest.mark.parametrize("rule", KERNELS)
def test_one_thread_may_convert_tensor_after_tensor(rule: Rule) -> None:
    """A tensor leaves nothing in the thread's buffers for the next one."""
    for maker in ("every-scale", "trained", "zeros", "trained"):
        weight = MAKERS[maker]()
        assert_equals_rules(weight, rule, own_scale(weight, rule))


@pytest.mark.parametrize("maker", MAKERS)
def test_magnitude_equals_rules(maker: str) -> None:
    weight = MAKERS[maker]()
    assert measure_int4(weight, name="w") == measure(weight)


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xBF80, 0xFF80, 0x7E00, 0x8001])
def test_unusable_scales_are_refused_by_name(bits: int) -> None:
    scale_bits = np.full(8, 0x3C00)
    scale_bits[5] = bits
    weight = int4_weight(np.ones(256, dtype=np.int64), scale_bits)
    with pytest.raises(FormatError, match=r"experts\.3\.up_proj"):
        measure_int4(weight, name="experts.3.up_proj")


@pytest.mark.parametrize("rule", KERNELS)
@pytest.mark.parametrize("maker", MAKERS)
def test_sampled_figures_equal_rules(maker: str, rule: Rule) -> None:
    weight = MAKERS[maker]()
    magnitude = measure(weight)
    # Shared with a larger tensor, as gate and up share: plain's scale on the sample is then not the one of this tensor.
    larger = 1.25 if magnitude.amax < 2.0**120 else 1.0
    shared = Magnitude(scale_max=1.5 * larger * magnitude.scale_max, amax=larger * magnitude.amax)
    for whole in (magnitude, shared):
        scale = RULES[rule].global_scale(whole, is_int4=True)
        result, _ = convert_int4(weight, rule=rule, global_scale=scale)
        for seed in (0, 12345):
            arguments = {"rule": rule, "magnitude": whole, "sample_seed": seed}
            expected = sample_error(weight, result, **arguments)
            assert sample_int4_error(weight, result, **arguments) == expected


@pytest.mark.parametrize("rule", KERNELS)
def test_more_pairs_than_the_buffers_hold(rule: Rule) -> None:
    """Every usable scale in one tensor, and most blocks outside the normal range."""
    rng = np.random.default_rng(9)
    bits = rng.permutation(np.arange(0x7E00))
    weight = int4_weight(rng.integers(-8, 8, (bits.size, 32)), bits)
    assert_equals_rules(weight, rule, 1.0)


def test_empty_weight() -> None:
    weight = Int4Weight(np.empty((0, 128), dtype=np.uint8), np.empty((0, 8), dtype=np.uint16))
    for rule in KERNELS:
        result, counts = convert_int4(weight, rule=rule, global_scale=1.0)
        assert result.shape == (0, 256)
        assert counts.keys.size == 0


def test_large_tensor_of_every_rule() -> None:
    weight = trained_like(2048, seed=10)
    for rule in KERNELS:
        assert_equals_rules(weight, rule, own_scale(weight, rule))


@pytest.mark.parametrize("rule", KERNELS)
@pytest.mark.parametrize("maker", MAKERS)
def test_figures_of_pairs_equal_rules(maker: str, rule: Rule) -> None:
    weight = MAKERS[maker]()
    scale = own_scale(weight, rule)
    _, counts = convert_int4(weight, rule=rule, global_scale=scale)
    assert figures_of_counts(counts, rule=rule, global_scale=scale) == pair_figures(
        counts, rule=rule, global_scale=scale
    )
