"""Compiles the triton kernels for GPUs that are not here, and prints the registers, spills and stack of each as JSON.

triton's own launch code chooses what to compile, for pointers and sizes as on a device. So these are the kernels that a
launch on such a GPU runs. tests/quantize/kernels/ptx executes their PTX.
"""

import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

from k2convert.choices import Rule
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.kernels import cuda

ARCHITECTURES = (90, 100, 103, 120)
"""H100 and H200, B200, B300, RTX PRO 6000."""
KERNELS = {"max_kernel", "mse_kernel", "channels_kernel"}
WARP = 32
ALIGNMENT = 16
"""triton compiles another kernel for pointers that are no multiples of it."""
SHARED_BYTES = 99 << 10
"""What a program may have on all of ARCHITECTURES."""


@dataclass(frozen=True)
class Launch:
    """A launch of triton's: the kernel's PTX, its bytes of shared memory, and its arguments, constants left out."""

    ptx: str
    shared_bytes: int
    programs: int
    arguments: Sequence[Any]


class Target:
    """A GPU that is not here, in the place of triton's driver: a launch on it calls a function."""

    _devices = count(1 << 20)

    def __init__(self, architecture: int, launch: Callable[[Launch], None]) -> None:
        # triton keeps what it compiled for each number of a device; real devices have small ones.
        self.architecture, self.launch, self.device = architecture, launch, next(self._devices)
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, WARP)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}

    def load_binary(self, name: str, _cubin: bytes, _shared: int, _device: int) -> tuple[None, str, int, int, int]:
        """Return module, function, registers, spills and the most threads of a program; triton reads only the last."""
        return None, name, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        path = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx")
        ptx, kinds = Path(path).read_text(), list(source.signature.values())

        def launcher(programs: int, _y: int, _z: int, *rest: Any) -> None:
            arguments = rest[-len(kinds) :]
            given = [value for value, kind in zip(arguments, kinds, strict=True) if kind != "constexpr"]
            tensors = [value for value in given if hasattr(value, "data_ptr")]
            assert not any(tensor.data_ptr() % ALIGNMENT for tensor in tensors), "on a device, tensors are aligned"
            self.launch(Launch(ptx, metadata.shared, programs, given))

        return launcher


@contextmanager
def launching_on(architecture: int, launch: Callable[[Launch], None]) -> Iterator[None]:
    """Make triton compile for an architecture, and hand every launch to a function."""
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        driver.set_active(Target(architecture, launch))
        try:
            yield
        finally:
            driver._active = None  # the driver of a device, if there is one, is found again


def convert_with_every_kernel() -> None:
    """Launch each kernel once, on a few rows as wide as an expert's."""
    weight = Int4Weight(np.zeros((2, 3584), dtype=np.uint8), np.full((2, 224), 0x3C00, dtype=np.uint16))
    importance = np.ones(7168, dtype=np.uint8)
    launches: tuple[tuple[Rule, Any], ...] = (("max", None), ("mse", None), ("imatrix", importance))
    for rule, own in launches:
        cuda.convert(weight, rule=rule, global_scale=1.0, importance=own, device="cpu")


def usage(architecture: int) -> dict[str, dict[str, int]]:
    """Return what ptxas says of each kernel of an architecture: registers of a lane, spilled bytes, bytes of stack."""
    found: dict[str, dict[str, int]] = {}
    with redirect_stdout(io.StringIO()) as log, launching_on(architecture, lambda _: None), knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        convert_with_every_kernel()
    reports = re.findall(r"entry function '(\w+)'(.*?)Used (\d+) registers", log.getvalue(), re.DOTALL)
    for name, report, registers in reports:
        stack, *spilled = (int(size) for size in re.findall(r"(\d+) bytes (?:stack frame|spill)", report))
        found[name] = {"registers": int(registers), "spilled": sum(spilled), "stack": stack}
    assert set(found) == KERNELS, log.getvalue()
    return found


if __name__ == "__main__":
    wanted = [int(name) for name in sys.argv[1:]] or ARCHITECTURES
    print(json.dumps({architecture: usage(architecture) for architecture in wanted}))
