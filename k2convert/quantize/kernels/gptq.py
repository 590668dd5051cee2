"""Rounding with error feedback on the CPU, compiled (cpp/gptq.hpp); it releases the interpreter's lock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.gptq.factor import Curvature
from k2convert.quantize.kernels import _cpu


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """Splits rows over threads. The bytes depend on the CPU's instructions, but not on the number of threads."""

    threads: int

    def round(
        self, target_NK: Tensor, curvature: Curvature, *, sweeps: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """As in gptq/rounding.py, for CPU tensors; ValueError if the shapes do not fit."""
        rows, columns = target_NK.shape
        packed = np.empty((rows, columns // 2), dtype=np.uint8)
        scale_bytes = np.empty((rows, columns // BLOCK_SIZE), dtype=np.uint8)
        _cpu.round_gptq(
            _flat(target_NK),
            _flat(curvature.form),
            _flat(curvature.factor),
            _flat(curvature.block_factors),
            sweeps,
            self.threads,
            packed.reshape(-1),
            scale_bytes.reshape(-1),
        )
        return packed, scale_bytes


def _flat(values: Tensor) -> NDArray[np.float32]:
    return values.contiguous().view(-1).numpy()
