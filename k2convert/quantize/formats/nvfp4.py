"""NVFP4 weights: E2M1 elements, an E4M3 scale for every 16 input columns, one FP32 scale for the tensor.

    packed        uint8 [N, K/2]    two E2M1 nibbles a byte, the even column low
    block_scales  uint8 [N, K/16]   b, E4M3 bytes, row-major (not swizzled)
    global_scale  FP32              g; the weight is v * b * g

Authority: ModelOpt's NVFP4QTensor (0.47.0) and compressed-tensors' nvfp4-pack-quantized (0.19.0), which stores 1/g.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.e2m1 import decode_e2m1, unpack_nibbles
from k2convert.quantize.formats.e4m3 import decode_e4m3


@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4Weight:
    """An NVFP4 projection: `packed` uint8 [N, K/2], `block_scales` uint8 [N, K/16], `global_scale` exact in FP32.

    FormatError if dtypes, shapes or the global scale are not usable.
    """

    packed: NDArray[np.uint8]
    block_scales: NDArray[np.uint8]
    global_scale: float

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if self.packed.dtype != np.uint8 or self.block_scales.dtype != np.uint8:
            raise FormatError("NVFP4 codes and block scales must be uint8")
        if columns % BLOCK_SIZE or self.block_scales.shape != (rows, columns // BLOCK_SIZE):
            raise FormatError(
                f"NVFP4 codes [{rows}, {columns}] need block scales [{rows}, {columns}/{BLOCK_SIZE}], "
                f"not {list(self.block_scales.shape)}"
            )
        check_global_scale(self.global_scale)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def rows(self, start: int, stop: int) -> Nvfp4Weight:
        """A view of some rows."""
        return Nvfp4Weight(self.packed[start:stop], self.block_scales[start:stop], self.global_scale)


def check_global_scale(global_scale: float) -> None:
    """Refuse a global scale that is not positive, finite and exactly representable in FP32 (FormatError)."""
    if not (math.isfinite(global_scale) and global_scale > 0):
        raise FormatError(f"the global scale must be a positive finite number, not {global_scale!r}")
    with np.errstate(over="ignore"):
        nearest = float(np.float32(global_scale))
    if nearest != global_scale:
        raise FormatError(
            f"the global scale {global_scale!r} is not exactly representable in FP32 (nearest: {nearest!r}). "
            "Round it: float(numpy.float32(scale))."
        )


def dequantize_nvfp4(weight: Nvfp4Weight) -> NDArray[np.float64]:
    """Return v * b * g as float64 [N, K], exact: the product has at most 30 significant bits."""
    rows, columns = weight.shape
    values_NBE = decode_e2m1(unpack_nibbles(weight.packed)).reshape(rows, columns // BLOCK_SIZE, BLOCK_SIZE)
    scales_NB = decode_e4m3(weight.block_scales) * weight.global_scale
    return (values_NBE * scales_NB[:, :, None]).reshape(rows, columns)
