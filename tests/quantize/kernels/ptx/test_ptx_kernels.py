"""The PTX of every triton kernel, executed on the CPU, gives the bytes and counts of the rules that define them.

triton compiles for each architecture what it would launch on such a GPU. rules/ has no triton kernel but these three:
`gptq` rounds with PyTorch and C++.
"""

import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from channel_makers import exponents_of, importance_of, some_rows
from int4_makers import MAKERS, int4_weight
from numpy.typing import NDArray

pytest.importorskip("triton")

from ptx_device import ptx_device
from ptx_machine import Kernel

from k2convert.checkpoint.index import open_checkpoint
from k2convert.choices import Rule
from k2convert.forward.weights import WeightReader
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels import cpu, cuda
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.imatrix import block_importance
from k2convert.quantize.rules.max import measure

TARGETS = [
    pytest.param((90, "1"), id="sm_90"),
    *(pytest.param((number, "1"), id=f"sm_{number}", marks=pytest.mark.slow) for number in (100, 103, 120)),
    pytest.param((90, "0"), id="sm_90, products and sums apart", marks=pytest.mark.slow),
]
"""Architectures, and whether the compiler makes one operation of a product and a sum: triton 3.10 will not."""
MOST_ROWS = 100
"""1,600 blocks are twelve and a half tiles."""
UNREACHED = 3
"""Instructions of the way around an empty loop over a block's elements."""


@pytest.fixture(params=TARGETS)
def kernels(
    request: pytest.FixtureRequest, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Kernel]]:
    architecture, fuses = request.param
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", fuses)
    with ptx_device(architecture) as launched:
        yield launched


def assert_equal(
    weight: Int4Weight, rule: Rule, global_scale: float, importance: NDArray[np.uint8] | None = None
) -> None:
    expected = RULES[rule].quantize(weight, global_scale, importance)
    counted = cpu.convert(weight, rule=rule, global_scale=global_scale, importance=importance).outside_normal
    found = cuda.convert(weight, rule=rule, global_scale=global_scale, importance=importance, device="cpu")
    assert np.array_equal(found.weight.block_scales, expected.block_scales)
    assert np.array_equal(found.weight.packed, expected.packed)
    assert found.outside_normal == counted


def best_scale(weight: Int4Weight, rule: Rule) -> float:
    return RULES[rule].global_scale(measure(weight), is_int4=True)


def assert_all_reached(kernel: Kernel, unreached: int = 0) -> None:
    assert len(kernel.executed) - sum(kernel.executed) <= unreached


def test_max_and_mse_equal_their_rules(kernels: list[Kernel]) -> None:
    for maker in MAKERS.values():
        weight = maker()
        rows = np.unique(np.linspace(0, weight.shape[0] - 1, MOST_ROWS).astype(int))
        part = Int4Weight(weight.packed[rows], weight.scale_bits[rows])
        assert_equal(part, "max", best_scale(part, "max"))
        assert_equal(part, "mse", best_scale(part, "mse"))
    rng = np.random.default_rng(0)
    bits = rng.choice([1, 0x60, 0x0101, 0x3C3C, 0x7A00, 0, 0x8000], 24)
    weight = int4_weight(rng.integers(-8, 8, 3 * 256), bits)
    for exponent in (-126, -9, 0, 127):
        assert_equal(weight, "mse", 2.0**exponent)
    for scale in (2.0**-149, 3e-9, 0.75, 3.3e38):
        assert_equal(weight, "max", float(np.float32(scale)))
    of_max, of_mse = kernels
    assert_all_reached(of_max)
    assert_all_reached(of_mse)
    # 16 weights in some 220 instructions: this keeps `max` within reach of the memory's speed.
    assert len(of_max.executed) < 300


def test_importance_and_exponents_equal_their_rules(kernels: list[Kernel], request: pytest.FixtureRequest) -> None:
    # Under a scale 2**-7 of the best, every block is best served outside the normal range.
    both = (0, -7), (4, 0)
    is_slow = request.node.get_closest_marker("slow") is not None
    for place, maker in enumerate(MAKERS):
        rng = np.random.default_rng(zlib.crc32(maker.encode()))
        for reach, step in both if is_slow else (both[place % 2],):
            weight = some_rows(maker, exponents_of(rng, reach))
            best = best_scale(weight, "imatrix")
            assert_equal(weight, "imatrix", max(best * 2.0**step, 2.0**-126), importance_of(rng))
            if reach:
                assert_equal(weight, "mse", best)
    (kernel,) = kernels
    assert_all_reached(kernel, UNREACHED)


@pytest.mark.slow
def test_trained_weights_equal_their_rules(kernels: list[Kernel], trained: Path) -> None:
    """Rows of trained weights, with an importance like that of a text, and exponents of every reach."""
    rng = np.random.default_rng(2)
    with closing(WeightReader(open_checkpoint(trained))) as reader:
        for name in ("mlp.experts.3.gate_proj", "mlp.experts.0.down_proj"):
            source = reader.read_source(f"model.layers.1.{name}")
            assert isinstance(source, Int4Weight)
            columns, scale = source.shape[1], best_scale(source, "imatrix")
            importance = block_importance(np.exp(rng.standard_normal(columns)).astype(np.float32))
            for reach in range(5):
                exponents = exponents_of(rng, reach, columns)
                part = Int4Weight(source.packed[:40].copy(), source.scale_bits[:40].copy(), exponents)
                assert_equal(part, "imatrix", scale, importance)
    assert len(kernels) == 1, "sizes and the spread of exponents need no other kernel"
