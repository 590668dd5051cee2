"""Run by test_cuda_interpreted.py in a separate process: the triton kernels on the CPU, under triton's interpreter.

The interpreter must be switched on before triton is imported for the first time, so no test process can do it.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import zlib
from contextlib import closing
from dataclasses import replace

import numpy as np
from column_makers import assert_same_column_counts, exponents_of, importance_of, some_rows
from int4_makers import MAKERS, assert_same_counts, int4_weight, trained_like
from numpy.typing import NDArray

from k2convert.checkpoint.index import open_checkpoint
from k2convert.choices import Rule
from k2convert.forward.weights import WeightReader
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels import cuda, cuda_columns
from k2convert.quantize.metrics.pair_counts import count_pairs
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.magnitude import measure
from k2convert.quantize.rules.weighted import block_importance
from scripts.fixture_maker import TINY

KERNEL_RULES: tuple[Rule, ...] = ("optimal", "plain")
"""`weighted` is `optimal` here, by the same kernel."""


def compare(weight: Int4Weight, rule: Rule, global_scale: float) -> None:
    expected = RULES[rule].quantize_int4(weight, global_scale)
    result, counts = cuda.convert_int4(weight, rule=rule, global_scale=global_scale, device="cpu")
    assert np.array_equal(result.block_scales, expected.block_scales)
    assert np.array_equal(result.packed, expected.packed)
    assert_same_counts(counts, count_pairs(weight, expected, rule=rule))


def compare_maker(maker: str) -> None:
    weight = MAKERS[maker]()
    # The interpreter takes a second for some hundred blocks: a few rows from the start, the middle and the end.
    middle = weight.shape[0] // 2
    for rows in ((0, 3), (middle, middle + 3), (weight.shape[0] - 3, weight.shape[0])):
        part = weight.rows(*rows)
        for rule in KERNEL_RULES:
            compare(part, rule, RULES[rule].global_scale(measure(part), is_int4=True))


def compare_columns(
    weight: Int4Weight, importance: NDArray[np.uint8] | None, global_scale: float, rule: Rule = "weighted"
) -> None:
    by_importance = RULES[rule].quantize_weighted
    if importance is None or by_importance is None:
        expected = RULES[rule].quantize_int4(weight, global_scale)
    else:
        expected = by_importance(weight, global_scale, importance)
    result, counts = cuda_columns.convert_columns(
        weight, rule=rule, global_scale=global_scale, importance=importance, device="cpu"
    )
    assert np.array_equal(result.block_scales, expected.block_scales)
    assert np.array_equal(result.packed, expected.packed)
    assert_same_column_counts(counts, count_pairs(weight, expected, rule=rule, importance=importance))


def compare_columns_of_maker(maker: str) -> None:
    """Importance and exponents, together and alone, under a scale that fits and one that does not."""
    rng = np.random.default_rng(zlib.crc32(maker.encode()))
    for reach, step in ((0, -7), (4, 0)):
        weight = some_rows(maker, exponents_of(rng, reach))
        weight = weight.rows(rows := max(0, weight.shape[0] // 2 - 1), rows + 2)
        best = RULES["weighted"].global_scale(measure(weight), is_int4=True)
        compare_columns(weight, importance_of(rng), max(best * 2.0**step, 2.0**-126))
        if reach:
            compare_columns(weight, None, best, rule="optimal")


def compare_parts() -> None:
    """More elements and counters than one launch takes, no rows, and equal importance."""
    rng = np.random.default_rng(1)
    weight = trained_like(5, seed=3)
    weight = Int4Weight(weight.packed, weight.scale_bits, exponents_of(rng, 2))
    importance = importance_of(rng)
    scale = RULES["weighted"].global_scale(measure(weight), is_int4=True)
    cuda_columns.MAX_ELEMENTS = 3 * 256  # type: ignore[misc]
    compare_columns(weight, importance, scale)
    empty, counts = cuda_columns.convert_columns(
        weight.rows(0, 0), rule="weighted", global_scale=scale, importance=importance, device="cpu"
    )
    assert empty.shape == (0, 256)
    assert counts.keys.size == 0
    cuda_columns.MAX_CELLS = 1  # type: ignore[misc]
    compare_columns(weight, importance, scale)
    same = Int4Weight(weight.packed, weight.scale_bits)
    equal, _ = cuda_columns.convert_columns(
        same, rule="weighted", global_scale=scale, importance=np.full(256, 9, dtype=np.uint8), device="cpu"
    )
    optimal = RULES["optimal"].quantize_int4(same, scale)
    assert np.array_equal(equal.packed, optimal.packed)
    assert np.array_equal(equal.block_scales, optimal.block_scales)


def compare_tiny() -> None:
    """Rows of trained weights, with an importance like that of a text, and exponents."""
    rng = np.random.default_rng(2)
    with closing(WeightReader(open_checkpoint(TINY))) as reader:
        for name in ("mlp.experts.3.gate_proj", "mlp.experts.0.down_proj"):
            source = reader.read_source(f"model.layers.1.{name}")
            assert isinstance(source, Int4Weight)
            columns = source.shape[1]
            importance = block_importance(np.exp(rng.standard_normal(columns)).astype(np.float32))
            scale = RULES["weighted"].global_scale(measure(source), is_int4=True)
            for exponents in (None, exponents_of(rng, 1, columns)):
                compare_columns(replace(source.rows(0, 3), column_exponents=exponents), importance, scale)


def compare_scales() -> None:
    """Any power of two, plain scales that make steps underflow, and a number of blocks that does not fill a tile."""
    rng = np.random.default_rng(0)
    weight = int4_weight(rng.integers(-8, 8, 3 * 256), rng.choice([1, 0x60, 0x0101, 0x3C3C, 0x7A00, 0, 0x8000], 24))
    for exponent in (-126, -9, 0, 127):
        compare(weight, "optimal", 2.0**exponent)
    for scale in (2.0**-149, 3e-9, 0.75, 3.3e38):
        compare(weight, "plain", float(np.float32(scale)))


def compare_replicas() -> None:
    """More blocks than one set of counters takes."""
    cuda.MAX_COUNTED = 2 * cuda.TILE  # type: ignore[misc]
    for rule in KERNEL_RULES:
        weight = trained_like(40, seed=3)
        compare(weight, rule, RULES[rule].global_scale(measure(weight), is_int4=True))


if __name__ == "__main__":
    task = sys.argv[1]
    if task == "scales":
        compare_scales()
    elif task == "replicas":
        compare_replicas()
    elif task == "columns":
        compare_tiny()
        compare_columns_of_maker("wide-spread")
        compare_parts()
    elif task.startswith("columns-"):
        compare_columns_of_maker(task.removeprefix("columns-"))
    else:
        compare_maker(task)
    sys.stdout.write("equal\n")
