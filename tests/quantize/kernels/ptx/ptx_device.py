"""A GPU whose launches run on the CPU, from the PTX that triton compiles for them."""

from collections.abc import Iterator
from contextlib import contextmanager

from ptx_machine import Kernel
from ptx_target import Launch, launching_on
from torch import Tensor


def run_launch(kernel: Kernel, launch: Launch, seed: int) -> None:
    """Run a launch of triton's on CPU tensors."""
    arguments = [value.numpy() if isinstance(value, Tensor) else value for value in launch.arguments]
    kernel.launch(launch.programs, arguments, shared_bytes=launch.shared_bytes, seed=seed)


@contextmanager
def ptx_device(architecture: int) -> Iterator[list[Kernel]]:
    """Make triton's launches on CPU tensors run here; yields the kernels, in the order of their first launches."""
    kernels: list[Kernel] = []
    by_text: dict[str, Kernel] = {}
    seeds = iter(range(1 << 30))

    def launch(made: Launch) -> None:
        if made.ptx not in by_text:
            by_text[made.ptx] = Kernel(made.ptx)
            kernels.append(by_text[made.ptx])
        run_launch(by_text[made.ptx], made, next(seeds))

    with launching_on(architecture, launch):
        yield kernels
