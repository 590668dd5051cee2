"""E2M1, the four-bit element of NVFP4 (OCP Microscaling Formats v1.0, section 5.3.3).

    bit   3      2 1        0
          sign   exponent   mantissa        code = the low three bits

    code   0    1    2    3    4    5    6    7
    value  0   0.5   1   1.5   2    3    4    6      (no infinity, no NaN; nibble 0x8 is -0)

Two elements share a byte: the even column in the low nibble, as ModelOpt's NVFP4QTensor and compressed-tensors'
pack_fp4_to_uint8 write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k2convert.quantize.formats.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX: Final = 6.0
SIGN_BIT: Final = 0x8

DOUBLED_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the values: all integers, which is what the exact search computes with."""

QUADRUPLED_MIDPOINTS: Final = (1, 3, 5, 7, 10, 14, 20)
"""Four times the midpoints .25, .75, 1.25, 1.75, 2.5, 3.5, 5 between neighbouring values."""


def nearest_code(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the uint8 code 0..7 nearest to numerator / denominator, ties to the even code, saturating at 7.

    Both are non-negative (denominator positive) and broadcast; integers or floats. No division takes place, so the
    answer is exact wherever 4 * numerator and 20 * denominator are.
    """
    quadrupled = 4 * numerator
    code = (quadrupled > denominator).to(torch.uint8)
    for index, midpoint in enumerate(QUADRUPLED_MIDPOINTS[1:], start=1):
        # A tie lies between code `index` and `index + 1`; the even one of them takes it.
        rises = quadrupled >= midpoint * denominator if index % 2 else quadrupled > midpoint * denominator
        code += rises
    return code


def decode_e2m1(nibbles: Tensor) -> Tensor:
    """Return the float64 values of uint8 nibbles 0..15, of the same shape; 0x8 gives -0.0."""
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=nibbles.device)
    return torch.cat((magnitudes, -magnitudes))[nibbles.to(torch.int32)]


def pack_nibbles(nibbles_NK: Tensor) -> Tensor:
    """Pack uint8 nibbles [.., K] into bytes [.., K/2], the even column in the low nibble."""
    return nibbles_NK[..., 0::2] | (nibbles_NK[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack bytes [.., K/2] into uint8 nibbles [.., K]; the inverse of `pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
