"""Weights are made again by the kernels and, as a sample, by the reference arithmetic, which finds a wrong kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from int4_makers import trained_like
from numpy.typing import NDArray

from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.choices import Rule
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.int4 import Int4Weight, SourceWeight, dequantize_int4
from k2convert.quantize.kernels import cpu
from k2convert.quantize.quantizer import create_quantizer
from k2convert.validate.scaling import over_powers
from k2convert.validate.totals import differing_totals, is_same_error
from k2convert.validate.weights import CheckedWeight, WrittenWeight, check_weights

NAMES = LAYOUTS["modelopt"]


def convert(
    *sources: SourceWeight, rule: Rule = "mse", importance: NDArray[np.uint8] | None = None
) -> list[WrittenWeight]:
    """Convert weights that share a global scale, as a job does."""
    quantizer = create_quantizer("native", rule=rule, device="cpu")
    shared = quantizer.measure(sources[0], name="0")
    for source in sources[1:]:
        shared = shared.merge(quantizer.measure(source, name="x"))
    written: list[WrittenWeight] = []
    for number, source in enumerate(sources):
        scale = quantizer.global_scale(shared, is_int4=isinstance(source, Int4Weight))
        result, _ = quantizer.quantize(
            source, name=str(number), magnitude=shared, global_scale=scale, importance=importance
        )
        raw = NAMES.encode_scalar(scale)
        written.append(
            WrittenWeight(str(number), source, result.packed, result.block_scales, raw, importance=importance)
        )
    return written


def check_one(written: WrittenWeight, rule: Rule) -> CheckedWeight:
    (found,) = check_weights([written], names=NAMES, rule=rule)
    return found


def larger() -> Int4Weight:
    """A weight with scales four times those of seed 2."""
    source = trained_like(64, seed=2)
    return Int4Weight(source.packed, source.scale_bits + np.uint16(2 << 7))


@pytest.mark.parametrize("rule", ["mse", "max"])
def test_a_partner_elsewhere_decides_the_global_scale(rule: Rule) -> None:
    gate, up = convert(trained_like(64, seed=2), larger(), rule=rule)
    for weights, partners in (([gate, up], []), ([gate], [up.source]), ([up], [gate.source])):
        for found in check_weights(weights, partners=partners, names=NAMES, rule=rule):
            assert found.problems == ()
            assert found.metrics is not None
    assert "the rule gives" in check_one(gate, rule).problems[0]
    assert check_one(up, rule).problems == ()


@pytest.mark.parametrize("rule", ["mse", "max"])
@pytest.mark.parametrize("kind", ["int4", "bf16"])
def test_a_sample_of_one_block_in_64_is_made_again_by_the_reference_arithmetic(kind: str, rule: Rule) -> None:
    source: SourceWeight = trained_like(2048, seed=4)
    if kind == "bf16":
        source = dequantize_int4(source)
        assert isinstance(source, Bf16Weight)
    found = check_one(convert(source, rule=rule)[0], rule)
    assert found.problems == ()
    assert found.num_blocks / 64 <= found.sampled_blocks < found.num_blocks / 4


def test_a_kernel_that_is_wrong_in_the_same_way_is_found_by_the_reference_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = cpu.convert

    def one_step_up(weight: SourceWeight, **options: Any) -> Any:
        converted = right(weight, **options)
        scale_bytes = converted.weight.block_scales
        np.minimum(scale_bytes + np.uint8(1), np.uint8(0x7E), out=scale_bytes)
        return converted

    monkeypatch.setattr(cpu, "convert", one_step_up)
    (problem,) = check_one(convert(trained_like(64, seed=3))[0], "mse").problems
    assert "are not what the reference arithmetic gives" in problem


def test_without_a_rule_weights_are_only_decoded() -> None:
    written = convert(trained_like(64, seed=2))[0]
    (found,) = check_weights([written], names=NAMES, rule=None)
    assert (found.num_blocks, found.sampled_blocks, found.metrics, found.problems) == (0, 0, None, ())
    assert found.error == check_one(written, "mse").error


def columns_like(source: SourceWeight, *, is_scaled: bool) -> tuple[SourceWeight, NDArray[np.uint8]]:
    """The weight over powers of two, and an importance of its columns."""
    rng = np.random.default_rng(11)
    exponents = rng.integers(-4, 5, source.shape[1]).astype(np.int8)
    importance = rng.integers(1, 256, source.shape[1]).astype(np.uint8)
    return over_powers(source, exponents if is_scaled else None), importance


@pytest.mark.parametrize(("rule", "is_weighted"), [("imatrix", True), ("imatrix", False), ("mse", False)])
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("kind", ["int4", "bf16"])
def test_weights_with_exponents_and_importance_are_made_again(
    kind: str, is_scaled: bool, rule: Rule, is_weighted: bool
) -> None:
    source: SourceWeight = trained_like(192, seed=4)
    source = dequantize_int4(source) if kind == "bf16" else source
    source, importance = columns_like(source, is_scaled=is_scaled)
    (written,) = convert(source, rule=rule, importance=importance if is_weighted else None)
    found = check_one(written, rule)
    assert found.problems == ()
    assert found.num_blocks / 64 <= found.sampled_blocks
    assert (found.error.weighted_error is not None) == is_weighted
    assert found.metrics is not None
    stated = found.metrics.to_dict()
    assert is_same_error(found.error, stated)
    decoded = {key: value for key, value in found.error.to_dict().items() if key in stated}
    assert list(differing_totals({"it": found.metrics}, {"it": decoded})) == []


def test_a_block_scale_that_ignores_the_importance_is_found() -> None:
    source, importance = columns_like(trained_like(64, seed=2), is_scaled=False)
    free, weighted = convert(source)[0], convert(source, rule="imatrix", importance=importance)[0]
    blocks = np.flatnonzero((free.block_scales != weighted.block_scales).reshape(-1))
    assert blocks.size
    packed, scales = weighted.packed.copy(), weighted.block_scales.copy()
    packed.reshape(-1, 8)[blocks[0]] = free.packed.reshape(-1, 8)[blocks[0]]
    scales.reshape(-1)[blocks[0]] = free.block_scales.reshape(-1)[blocks[0]]
    changed = dataclasses.replace(weighted, packed=packed, block_scales=scales)
    problems = check_one(changed, "imatrix").problems
    assert "1 of 1,024 block scales" in problems[0]


def test_one_exponent_that_differs_is_found() -> None:
    source, _ = columns_like(trained_like(64, seed=2), is_scaled=True)
    assert isinstance(source, Int4Weight)
    assert source.channel_exponents is not None
    (written,) = convert(source)
    other = source.channel_exponents.copy()
    other[5] += 1 if other[5] < 4 else -1
    changed = dataclasses.replace(written, source=dataclasses.replace(source, channel_exponents=other))
    assert "block scales" in check_one(changed, "mse").problems[0]
