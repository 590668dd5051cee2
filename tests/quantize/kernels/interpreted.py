"""Run by test_cuda_interpreted.py in a separate process: the triton kernels on the CPU, under triton's interpreter.

The interpreter must be switched on before triton is imported for the first time, so no test process can do it.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import zlib
from contextlib import closing
from dataclasses import replace

import numpy as np
from channel_makers import exponents_of, importance_of, some_rows
from int4_makers import MAKERS, int4_weight, trained_like
from numpy.typing import NDArray

from k2convert.checkpoint.index import open_checkpoint
from k2convert.choices import Rule
from k2convert.forward.weights import WeightReader
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels import cpu, cuda
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.imatrix import block_importance
from k2convert.quantize.rules.max import measure
from scripts.fixture_maker import TINY

KERNEL_RULES: tuple[Rule, ...] = ("mse", "max")
"""`imatrix` is `mse` here, by the same kernel."""


def compare(weight: Int4Weight, rule: Rule, global_scale: float, importance: NDArray[np.uint8] | None = None) -> None:
    expected = RULES[rule].quantize(weight, global_scale, importance)
    counted = cpu.convert(weight, rule=rule, global_scale=global_scale, importance=importance).outside_normal
    found = cuda.convert(weight, rule=rule, global_scale=global_scale, importance=importance, device="cpu")
    assert np.array_equal(found.weight.block_scales, expected.block_scales)
    assert np.array_equal(found.weight.packed, expected.packed)
    assert found.outside_normal == counted


def compare_maker(maker: str) -> None:
    """One tile of 128 blocks, because a tile takes the interpreter a second: the start, the middle and the end."""
    weight = MAKERS[maker]()
    last = weight.shape[0] - 1
    rows = np.unique([0, 1, 2, last // 2, last // 2 + 1, last - 2, last - 1, last])
    part = Int4Weight(weight.packed[rows], weight.scale_bits[rows])
    for rule in KERNEL_RULES:
        compare(part, rule, RULES[rule].global_scale(measure(part), is_int4=True))


def compare_columns_of_maker(maker: str) -> None:
    """Importance and exponents, together and alone, under a scale that fits and one that does not."""
    rng = np.random.default_rng(zlib.crc32(maker.encode()))
    for reach, step in ((0, -7), (4, 0)):
        weight = some_rows(maker, exponents_of(rng, reach))
        weight = weight.rows(rows := max(0, weight.shape[0] // 2 - 1), rows + 2)
        best = RULES["imatrix"].global_scale(measure(weight), is_int4=True)
        compare(weight, "imatrix", max(best * 2.0**step, 2.0**-126), importance_of(rng))
        if reach:
            compare(weight, "mse", best)


def compare_ends() -> None:
    """No rows, and equal importance."""
    weight, importance = trained_like(5, seed=3), np.full(256, 9, dtype=np.uint8)
    scale = RULES["imatrix"].global_scale(measure(weight), is_int4=True)
    found = cuda.convert(weight.rows(0, 0), rule="imatrix", global_scale=scale, importance=importance, device="cpu")
    assert found.weight.shape == (0, 256)
    equal = cuda.convert(weight, rule="imatrix", global_scale=scale, importance=importance, device="cpu").weight
    mse = RULES["mse"].quantize(weight, scale, None)
    assert np.array_equal(equal.packed, mse.packed)
    assert np.array_equal(equal.block_scales, mse.block_scales)


def compare_tiny() -> None:
    """Rows of trained weights, with an importance like that of a text, and exponents."""
    rng = np.random.default_rng(2)
    with closing(WeightReader(open_checkpoint(TINY))) as reader:
        for name in ("mlp.experts.3.gate_proj", "mlp.experts.0.down_proj"):
            source = reader.read_source(f"model.layers.1.{name}")
            assert isinstance(source, Int4Weight)
            columns = source.shape[1]
            importance = block_importance(np.exp(rng.standard_normal(columns)).astype(np.float32))
            scale = RULES["imatrix"].global_scale(measure(source), is_int4=True)
            for exponents in (None, exponents_of(rng, 1, columns)):
                compare(replace(source.rows(0, 3), channel_exponents=exponents), "imatrix", scale, importance)


def compare_scales() -> None:
    """Any power of two, plain scales that make steps underflow, and a number of blocks that does not fill a tile."""
    rng = np.random.default_rng(0)
    weight = int4_weight(rng.integers(-8, 8, 3 * 256), rng.choice([1, 0x60, 0x0101, 0x3C3C, 0x7A00, 0, 0x8000], 24))
    for exponent in (-126, -9, 0, 127):
        compare(weight, "mse", 2.0**exponent)
    for scale in (2.0**-149, 3e-9, 0.75, 3.3e38):
        compare(weight, "max", float(np.float32(scale)))


if __name__ == "__main__":
    for task in sys.argv[1:]:
        if task == "scales":
            compare_scales()
        elif task == "tiny":
            compare_tiny()
        elif task == "ends":
            compare_ends()
        elif task.startswith("columns-"):
            compare_columns_of_maker(task.removeprefix("columns-"))
        else:
            compare_maker(task)
        sys.stdout.write("equal\n")
