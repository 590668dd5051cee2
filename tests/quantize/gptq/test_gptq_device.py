"""A device rounds as the CPU does, or is refused before it rounds a weight; and how much it is asked to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gptq_direct import correlated, form_of
from panel_reference import ReferencePanels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from k2convert.errors import PlanError
from k2convert.quantize.gptq import hessian, moments
from k2convert.quantize.gptq.device_kernel import PANEL, DeviceKernel, check_kernel
from k2convert.quantize.gptq.hessian import damp_hessian
from k2convert.quantize.gptq.moments import CrossMoments, Moments, WeightedTokens, correct
from k2convert.quantize.gptq.rounding import choose_damping

VIEWS = frozenset(
    "view slice select expand t transpose diagonal alias detach unsqueeze squeeze split unbind _unsafe_view permute"  # noqa: SIM905
    " as_strided lift_fresh empty new_empty empty_like".split()
)
"""What starts nothing on a device."""


class Count(TorchDispatchMode):
    """Counts the operations that would start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


class CountedPanels:
    """Panels that do nothing."""

    def __init__(self) -> None:
        self.launches = 0

    def round(self, *tensors: Tensor, group: int, start: int) -> None:
        tensors[3].zero_()
        tensors[4].zero_()
        tensors[5].fill_(0x38)
        self.launches += 1 - 3  # without these three

    def improve(self, *tensors: Tensor, start: int) -> None:
        self.launches += 1


def started(run: Callable[[DeviceKernel], object]) -> int:
    """The kernels that a second call starts: operations of torch, and panels."""
    run(DeviceKernel(CountedPanels()))
    panels = CountedPanels()
    with Count() as count:
        run(DeviceKernel(panels))
    return count.operations + panels.launches


def moments_of(tokens: int, columns: int) -> tuple[Moments, CrossMoments]:
    inputs = correlated(tokens, columns)
    halves = WeightedTokens.by_halves(torch.ones(tokens), torch.arange(tokens) % 2)
    sums = Moments.start(columns, device="cpu")
    sums.add(inputs, halves)
    residual = CrossMoments.start(columns, 24, device="cpu")
    residual.add(inputs, torch.randn(tokens, 24), halves)
    return sums.complete(), residual


def per_panel(run: Callable[[int], Callable[[DeviceKernel], object]]) -> tuple[int, int]:
    """The kernels that a call starts however many panels there are, and those for each panel, from two sizes."""
    few, many = (started(run(panels * PANEL)) for panels in (2, 5))
    assert (many - few) % 3 == 0
    each = (many - few) // 3
    return few - 2 * each, each


def test_a_layer_of_k2_starts_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 groups of gate and up with 56 panels, 384 downs with 16: their codes, and the tries of the damping."""
    for module in (hessian, moments):  # a device gets whole matrices
        monkeypatch.setattr(module, "cut", lambda size, *_: [slice(0, size)])

    def codes(columns: int) -> Callable[[DeviceKernel], object]:
        hessian = damp_hessian(form_of(correlated(2 * columns, columns)), 0.5)
        return lambda kernel: kernel.round(torch.ones(4, columns), hessian, sweeps=2)

    def tries(columns: int) -> Callable[[DeviceKernel], object]:
        sums, _ = moments_of(200, columns)
        return lambda kernel: choose_damping(sums, torch.ones(64, columns), 1.0, kernel)

    once, each = per_panel(codes)
    of_codes = 48 * (once + 56 * each) + 384 * (once + 16 * each)
    once, each = per_panel(tries)
    of_tries = 384 * (once + 16 * each)
    sums, residual = moments_of(1200, 64)
    of_corrections = 384 * started(lambda _: correct(sums, residual))
    assert of_codes < 100_000, of_codes
    assert of_tries < 200_000, of_tries
    assert of_corrections < 100_000, of_corrections


class WrongPanels(ReferencePanels):
    """Panels with one mistake."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def round(self, *tensors: Tensor, group: int, start: int) -> None:
        super().round(*tensors, group=group, start=start)
        if self.kind == "one scale of a row":
            tensors[5][70, 0] += 1

    def improve(self, *tensors: Tensor, start: int) -> None:
        super().improve(*tensors, start=start)
        if self.kind == "changes that are not told":
            tensors[7].zero_()


def test_a_device_that_rounds_as_the_cpu_does_passes() -> None:
    check_kernel(DeviceKernel(ReferencePanels()), "cpu")


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["one scale of a row", "changes that are not told"])
def test_a_device_with_other_answers_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "to", lambda self, *_, **__: self)  # a tensor that is sent to a device stays
    with pytest.raises(PlanError, match=r"cuda:7: rule gptq rounds .* Use --device cpu") as refused:
        check_kernel(DeviceKernel(WrongPanels(kind)), "cuda:7")
    assert "otherwise than the CPU does" in str(refused.value)
