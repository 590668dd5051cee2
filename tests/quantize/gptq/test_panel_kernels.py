"""The panel kernels of rule gptq, run by triton's interpreter, give every code and scale of the CPU's kernel.

The interpreter runs a kernel as it is, but it fuses no multiply-add and runs the threads of a program in step. So it
sees no rounding that a compiler changes, and no missing barrier. `scripts/gpu_day` checks both on a device.

TRITON_INTERPRET must be set before triton is imported, so every case is a process of its own: `test_panel_kernels.py
CASE [MUTATION]`.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
import torch
from command import ROOT
from gptq_direct import correlated, form_of
from torch import Tensor

from k2convert.quantize.gptq.device_kernel import DeviceKernel, TritonPanels, kernel_for
from k2convert.quantize.gptq.hessian import ONE_THREAD, DampedHessian, damp_hessian, identity_hessian
from k2convert.quantize.kernels import _cpu

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(_cpu.instructions() == "portable", reason="the CPU's kernel has no fused multiply-adds"),
]


def hessian_of(columns: int, seed: int = 0) -> DampedHessian:
    """Of inputs with an outlier channel."""
    inputs = correlated(4 * columns, columns, seed)
    inputs[:, 5] *= 30
    return damp_hessian(form_of(inputs), 0.5)


def targets(rows: int, columns: int) -> Tensor:
    """Rows like weights, and first eight at the edges."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.exp(0.4 * torch.randn(rows, columns // 16, generator=generator)).repeat_interleave(16, 1)
    target = 400 * torch.randn(rows, columns, generator=generator) * spread
    target[0] = 0
    target[1] *= 1e3  # saturates
    target[2] *= 1e-9  # below the least scale
    target[3] = 0
    target[3, 7] = 5.0
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, 6.0, -5.0, 0.0, -0.0, 1.0, 2.0, 7.0]
    target[4] = torch.tensor(halves).repeat(columns // 16)
    target[5, :16] = 0
    target[6] *= 1e-41  # subnormal
    target[7] *= 1e25
    return target


def ties() -> Tensor:
    """Rows with a number halfway between two values, under a scale that the others make the best one."""
    numbers = torch.tensor([5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 5.0])
    target = torch.full((16, 32), 6.0)
    target[:, 0::16] = torch.cat([numbers, -numbers])[:, None]
    for column, value in ((1, 4.0), (2, 4.0), (4, 4.0), (3, 1.5), (5, 0.5), (8, 1.5), (9, 0.5), (12, 1.5), (14, 0.5)):
        target[:, column::16] = value
    return target


def rounded_alike(target: Tensor, hessian: DampedHessian, sweeps: int) -> bool:
    kernels = (DeviceKernel(TritonPanels()), kernel_for("cpu"))
    ours, theirs = (kernel.round(target, hessian, sweeps=sweeps) for kernel in kernels)
    return all(map(torch.equal, ours, theirs))


def tried_alike(target: Tensor) -> bool:
    """With factors of their own for the rows."""
    makers = [lambda seed=seed: hessian_of(target.shape[1], seed) for seed in range(2)]
    kernels = (DeviceKernel(TritonPanels()), kernel_for("cpu"))
    ours, theirs = (kernel.try_each(target, makers, ONE_THREAD) for kernel in kernels)
    return all(map(torch.equal, ours, theirs))


CASES: Final[dict[str, Callable[[], bool]]] = {
    "a first pass": lambda: rounded_alike(targets(9, 32), hessian_of(32), 0),
    "ties": lambda: rounded_alike(ties(), identity_hessian(32, device="cpu"), 2),
    "two panels and two sweeps": lambda: rounded_alike(targets(9, 144), hessian_of(144), 2),
    "factors for each row": lambda: tried_alike(targets(9, 48)),
}
MUTATIONS: Final = {
    "ties of step 2": ("ties", "25165824.0", "25165826.0"),
    "ties of step 1": ("ties", "12582912.0, 25165824.0", "12582913.0, 25165824.0"),
    "ties of step 1/2": ("ties", "6291456.0", "6291456.5"),
    "the factor of other rows": ("factors for each row", "number = (first // group)", "number = (first // group * 0)"),
}
"""Each with the case that finds it, and what is in the place of what."""


def interpreted(*words: str) -> str:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_the_cpu(case: str) -> None:
    assert interpreted(case) == "equal\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_kernel_that_is_wrong_in_one_place_is_caught(name: str) -> None:
    assert interpreted(MUTATIONS[name][0], name) == "different\n"


def plant(right: str, wrong: str, folder: Path) -> None:
    from k2convert.quantize.gptq import panel_kernels

    text = Path(panel_kernels.__file__).read_text()
    assert text.count(right) == 1
    path = folder / "wrong_kernels.py"
    path.write_text(text.replace(right, wrong))
    module = runpy.run_path(str(path))
    for kernel in ("round_kernel", "improve_kernel"):
        setattr(panel_kernels, kernel, module[kernel])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        if len(sys.argv) > 2:
            plant(*MUTATIONS[sys.argv[2]][1:], folder=Path(name))
        sys.stdout.write("equal\n" if CASES[sys.argv[1]]() else "different\n")
