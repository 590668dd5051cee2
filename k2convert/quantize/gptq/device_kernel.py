"""GPTQ under a damped Hessian, on a CUDA device: a panel of 128 columns is a launch and a product.

    first pass   weights behind the panel -= errors @ factor
    a sweep      gradient -= changes @ form; in the last sweep only behind the panel, as nobody reads the others

The sums inside a panel are ordered (panel_kernels.py), those of a product are cuBLAS's. So few codes differ from a
CPU's, 0 of a million in a trial, and a device must show that before it rounds a weight: `check_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import PlanError
from k2convert.quantize.formats.nvfp4 import E2M1_VALUES, ONE_BYTE, SIGN_BIT
from k2convert.quantize.gptq.hessian import SMALL, CheckStop, DampedHessian, Team, damp_hessian, never_stop
from k2convert.quantize.gptq.rounding import CpuKernel, RoundingKernel, decoded_scales
from k2convert.quantize.kernels import _cpu

PANEL: Final = 128
"""Columns whose errors are collected before the columns behind them see any."""

_ROWS: Final = 2
_WARPS: Final = 1
"""Rows and warps of a program: the fastest of eight forms on an H200."""


class Panels(Protocol):
    """Runs a panel; all tensors are contiguous and on one device."""

    def round(self, *tensors: Tensor, group: int, start: int) -> None:
        """Round the columns of a panel: weights [n, K], factors [n / group, K, K], inverses [n / group, K], values
        [n, K], errors [n, 128], scale bytes uint8 [n, K/16].
        """
        ...

    def improve(self, *tensors: Tensor, start: int) -> None:
        """Improve the blocks of a panel: gradient [n, K], form [K, K], its inverses [K], factors of the blocks
        [K/16, 16, 16], their inverses [K], inverses of the blocks [K/16, 16, 16], values [n, K], changes [n, 128],
        scale bytes uint8 [n, K/16].
        """
        ...


class TritonPanels:
    """Runs a panel by a kernel of triton, which a CUDA build of torch has."""

    def round(self, *tensors: Tensor, group: int, start: int) -> None:
        """Start the kernel."""
        self._start("round_kernel", tensors, start, group)

    def improve(self, *tensors: Tensor, start: int) -> None:
        """Start the kernel."""
        self._start("improve_kernel", tensors, start)

    def _start(self, name: str, tensors: Sequence[Tensor], start: int, *sizes: int) -> None:
        from k2convert.quantize.gptq import panel_kernels

        kernel: Any = getattr(panel_kernels, name)
        rows, columns = tensors[0].shape
        if rows == 0:
            return
        order = (rows, columns, *sizes, start, min(PANEL, columns - start) // BLOCK_SIZE)
        kernel[(-(-rows // _ROWS),)](*tensors, *order, ROWS=_ROWS, num_warps=_WARPS, enable_fp_fusion=False)


@dataclass(frozen=True, slots=True)
class DeviceKernel:
    """Rounds all rows together. Calls `check_stop` before every panel."""

    panels: Panels
    check_stop: CheckStop = never_stop

    def round(self, target_NK: Tensor, hessian: DampedHessian, *, sweeps: int) -> tuple[Tensor, Tensor]:
        """Return codes uint8 [N, K/2] and scale bytes uint8 [N, K/16] for a target f32 in units of the global scale.

        On the device of the target and the damped Hessian.
        """
        inverses = 1 / hessian.factor.diagonal()
        values, scale_bytes = self._first_pass(
            target_NK, hessian.factor[None], inverses[None], is_identity=hessian.damping is None
        )
        if sweeps:
            self._improve(target_NK, hessian, sweeps, values, scale_bytes)
        return _encode(values, scale_bytes)

    def try_each(self, target_nK: Tensor, makers: Sequence[Callable[[], DampedHessian]], team: Team) -> list[Tensor]:  # noqa: ARG002
        """As RoundingKernel. Small damped Hessians are tried in one launch for a panel."""
        rows, columns = target_nK.shape
        together = len(makers) if columns <= SMALL else 1
        rounded: list[Tensor] = []
        for first in range(0, len(makers), together):
            factors = torch.stack([make().factor for make in makers[first : first + together]])
            # A program has rows of one factor.
            padded = torch.nn.functional.pad(target_nK, (0, 0, 0, -rows % _ROWS))
            targets = padded.expand(factors.shape[0], -1, -1).reshape(-1, columns)
            values, _ = self._first_pass(targets, factors, 1 / factors.diagonal(dim1=1, dim2=2))
            rounded += values.view(factors.shape[0], -1, columns)[:, :rows]
        return rounded

    def _first_pass(
        self, target: Tensor, factors_CKK: Tensor, inverses_CK: Tensor, *, is_identity: bool = False
    ) -> tuple[Tensor, Tensor]:
        rows, columns = target.shape
        count = factors_CKK.shape[0]
        weights = target.clone()
        values = torch.empty_like(weights)
        errors = weights.new_empty(rows, PANEL)
        scale_bytes = torch.empty(rows, columns // BLOCK_SIZE, dtype=torch.uint8, device=target.device)
        shared = (factors_CKK.contiguous(), inverses_CK.contiguous(), values, errors, scale_bytes)
        group = max(rows // count, 1) if count > 1 else rows + _ROWS
        for start, stop in _panels(columns):
            self.check_stop()
            self.panels.round(weights, *shared, group=group, start=start)
            if stop < columns and not is_identity:
                behind = weights.view(count, -1, columns)[:, :, stop:]
                moved = errors.view(count, -1, PANEL)[:, :, : stop - start]
                if count == 1:
                    behind[0].addmm_(moved[0], factors_CKK[0, start:stop, stop:], alpha=-1)
                else:
                    behind.baddbmm_(moved, factors_CKK[:, start:stop, stop:], alpha=-1)
        return values, scale_bytes

    def _improve(
        self, target: Tensor, hessian: DampedHessian, sweeps: int, values: Tensor, scale_bytes: Tensor
    ) -> None:
        """Improve the values in sweeps."""
        matrix = hessian.matrix
        columns = matrix.shape[0]
        factors = hessian.block_factors
        shared = (
            matrix,
            1 / matrix.diagonal(),
            factors,
            (1 / factors.diagonal(dim1=1, dim2=2)).reshape(-1),
            hessian.block_inverses,
        )
        gradient = (target - values) @ matrix
        changes = values.new_empty(values.shape[0], PANEL)
        for sweep in range(sweeps):
            for start, stop in _panels(columns):
                self.check_stop()
                self.panels.improve(gradient, *shared, values, changes, scale_bytes, start=start)
                begin = stop if sweep == sweeps - 1 else 0
                if begin < columns:
                    gradient[:, begin:].addmm_(changes[:, : stop - start], matrix[start:stop, begin:], alpha=-1)


def kernel_for(device: str, threads: int = 1, check_stop: CheckStop = never_stop) -> RoundingKernel:
    """Return the kernel for a torch device; `threads` of the CPU, which do not change the bytes.

    It calls `check_stop` every few seconds.
    """
    if device == "cpu":
        return CpuKernel(threads, check_stop)
    return DeviceKernel(TritonPanels(), check_stop)


def _panels(columns: int) -> list[tuple[int, int]]:
    return [(start, min(start + PANEL, columns)) for start in range(0, columns, PANEL)]


def _encode(values: Tensor, scale_bytes: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scale bytes; a block without values gets codes 0, never -0, and the scale 1."""
    rows, columns = values.shape
    scaled = values.view(rows, columns // BLOCK_SIZE, BLOCK_SIZE) / decoded_scales(scale_bytes)[:, :, None]
    codes = torch.bucketize(scaled.abs(), _midpoints(str(values.device)), out_int32=True).to(torch.uint8)
    empty = (codes == 0).all(dim=2)
    is_negative = ((codes > 0) & (scaled < 0)).to(torch.uint8)
    nibbles = (codes + SIGN_BIT * is_negative).view(rows, columns)
    packed = nibbles[:, 0::2] + 16 * nibbles[:, 1::2]
    return packed, scale_bytes.masked_fill(empty, ONE_BYTE)


@cache
def _midpoints(device: str) -> Tensor:
    levels = torch.tensor(E2M1_VALUES).to(device)
    return (levels[1:] + levels[:-1]) / 2


_MOST_OTHER: Final = 1e-3  # of the codes, and of the loss: a thousand times what another order of sums changes


@cache
def check_device(device: str) -> None:
    """Raise PlanError if a CUDA device rounds otherwise than the CPU, or cannot: once for each process."""
    try:
        check_kernel(DeviceKernel(TritonPanels()), device)
    except PlanError:
        raise
    except Exception as error:  # what a compiler, a driver or a device may raise
        raise PlanError(f"{device}: rule gptq cannot round weights there: {error}. Use --device cpu.") from error


def check_kernel(kernel: DeviceKernel, device: str) -> None:
    """Round made-up weights on a device and on the CPU; raises PlanError if the codes differ.

    Without products the codes must be equal, if the CPU has fused multiply-adds. With them and two sweeps, a thousandth
    of the codes may differ.
    """
    columns = 2 * PANEL
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * columns, columns, generator=generator)
    inputs += 0.5 * inputs.roll(1, 1)
    matrix = inputs.T @ inputs / inputs.shape[0]
    target = 400 * torch.randn(256, columns, generator=generator)
    target[:64, 1::2] = target[:64, 1::2].round()  # ties
    target[64:72] *= torch.tensor([0.0, 1e-12, 1e-9, 1e-3, 0.1, 30.0, 1e3, 1e20])[:, None]
    for width, sweeps in ((PANEL, 0), (columns, 2)):
        hessian = damp_hessian(matrix[:width, :width].contiguous(), 0.5)
        part = target[:, :width].contiguous()
        theirs = kernel.round(part.to(device), hessian.to(device), sweeps=sweeps)
        ours = CpuKernel(1, never_stop).round(part, hessian, sweeps=sweeps)
        other = max(float((a.cpu() != b).float().mean()) for a, b in zip(theirs, ours, strict=True))
        is_exact = not sweeps and _cpu.instructions() != "portable"
        if other > (0.0 if is_exact else _MOST_OTHER):
            raise PlanError(
                f"{device}: rule gptq rounds {100 * other:.3f} % of made-up weights otherwise than the CPU does. "
                "Use --device cpu."
            )
