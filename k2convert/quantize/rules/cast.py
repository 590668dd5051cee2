"""The `mse` rule for MXFP4 sources: the cast. Codes are copied and scales relabeled: in a window nothing changes.

    k_j   = scale byte - 127 of group j (32 columns)
    k_max = the largest k_j of a non-empty group of all tensors that share g; g = 1.0 if all groups are empty
    m     = max(k_max - 8, -126),   g = 2**m,   d = k_j - m
    byte  = (d + 7) << 3   for -6 <= d <= 8     0x08 .. 0x78, normal
            1 << (d + 9)   for -9 <= d <= -7    0x01, 0x02, 0x04, subnormal
            0x38           for an empty group outside -9 .. 8

Both blocks of a group get this byte. The powers of two are E4M3's longest ladder of such ratios, 18 steps, so no other
g serves a wider range: the cast is exact if k_max - k_min <= 17. Below the window the byte is 0x01 and a code is
v * 2**(d + 9) rounded to nearest even, with its sign bit: no other of the 126 scales has less error. m = k_max - 8 is
that of ModelOpt's cast (modelopt.torch.export.shard_cast_utils), which counts empty groups too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.quantize.formats.mxfp4 import NAN_BYTE, SCALE_BIAS, Mxfp4Weight, is_empty, look_up
from k2convert.quantize.formats.nvfp4 import ONE_BYTE, SIGN_BIT, Nvfp4Weight, decode_e2m1, nearest_code

LARGEST_STEP: Final = 8
"""2**8 is the largest power of two in E4M3."""
SMALLEST_STEP: Final = -9
SMALLEST_NORMAL_STEP: Final = -6
LEAST_GLOBAL_EXPONENT: Final = -126
"""Keeps g and 1/g normal FP32 numbers."""


def cast_global_scale(largest_exponent: int) -> float:
    """Return g = 2**m for the largest exponent of the tensors that share it."""
    return 2.0 ** max(largest_exponent - LARGEST_STEP, LEAST_GLOBAL_EXPONENT)


def cast(weight: Mxfp4Weight, exponent: int) -> Nvfp4Weight:
    """Return a weight cast with g = 2**exponent. Its codes are the source's array if no group is below the window."""
    scales = weight.scale_bytes.reshape(-1)
    packed = weight.packed
    scale_bytes = look_up(_scale_table(exponent), scales)
    maps = _code_maps()
    outside = np.flatnonzero(scale_bytes == 0)
    if outside.size:
        groups = weight.groups()
        empty = is_empty(groups[outside])
        scale_bytes[outside] = np.where(empty, np.uint8(ONE_BYTE), np.uint8(1))
        changed = outside[~empty]
        if changed.size:
            steps = SMALLEST_STEP - (scales[changed].astype(np.int64) - SCALE_BIAS - exponent)
            packed = groups.copy()
            packed[changed] = maps[steps.clip(0, len(maps) - 1)[:, None], groups[changed]]
            packed = packed.reshape(weight.packed.shape)
    twice = scale_bytes.astype(np.uint16) * np.uint16(0x101)  # both blocks of a group, faster than `repeat`
    return Nvfp4Weight(packed, twice.view(np.uint8).reshape(weight.shape[0], -1), 2.0**exponent)


@lru_cache(maxsize=64)
def _scale_table(exponent: int) -> NDArray[np.uint8]:
    """Return the E4M3 byte of each of the 256 scale bytes for g = 2**exponent; 0 outside the window."""
    table = np.zeros(256, dtype=np.uint8)
    for byte in range(NAN_BYTE):
        step = byte - SCALE_BIAS - exponent
        if SMALLEST_NORMAL_STEP <= step <= LARGEST_STEP:
            table[byte] = (step + 7) << 3
        elif SMALLEST_STEP <= step < SMALLEST_NORMAL_STEP:
            table[byte] = 1 << (step - SMALLEST_STEP)
    return table


@lru_cache(maxsize=1)
def _code_maps() -> NDArray[np.uint8]:
    """Return what becomes of a byte of two codes n steps below the window, uint8 [6, 256]: all zero from n = 5 on."""
    nibbles = np.arange(16, dtype=np.uint8)
    rounded = np.stack([nearest_code(np.abs(decode_e2m1(nibbles)), 2.0**steps) for steps in range(6)])
    rounded |= nibbles & np.uint8(SIGN_BIT)
    return (rounded[:, None, :] | rounded[:, :, None] << np.uint8(4)).reshape(6, 256)
