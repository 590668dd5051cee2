"""The CPU kernels for ARM without ARM hardware: a cross compiler builds them, qemu runs them, on recorded calls.

The driver is kernels/cpp/module.cpp with a stand-in for nanobind (arm_driver.cpp), so it takes what the module takes.
"""

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from k2convert.quantize.gptq import rounding
from k2convert.quantize.kernels import _cpu, cpu
from k2convert.quantize.metrics import measure

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
