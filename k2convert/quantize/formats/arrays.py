"""Weights as NumPy arrays of the bytes that files hold: what is read, what the CPU kernels take, what is written.

torch has types for BF16 and devices, and everything in `formats` is defined on its tensors; but it takes seconds to
import. So a conversion that needs no tensor makes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.lazy_torch import torch
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Int4Arrays:
    """An Int4Weight: `packed` uint8 [N, K/2], `scale_bits` uint16 [N, K/32], the bits of BF16 scales."""

    packed: NDArray[np.uint8]
    scale_bits: NDArray[np.uint16]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def to_torch(self) -> Int4Weight:
        """The same memory as tensors; FormatError where the shapes do not agree."""
        return Int4Weight(packed=_tensor(self.packed), scales=_tensor(self.scale_bits).view(torch.bfloat16))


@dataclass(frozen=True, slots=True, eq=False)
class Bf16Array:
    """A BF16 weight: `bits` uint16 [N, K]."""

    bits: NDArray[np.uint16]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.bits.shape[0], self.bits.shape[1]

    def to_torch(self) -> Tensor:
        """The same memory as a bf16 tensor [N, K]."""
        return _tensor(self.bits).view(torch.bfloat16)


SourceArrays = Int4Arrays | Bf16Array
"""A weight as a source checkpoint has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4Arrays:
    """An Nvfp4Weight: `packed` uint8 [N, K/2], `block_scales` uint8 [N, K/16], `global_scale` exact in FP32."""

    packed: NDArray[np.uint8]
    block_scales: NDArray[np.uint8]
    global_scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def to_torch(self) -> Nvfp4Weight:
        """The same memory as tensors; FormatError where the shapes do not agree."""
        return Nvfp4Weight(_tensor(self.packed), _tensor(self.block_scales), self.global_scale)


@overload
def as_arrays(weight: Int4Weight) -> Int4Arrays: ...
@overload
def as_arrays(weight: Nvfp4Weight) -> Nvfp4Arrays: ...
@overload
def as_arrays(weight: Tensor) -> Bf16Array: ...
def as_arrays(weight: Int4Weight | Nvfp4Weight | Tensor) -> Int4Arrays | Nvfp4Arrays | Bf16Array:
    """Return a weight, or a bf16 tensor [N, K], as arrays; over the same memory where that is the CPU's."""
    if isinstance(weight, Int4Weight):
        return Int4Arrays(weight.packed.cpu().numpy(), weight.scales.cpu().view(torch.uint16).numpy())
    if isinstance(weight, Nvfp4Weight):
        return Nvfp4Arrays(weight.packed.cpu().numpy(), weight.block_scales.cpu().numpy(), weight.global_scale)
    return Bf16Array(weight.cpu().view(torch.uint16).numpy())


def _tensor(array: NDArray[np.uint8] | NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
