"""Run by test_cuda_interpreted.py in a separate process: the triton kernels on the CPU, under triton's interpreter.

The interpreter must be switched on before triton is imported for the first time, so no test process can do it.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
from int4_makers import MAKERS, assert_same_counts, int4_weight, trained_like

from k2convert.choices import Rule
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels import cuda
from k2convert.quantize.metrics.pair_counts import count_pairs
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.magnitude import measure


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
        for rule in cuda.KERNELS:
            compare(part, rule, RULES[rule].global_scale(measure(part), is_int4=True))


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
    for rule in cuda.KERNELS:
        weight = trained_like(40, seed=3)
        compare(weight, rule, RULES[rule].global_scale(measure(weight), is_int4=True))


if __name__ == "__main__":
    task = sys.argv[1]
    if task == "scales":
        compare_scales()
    elif task == "replicas":
        compare_replicas()
    else:
        compare_maker(task)
    sys.stdout.write("equal\n")
