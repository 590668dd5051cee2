"""GPTQ under a damped Hessian, with a search of every block's scale, then coordinate descent.

The columns of a row are rounded from left to right. A block of 16 tries 8 neighboring E4M3 scales, each with its own
compensation inside the block, and keeps the one with the least loss. Its errors then move the columns behind it. Two
sweeps look at every block again, given all others: the search from the block's optimum, then its columns one by one.
Scales are normal E4M3 numbers, as in rule `mse`; a block of zeros gets the same bytes as there, and -0 is never
written.

There are two kernels: compiled for the CPU (cpp/gptq.hpp), and for a CUDA device (device_kernel.py, which chooses).
Their sums are taken in a different order, so a few codes differ.

The damping, 0 to 1, moves the Hessian towards its diagonal. With at least max(1024, 4 K) tokens it is .5. With fewer,
64 rows are really quantized with the Hessian of one half of the tokens and measured on the other half, with each
damping and without any Hessian. If the last is best, or with fewer than 64 tokens, there is no correction: 16 tokens
per expert without this rule lost to weights quantized without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.formats.nvfp4 import E2M1_VALUES, Nvfp4Weight
from k2convert.quantize.gptq.hessian import (
    ONE_THREAD,
    SMALL,
    CheckStop,
    DampedHessian,
    Team,
    damp_hessian,
    floats,
    identity_hessian,
)
from k2convert.quantize.gptq.moments import Moments
from k2convert.quantize.kernels import _cpu

SWEEPS: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """An NVFP4 weight on one device: `packed` uint8 [N, K/2], E4M3 `block_scales` uint8 [N, K/16], and its scale."""

    packed: Tensor
    block_scales: Tensor
    global_scale: float

    def rows(self, start: int, stop: int, global_scale: float) -> Codes:
        """A view of some rows, with a global scale of their own."""
        return Codes(self.packed[start:stop], self.block_scales[start:stop], global_scale)

    def values(self) -> Tensor:
        """Return the values f32 [N, K] in units of the global scale, exact."""
        nibbles = torch.stack([self.packed & 15, self.packed >> 4], dim=2).flatten(1)
        levels = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)]).to(self.packed.device)
        return levels[nibbles.int()] * decoded_scales(self.block_scales).repeat_interleave(BLOCK_SIZE, dim=1)

    def weight(self) -> Nvfp4Weight:
        """Return the same in the memory of the CPU."""
        return Nvfp4Weight(self.packed.cpu().numpy(), self.block_scales.cpu().numpy(), self.global_scale)


def decoded_scales(scale_bytes: Tensor) -> Tensor:
    """Return the values f32 of E4M3 bytes."""
    return scale_bytes.view(torch.float8_e4m3fn).float()


class RoundingKernel(Protocol):
    """Makes codes on one device; holds no state, so threads may share it."""

    def round(self, target_NK: Tensor, hessian: DampedHessian, *, sweeps: int) -> tuple[Tensor, Tensor]:
        """Return codes uint8 [N, K/2] and scale bytes uint8 [N, K/16] for a target f32 in units of the global scale.

        ValueError if the shapes do not fit.
        """
        ...

    def try_each(self, target_nK: Tensor, makers: Sequence[Callable[[], DampedHessian]], team: Team) -> list[Tensor]:
        """Return the values f32 [n, K] of the target, without sweeps, under each damped Hessian that is made."""
        ...


def round_gptq(
    target_NK: Tensor, global_scale: float, hessian: DampedHessian, kernel: RoundingKernel, *, sweeps: int = SWEEPS
) -> Codes:
    """Return codes close to a finite target f32 [N, K], on the device of the damped Hessian."""
    packed, block_scales = kernel.round(target_NK.float() / global_scale, hessian, sweeps=sweeps)
    return Codes(packed, block_scales, global_scale)


MIN_TOKENS: Final = 64
LEAST_FULL_TOKENS: Final = 1024
FULL_TOKENS_PER_COLUMN: Final = 4
FULL_DAMPING: Final = 0.5
DAMPINGS: Final = (0.1, 0.3, 0.6, 0.9)
NUM_ROWS: Final = 64
"""Rows that are quantized to choose."""


def choose_damping(
    moments: Moments, weight_NK: Tensor, global_scale: float, kernel: RoundingKernel, team: Team = ONE_THREAD
) -> float | None:
    """Return the damping for a weight f32 [N, K] on the device of the moments; None for no error feedback.

    The moments must be complete.
    """
    rows, columns = weight_NK.shape
    if moments.tokens >= max(LEAST_FULL_TOKENS, FULL_TOKENS_PER_COLUMN * columns):
        return FULL_DAMPING
    if moments.tokens < MIN_TOKENS or min(moments.weights) <= 0:
        return None
    sample_NK = weight_NK[:: max(1, rows // NUM_ROWS)][:NUM_ROWS].float() / global_scale
    is_small = columns <= SMALL  # then several damped Hessians have space beside each other
    own_team = ONE_THREAD if is_small else team

    def hessian_of(damping: float, half: int) -> DampedHessian:
        return damp_hessian(moments.half(half), damping, own_team)

    even = partial(identity_hessian, columns, device=str(weight_NK.device))
    makers = [even, *(partial(hessian_of, damping, half) for damping in DAMPINGS for half in (0, 1))]
    rounded = kernel.try_each(sample_NK, makers, team if is_small else ONE_THREAD)
    losses = [
        _loss(values - sample_NK, moments.half(1 - index % 2)) for index, values in enumerate([rounded[0], *rounded])
    ]
    summed = floats(torch.stack(losses).view(-1, 2).sum(dim=1))  # a device is waited for once
    best = min(range(len(summed)), key=summed.__getitem__)
    return DAMPINGS[best - 1] if best else None


def _loss(error_nK: Tensor, hessian_KK: Tensor) -> Tensor:
    return ((error_nK @ hessian_KK) * error_nK).sum(dtype=torch.float64)


PIECE_ROWS: Final = 96
"""Rows for each thread that are rounded before a stop is looked for: a tile of the kernel, a second at K2's width."""


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """Splits rows over threads. The bytes depend on the CPU's instructions, but not on the number of threads."""

    threads: int
    check_stop: CheckStop

    def round(self, target_NK: Tensor, hessian: DampedHessian, *, sweeps: int) -> tuple[Tensor, Tensor]:
        """As RoundingKernel, for CPU tensors."""
        rows, columns = target_NK.shape
        packed = np.empty((rows, columns // 2), dtype=np.uint8)
        scale_bytes = np.empty((rows, columns // BLOCK_SIZE), dtype=np.uint8)
        step = PIECE_ROWS * self.threads
        for start in range(0, rows, step):
            self.check_stop()
            piece = slice(start, start + step)
            _cpu.round_gptq(
                _flat(target_NK[piece]),
                _flat(hessian.matrix),
                _flat(hessian.factor),
                _flat(hessian.block_factors),
                _flat(hessian.block_inverses),
                sweeps,
                self.threads,
                packed[piece].reshape(-1),
                scale_bytes[piece].reshape(-1),
            )
        return torch.as_tensor(packed), torch.as_tensor(scale_bytes)

    def try_each(self, target_nK: Tensor, makers: Sequence[Callable[[], DampedHessian]], team: Team) -> list[Tensor]:
        """As RoundingKernel; each thread of the team holds one damped Hessian."""

        def values(make: Callable[[], DampedHessian]) -> Tensor:
            return Codes(*self.round(target_nK, make(), sweeps=0), 1.0).values()

        return team.run([partial(values, make) for make in makers])


def _flat(values: Tensor) -> NDArray[np.float32]:
    return values.contiguous().view(-1).numpy()
