"""How large the weights of a tensor are: all that a global scale is chosen from.

Tensors that must share a global scale (gate and up of an expert) are measured one by one and merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.blocks import row_chunks
from k2convert.quantize.formats.int4 import Int4Weight, check_int4_scales, unpack_int4
from k2convert.quantize.formats.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Magnitude:
    """`scale_max`: the largest INT4 scale (BF16 sources: the same as amax); `amax`: max |w| after BF16 rounding."""

    scale_max: float
    amax: float

    def merge(self, other: Magnitude) -> Magnitude:
        """The magnitude of both tensors together."""
        return Magnitude(scale_max=max(self.scale_max, other.scale_max), amax=max(self.amax, other.amax))


def measure(weight: Int4Weight | Tensor, *, name: str = "weight") -> Magnitude:
    """Measure an INT4 weight or a bf16 [N, K] tensor; FormatError, naming the tensor, on values that are not usable."""
    if isinstance(weight, Int4Weight):
        check_int4_scales(weight.scales, name=name)
        if weight.scales.numel() == 0:
            return Magnitude(scale_max=0.0, amax=0.0)
        return Magnitude(scale_max=float(weight.scales.max()), amax=_int4_amax(weight))
    check_bf16(weight, name=name)
    amax = float(weight.abs().max()) if weight.numel() else 0.0
    return Magnitude(scale_max=amax, amax=amax)


def check_bf16(weight_NK: Tensor, *, name: str) -> None:
    """Refuse anything but a finite bf16 [N, K] matrix of whole blocks (FormatError)."""
    if weight_NK.dtype != torch.bfloat16 or weight_NK.ndim != 2 or weight_NK.shape[1] % BLOCK_SIZE:
        raise FormatError(
            f"{name}: a weight to quantise must be bfloat16 [N, K] with K a multiple of {BLOCK_SIZE}, "
            f"not {str(weight_NK.dtype).removeprefix('torch.')} {list(weight_NK.shape)}"
        )
    if not bool(torch.isfinite(weight_NK).all()):
        raise FormatError(f"{name}: the weight holds NaN or infinity; the source is damaged")


def _int4_amax(weight: Int4Weight) -> float:
    # BF16 rounding is monotone, so the largest |q| of a group gives the group's largest rounded product.
    amax = 0.0
    rows, columns = weight.shape
    for start, stop in row_chunks(rows, columns):
        chunk = weight.rows(start, stop)
        codes_NGE = unpack_int4(chunk.packed).view(stop - start, columns // GROUP_SIZE, GROUP_SIZE)
        largest_NG = codes_NGE.abs().amax(dim=-1).to(torch.bfloat16)
        amax = max(amax, float((largest_NG * chunk.scales).max()))
    return amax
