"""The panel kernels of rule gptq: after every launch of their PTX, all tensors are those of the reference in NumPy."""

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gptq_direct import correlated, form_of
from panel_reference import ReferencePanels, same
from ptx_device import ptx_device
from ptx_machine import Kernel

from k2convert.quantize.gptq import panel_kernels
from k2convert.quantize.gptq.curvature import ALONE, Curvature, even_curvature, make_curvature
from k2convert.quantize.gptq.device_kernel import DeviceKernel, TritonPanels, kernel_for

TARGETS = (90, 100, 103, 120)
"""sm_90 and so on: the architectures of the GPUs."""


class CheckedPanels(TritonPanels):
    """Compares every launch with the reference."""

    def round(self, *tensors: Tensor, group: int, start: int) -> None:
        expected = [tensor.clone() for tensor in tensors]
        super().round(*tensors, group=group, start=start)
        ReferencePanels().round(*expected, group=group, start=start)
        assert all(map(same, tensors, expected)), f"round at {start}"

    def improve(self, *tensors: Tensor, start: int) -> None:
        expected = [tensor.clone() for tensor in tensors]
        super().improve(*tensors, start=start)
        ReferencePanels().improve(*expected, start=start)
        assert all(map(same, tensors, expected)), f"improve at {start}"


def curvature_of(columns: int, seed: int = 0) -> Curvature:
    """Of inputs with an outlier channel."""
    inputs = correlated(4 * columns, columns, seed)
    inputs[:, 5] *= 30
    return make_curvature(form_of(inputs), 0.5)


def targets(rows: int, columns: int) -> Tensor:
    """Rows like weights, and first some at the edges."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.exp(0.4 * torch.randn(rows, columns // 16, generator=generator)).repeat_interleave(16, 1)
    target = 400 * torch.randn(rows, columns, generator=generator) * spread
    target[0] = 0
    target[1] *= 1e3  # saturates
    target[2] *= 1e-9  # below the least scale
    target[3] = 0
    target[3, 77] = 5.0
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, 6.0, -5.0, 0.0, -0.0, 1.0, 2.0, 7.0]
    target[4] = torch.tensor(halves).repeat(columns // 16)
    target[5, :16] = 0
    target[6] *= 1e-41  # subnormal
    target[7] *= 1e25
    return target


def ties() -> Tensor:
    """Rows with a number halfway between two values, under a scale that the others make the best one."""
    numbers = torch.tensor([5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 5.0])
    target = torch.full((16, 128), 6.0)
    target[:, 0::16] = torch.cat([numbers, -numbers])[:, None]
    for column, value in ((1, 4.0), (2, 4.0), (4, 4.0), (3, 1.5), (5, 0.5), (8, 1.5), (9, 0.5), (12, 1.5), (14, 0.5)):
        target[:, column::16] = value
    return target


def round_everything() -> None:
    """A whole panel and one of five blocks, a program with a row too few, ties, and factors of their own for rows."""
    kernel = DeviceKernel(CheckedPanels())
    kernel.round(targets(11, 208), curvature_of(208), sweeps=2)
    kernel.round(ties(), even_curvature(128, device="cpu"), sweeps=2)
    makers = [lambda seed=seed: curvature_of(144, seed) for seed in range(3)]
    found = kernel.try_each(targets(9, 144), makers, ALONE)
    for values, make in zip(found, makers, strict=True):
        packed, scales = kernel.round(targets(9, 144), make(), sweeps=0)
        alone = kernel_for("cpu").round(targets(9, 144), make(), sweeps=0)
        assert torch.equal(packed, alone[0])
        assert torch.equal(scales, alone[1])
        assert values.shape == (9, 144)


@pytest.fixture(params=TARGETS, ids="sm_{}".format)
def kernels(request: pytest.FixtureRequest, one_thread: None) -> Iterator[list[Kernel]]:
    with ptx_device(request.param) as launched:
        yield launched


@pytest.mark.quick(1)
def test_a_first_pass_gives_the_numbers_of_the_reference(kernels: list[Kernel]) -> None:
    DeviceKernel(CheckedPanels()).round(targets(9, 80), curvature_of(80), sweeps=0)
    assert len(kernels) == 1


@pytest.mark.slow
def test_every_launch_gives_the_numbers_of_the_reference(kernels: list[Kernel]) -> None:
    round_everything()
    assert len(kernels) == 2, "rounding, and improving"
    for kernel in kernels:
        assert all(kernel.executed), "every instruction was reached"


MUTATIONS = {
    "an update that rounds twice": (
        "tl.math.fma(-error, tl.load(factor + j * stride + k), rest[k - j])",
        "rest[k - j] - error * tl.load(factor + j * stride + k)",
    ),
    "the last of equal scales": (
        "tl.min(tl.where(losses == least, lane, 15), axis=1)",
        "tl.max(tl.where(losses == least, lane, 0), axis=1)",
    ),
    "earlier columns from the right": ("depth = block * BLOCK + i\n", "depth = block * BLOCK + 15 - i\n"),
    "ties of step 2": ("25165824.0", "25165826.0"),
    "ties of step 1": ("12582912.0, 25165824.0", "12582913.0, 25165824.0"),
    "ties of step 1/2": ("6291456.0", "6291456.5"),
    "the inverse of another column": ("tl.load(form_inverses + begin + j)", "tl.load(form_inverses + begin)"),
    "a scale for half of the loss": ("tl.constexpr(0.9999)", "tl.constexpr(0.5)"),
    "the factor of other rows": ("number = (first // group)", "number = (first // group * 0)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_kernel_that_is_wrong_in_one_place_is_caught(
    name: str, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(panel_kernels.__file__).read_text()
    right, wrong = MUTATIONS[name]
    assert text.count(right) == 1
    path = tmp_path / "wrong_kernels.py"
    path.write_text(text.replace(right, wrong))
    module = runpy.run_path(str(path))
    for kernel in ("round_kernel", "improve_kernel"):
        monkeypatch.setattr(panel_kernels, kernel, module[kernel])
    with ptx_device(90), pytest.raises(AssertionError, match=r"(round|improve) at"):
        round_everything()
