"""A GPU that is not here: triton compiles for its architecture, and hands over what it would launch.

triton's own launch code chooses what to compile, for pointers and sizes as on a device. So the PTX of a launch is that
of the kernel that would run on such a GPU.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

WARP = 32
ALIGNMENT = 16
"""triton compiles another kernel for pointers that are no multiples of it."""
SHARED_BYTES = 99 << 10
"""What a program may have on each of sm_90, sm_100, sm_103 and sm_120."""


@dataclass(frozen=True)
class Launch:
    """A launch of triton's: the kernel's PTX, its bytes of shared memory, and its arguments, constants left out."""

    ptx: str
    shared_bytes: int
    programs: int
    arguments: Sequence[Any]


class Target:
    """A GPU in the place of triton's driver: a launch on it calls a function."""

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
        ptx = Path(path).read_text()
        kinds = list(source.signature.values())

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
