"""INT4 weights as compressed-tensors' pack-quantized format stores them (group 32, symmetric).

    weight_packed  int32 [N, K/8]    element j of a word in bits 4j..4j+3, code = q + 8
    weight_scale   bf16  [N, K/32]   s; the weight is q * s

Read as little-endian bytes, byte k of a row holds column 2k in its low nibble and 2k + 1 in its high one. Authority:
compressed_tensors.compressors.pack_quantized.helpers.pack_to_int32 with num_bits=4 (0.19.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k2convert.choices import GROUP_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.e2m1 import unpack_nibbles
from k2convert.quantize.formats.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_MAGNITUDE: Final = 8
NUM_MAGNITUDES: Final = MAX_MAGNITUDE + 1
"""|q| takes the values 0..8; 8 belongs to code -8 alone."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """One INT4 projection: `packed` uint8 [N, K/2] (the bytes of weight_packed), `scales` bf16 [N, K/32]."""

    packed: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if self.packed.dtype != torch.uint8 or self.packed.ndim != 2:
            raise FormatError(f"packed INT4 codes must be uint8 [N, K/2], not {_describe(self.packed)}")
        if self.scales.dtype != torch.bfloat16 or self.scales.ndim != 2:
            raise FormatError(f"INT4 scales must be bfloat16 [N, K/{GROUP_SIZE}], not {_describe(self.scales)}")
        rows, columns = self.shape
        if columns % GROUP_SIZE or tuple(self.scales.shape) != (rows, columns // GROUP_SIZE):
            raise FormatError(
                f"INT4 codes [{rows}, {columns}] need scales [{rows}, {columns}/{GROUP_SIZE}], "
                f"not {list(self.scales.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def to(self, device: torch.device) -> Int4Weight:
        """The same weight on another device."""
        return Int4Weight(packed=self.packed.to(device), scales=self.scales.to(device))

    def rows(self, start: int, stop: int) -> Int4Weight:
        """A view of some rows."""
        return Int4Weight(packed=self.packed[start:stop], scales=self.scales[start:stop])


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack bytes uint8 [.., K/2] into codes int8 [.., K], each in -8..7."""
    return unpack_nibbles(packed).view(torch.int8) - 8


def dequantize_int4(weight: Int4Weight) -> Tensor:
    """Return q * s as bf16 [N, K] in compressed-tensors' arithmetic: one BF16 multiply, rounded to nearest even."""
    rows, columns = weight.shape
    codes_NGE = unpack_int4(weight.packed).view(rows, columns // GROUP_SIZE, GROUP_SIZE)
    return (codes_NGE.to(torch.bfloat16) * weight.scales.unsqueeze(-1)).view(rows, columns)


def check_int4_scales(scales: Tensor, *, name: str) -> None:
    """Refuse bf16 scales that are NaN, infinite, negative, or so large that a weight overflows BF16 (FormatError)."""
    usable = (scales >= 0) & torch.isfinite(scales * MAX_MAGNITUDE)
    if bool(usable.all()):
        return
    row, group = (int(index) for index in torch.nonzero(~usable)[0])
    raise FormatError(
        f"{name}: INT4 scale [{row}, {group}] is {scales[row, group].item()}; scales must be finite, not negative and "
        f"below 2**125. {int((~usable).sum())} of {scales.numel()} scales are unusable. "
        "The source is damaged: fetch this shard again or check how it was made."
    )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
