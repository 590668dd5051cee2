"""The kernels for ARM, under an emulator, give the results of x86-64, bit for bit. An ARM CPU runs all other tests."""

import platform
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from arm_driver import Call, build, missing_tools, recorded, run_here, run_on_arm
from gptq_direct import correlated, form_of, weights
from weight_makers import MAKERS, bf16_weight, exponents_of, some_rows, trained_like

from k2convert.choices import Rule
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.gptq.device_kernel import kernel_for
from k2convert.quantize.gptq.hessian import damp_hessian
from k2convert.quantize.gptq.rounding import round_gptq
from k2convert.quantize.kernels import _cpu
from k2convert.quantize.kernels.cpu import convert, measure_magnitude, mxfp4_counts
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.rules import RULES

LEVELS: Final = {"neon": "avx2", "portable": "portable"}
"""Instructions of ARM, and those of x86-64 that compute the same, with fused multiply-adds in gptq or without."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_tools()), reason=f"not found: {', '.join(missing_tools())}"),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or _cpu.instructions() != "avx2", reason="needs AVX2 to compare with"
    ),
]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("arm"))


def record(source: SourceWeight, rule: Rule, seed: int = 0) -> None:
    """Convert and measure a weight, and measure other bytes too."""
    magnitude = measure_magnitude(source, name="w")
    result = convert(source, rule=rule, global_scale=RULES[rule].global_scale(magnitude)).weight
    rng = np.random.default_rng(seed)
    packed, scales = result.packed.copy(), result.block_scales.copy()
    other = rng.random(packed.shape) < 0.1
    packed[other] = rng.integers(0, 256, other.sum())
    other = rng.random(scales.shape) < 0.1
    scales[other] = rng.integers(0, 0x7F, other.sum())
    for written in (result, Nvfp4Weight(packed, scales, result.global_scale)):
        measure_quantized(source, written, name="w", magnitude=magnitude)


def assert_equal_everywhere(driver: Path, calls: Sequence[Call]) -> None:
    for ours, theirs in LEVELS.items():
        found = run_on_arm(driver, calls, ours)
        for place, (call, expected) in enumerate(zip(calls, run_here(calls, theirs), strict=True)):
            assert found.startswith(expected), f"{ours}: {call[0]}, call {place}"
            found = found[len(expected) :]
        assert not found


def test_int4_weights(driver: Path) -> None:
    """Every maker, without and with exponents."""
    with recorded() as calls:
        for maker, make in MAKERS.items():
            record(make(), "mse")
            record(make(), "max")
            for reach in (0, 1, 2, 4):
                rng = np.random.default_rng(zlib.crc32(maker.encode()) + reach)
                record(some_rows(maker, exponents_of(rng, reach)), "mse", seed=reach)
        record(trained_like(1001, seed=1), "mse")
        for exponent in (-126, -60, -16, -3, 0, 5, 30, 118, 127):
            convert(MAKERS["wide-spread"](), rule="mse", global_scale=2.0**exponent)
    assert {name for name, _ in calls} >= {"convert_mse", "convert_max", "measure_int4"}
    assert_equal_everywhere(driver, calls)


def test_other_formats(driver: Path) -> None:
    rng = np.random.default_rng(3)
    with recorded() as calls:
        for rule in ("mse", "max"):
            record(bf16_weight(weights(64, 256).bfloat16()), rule)
            record(Bf16Weight(rng.integers(0, 128, (16, 256), np.uint16) | 0x8000), rule)
        mxfp4_counts(
            Mxfp4Weight(rng.integers(0, 256, (500, 128), np.uint8), rng.integers(0, 255, (500, 8)).astype(np.uint8))
        )
    assert {name for name, _ in calls} >= {"measure_bf16", "quantize_mse_bf16", "quantize_max_bf16", "tally_mxfp4"}
    assert_equal_everywhere(driver, calls)


@pytest.mark.parametrize(("rows", "columns"), [(50, 128), (97, 272), (48, 2048)])
def test_gptq(driver: Path, rows: int, columns: int) -> None:
    """Vectors of four floats, not of eight, add in the same order, so the codes are equal too."""
    torch.manual_seed(rows)
    target = weights(rows, columns)
    target[:8, 1::2] = target[:8, 1::2].round(decimals=3)
    hessian = damp_hessian(form_of(correlated(2 * columns, columns)), 0.2)
    with recorded() as calls:
        for sweeps in (0, 2):
            round_gptq(target, 2.0**-13, hessian, kernel_for("cpu"), sweeps=sweeps)
    assert len(calls) >= 2
    assert_equal_everywhere(driver, calls)
