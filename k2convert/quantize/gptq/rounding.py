"""Codes that follow a target under a curvature: GPTQ with a search of every block's scale, then coordinate descent.

The columns of a row are rounded from left to right. A block of 16 tries 16 neighboring E4M3 scales, each with its own
compensation inside the block, and keeps the one with the least loss. Its errors then move the columns behind it. Sweeps
look at every block again, given all others: the search from the block's optimum, then its columns one by one. Two
sweeps win 3 % of KL on SmolLM2. Scales are normal E4M3 numbers, as in rule `mse`; a block of zeros gets the same
bytes as there, and -0 is never written.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.gptq.factor import Curvature
from k2convert.quantize.kernels.gptq import CpuKernel
from k2convert.quantize.kernels.gptq_torch import TorchKernel


class RoundingKernel(Protocol):
    """Makes codes on one device; holds no state, so threads may share it."""

    def round(
        self, target_NK: Tensor, curvature: Curvature, *, sweeps: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return codes uint8 [N, K/2] and scale bytes uint8 [N, K/16] for a target f32 in units of the global scale."""
        ...


def kernel_for(device: str, threads: int = 1) -> RoundingKernel:
    """Return the kernel for a torch device; `threads` of the CPU, which do not change the bytes."""
    return CpuKernel(threads) if device == "cpu" else TorchKernel()


def round_gptq(
    target_NK: Tensor, global_scale: float, curvature: Curvature, kernel: RoundingKernel, *, sweeps: int = 2
) -> Nvfp4Weight:
    """Return an NVFP4 weight close to a finite target f32 [N, K], on the device of the curvature."""
    packed, block_scales = kernel.round(target_NK.float() / global_scale, curvature, sweeps=sweeps)
    return Nvfp4Weight(packed, block_scales, global_scale)
