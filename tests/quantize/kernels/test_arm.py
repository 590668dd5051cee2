"""The kernels for ARM, under an emulator, give the results of x86-64, bit for bit. An ARM CPU runs all other tests.

A cross compiler builds kernels/cpp/module.cpp with a stand-in for nanobind (arm_driver.cpp), and qemu runs recorded
calls, so the driver takes what the module takes.
"""

import platform
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest
import torch
from gptq_direct import correlated, form_of, weights
from weight_makers import MAKERS, bf16_weight, exponents_of, some_rows, trained_like

from k2convert.choices import Rule
from k2convert.quantize.formats.bf16 import Bf16Weight, SourceWeight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.gptq import rounding
from k2convert.quantize.gptq.device_kernel import kernel_for
from k2convert.quantize.gptq.hessian import damp_hessian
from k2convert.quantize.gptq.rounding import round_gptq
from k2convert.quantize.kernels import _cpu, cpu
from k2convert.quantize.kernels.cpu import convert, measure_magnitude, mxfp4_counts
from k2convert.quantize.metrics import measure
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.rules import RULES

HERE = Path(__file__).parent
SOURCES = Path(cpu.__file__).parent / "cpp"
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
"""As in CMakeLists.txt, but a warning is an error."""
HEADERS = ("nanobind", "ndarray", "stl/optional", "stl/string", "stl/tuple", "stl/unique_ptr")

Call = tuple[str, tuple[Any, ...]]


def missing_tools() -> list[str]:
    return [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]


def build(folder: Path) -> Path:
    """Build the driver for ARM, and return it."""
    for header in HEADERS:
        path = folder / "nanobind" / f"{header}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    objects: list[Path] = []
    for source in [*sorted(set(SOURCES.glob("*.cpp")) - {SOURCES / "module.cpp"}), HERE / "arm_driver.cpp"]:
        objects.append(folder / f"{source.stem}.o")
        fused = ("-ffp-contract=fast",) if source.name == "vector_gptq.cpp" else ()
        includes = ("-I", SOURCES, "-isystem", folder)
        subprocess.run([COMPILER, *OPTIONS, *fused, *includes, "-c", source, "-o", objects[-1]], check=True)
    driver = folder / "driver"
    subprocess.run([COMPILER, "-static", *objects, "-o", driver, "-pthread"], check=True)
    return driver


class Recorder:
    """Stands for the extension module: passes calls on, and keeps their arguments as they were before."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        args += tuple(named.values())  # named ones are in the function's order
        self.calls.append((name, _copied(args)))
        return getattr(_cpu, name)(*args)


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Keep the calls of the kernels."""
    recorder = Recorder()
    cpu.search_tables.cache_clear()
    with ExitStack() as stack:
        for module in (cpu, measure, rounding):
            stack.enter_context(patch.object(module, "_cpu", recorder))
        stack.enter_context(patch.object(cpu, "SearchTables", recorder.SearchTables))
        yield recorder.calls


def run_here(calls: Sequence[Call], instructions: str) -> list[bytes]:
    """Return the results of each call on this machine: all arrays afterwards, and the numbers it returns."""
    before = _cpu.instructions()
    _cpu.use_instructions(instructions)
    results: list[bytes] = []
    for name, args in calls:
        given = _copied(args)
        returned = np.array(_flat(getattr(_cpu, name)(*given)), dtype=np.float64)
        results.append(b"".join(value.tobytes() for value in (*_arrays(given), returned)))
    _cpu.use_instructions(before)
    return results


def run_on_arm(driver: Path, calls: Sequence[Call], instructions: str) -> bytes:
    """Return the results of all calls, one after the other."""
    with tempfile.TemporaryFile() as file:
        for name, args in calls:
            file.write(_packed(name, args))
        file.seek(0)
        done = subprocess.run([EMULATOR, driver, instructions], stdin=file, stdout=subprocess.PIPE, check=True)
    return done.stdout


def _copied(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args)


def _arrays(args: Sequence[Any]) -> list[np.ndarray]:
    return [arg for arg in args if isinstance(arg, np.ndarray)]


def _flat(returned: Any) -> list[float]:
    if isinstance(returned, tuple):
        return [number for part in returned for number in _flat(part)]
    return [float(returned)] if isinstance(returned, bool | int | float) else []


def _packed(name: str, args: Sequence[Any]) -> bytes:
    """A call as the driver reads it."""
    parts = [struct.pack("<Q", len(name)), name.encode(), struct.pack("<Q", len(args))]
    for arg in args:
        if isinstance(arg, np.ndarray):
            parts += [b"a", struct.pack("<Q", arg.nbytes), arg.tobytes()]
        elif isinstance(arg, bool | int | float):
            parts += [b"s", struct.pack("<d", arg)]
        else:
            parts.append(b"n" if arg is None else b"t")
    return b"".join(parts)


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
        output = run_on_arm(driver, calls, ours)
        for number, (call, expected) in enumerate(zip(calls, run_here(calls, theirs), strict=True)):
            assert output.startswith(expected), f"{ours}: {call[0]}, call {number}"
            output = output[len(expected) :]
        assert not output


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
    assert {name for name, _ in calls} >= {"measure_bf16", "quantize_mse_bf16", "quantize_max_bf16", "count_mxfp4"}
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
