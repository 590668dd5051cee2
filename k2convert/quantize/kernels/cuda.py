"""Launching the triton kernel for INT4 weights with importance or channel exponents: slots for the scales that occur.

All other weights are converted on the CPU. It counts the error on the way, so converting them takes it hardly longer
than measuring what a device converted.

Every table is computed with the reference arithmetic of rules/, so the kernel never rounds. It also works on CPU
tensors under triton's interpreter (TRITON_INTERPRET=1 in the environment before the first import): tests without a
device use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.choices import BLOCK_SIZE, MAX_COLUMN_EXPONENT
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight, bf16_values
from k2convert.quantize.formats.nvfp4 import DOUBLED_VALUES, Nvfp4Weight, nearest_code
from k2convert.quantize.kernels import cpu, cuda_kernel
from k2convert.quantize.kernels.search_tables import MIN_MANTISSA, NUM_MANTISSAS, candidate_tables
from k2convert.quantize.rules.mse import (
    HIGHEST_OFFSET,
    LOWEST_OFFSET,
    check_importance,
    column_candidates,
    global_exponent,
)

TILE: Final = 128
MAGNITUDE_BITS: Final = 0x7FFF
"""BF16 bits without the sign: minus zero is zero."""
_kernels = cast(Any, cuda_kernel)
SEARCHED: Final = 48
"""Candidates that a block with equal exponents looks at, from 8 below the first with t >= 1 on (cpp/channels.hpp)."""

_TABLE_BELOW: Final[int] = _kernels.TABLE_BELOW.value
_TABLE_SIZE: Final[int] = _kernels.TABLE_SIZE.value
_LANES: Final[int] = _kernels.LANES.value


@dataclass(frozen=True, slots=True, eq=False)
class DeviceInt4:
    """An INT4 weight on a device: `packed` uint8 [N, K/2], `scale_bits` int16 [N, K/32]."""

    packed: Tensor
    scale_bits: Tensor


def upload(weight: Int4Weight, device: str) -> DeviceInt4:
    """Copy an INT4 weight to a device."""
    return DeviceInt4(to_tensor(weight.packed).to(device), to_tensor(weight.scale_bits.view(np.int16)).to(device))


def convert(
    weight: Int4Weight, *, global_scale: float, importance: NDArray[np.uint8] | None, device: str
) -> cpu.Converted:
    """Quantize an INT4 weight on a device as `cpu.convert` does under a power of two; copies there and back."""
    columns = describe_columns(weight.channel_exponents, importance, columns=weight.shape[1], device=device)
    packed, scales, outside = convert_on_device(upload(weight, device), columns, global_scale=global_scale)
    return cpu.Converted(Nvfp4Weight(packed.cpu().numpy(), scales.cpu().numpy(), global_scale), outside)


def slots_of(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct BF16 patterns among int16 bits, ascending int64 [slots], and the slot of each, int32."""
    occurs = torch.zeros(1 << 16, dtype=torch.bool, device=bits.device)
    occurs[bits.to(torch.int64) & 0xFFFF] = True
    slot_bits = torch.nonzero(occurs).flatten()
    slot_of = torch.zeros(1 << 16, dtype=torch.int32, device=bits.device)
    slot_of[slot_bits] = torch.arange(slot_bits.numel(), dtype=torch.int32, device=bits.device)
    return slot_bits, slot_of


@dataclass(frozen=True, slots=True, eq=False)
class DeviceColumns:
    """The factors of K columns on a device: the kernel's arrays, and the largest difference of exponents in a block."""

    arrays: tuple[Tensor, ...]
    spread: int


def describe_columns(
    exponents: NDArray[np.int8] | None, importance: NDArray[np.uint8] | None, *, columns: int, device: str
) -> DeviceColumns:
    """Prepare exponents int8 [K] and importance uint8 [K] of the columns for the kernel."""
    exponents_K = np.zeros(columns, dtype=np.int8) if exponents is None else exponents
    importance_K = np.ones(columns, dtype=np.uint8) if importance is None else importance
    check_importance(importance_K, columns)
    by_block_BE = exponents_K.reshape(-1, BLOCK_SIZE).astype(np.int32)
    highest_B = by_block_BE.max(axis=1)
    arrays = (
        8 * exponents_K.astype(np.int32),
        np.ldexp(importance_K.astype(np.float64), 2 * (MAX_COLUMN_EXPONENT - exponents_K.astype(np.int32))),
        8 * highest_B,
    )
    spread = int((highest_B - by_block_BE.min(axis=1)).max(initial=0))
    tensors = tuple(to_tensor(array).to(device) for array in arrays)
    return DeviceColumns(tensors, spread)


def convert_on_device(weight: DeviceInt4, columns: DeviceColumns, *, global_scale: float) -> tuple[Tensor, Tensor, int]:
    """Return packed uint8 [N, K/2], block scales uint8 [N, K/16], and the blocks that want a scale outside the normal
    range; the global scale is a power of two.
    """
    exponent = global_exponent(global_scale)
    (rows, row_bytes), device = weight.packed.shape, weight.packed.device
    packed, scales = (
        torch.empty(rows, size, dtype=torch.uint8, device=device) for size in (row_bytes, 2 * row_bytes // BLOCK_SIZE)
    )
    outside = torch.zeros(1, dtype=torch.int64, device=device)
    if num_blocks := scales.numel():
        bits = weight.scale_bits.contiguous().flatten()
        slot_bits, slot_of = slots_of(bits)
        source_bits = slot_bits.cpu().numpy().astype(np.uint16) & np.uint16(MAGNITUDE_BITS)
        by_slot = (to_tensor(table).to(device) for table in _scale_tables(source_bits, exponent))
        source = weight.packed.contiguous().view(torch.int64)
        buffers = (source, bits, packed.view(torch.int64), scales, outside, slot_of)
        chunks = -(-(SEARCHED + 8 * columns.spread) // _LANES)
        sizes = (num_blocks, scales.shape[1], chunks)
        _kernels.channels_kernel[(-(-num_blocks // TILE),)](
            *buffers, *by_slot, *columns.arrays, *_constant_tables(device), *sizes, TILE=TILE
        )
    return packed, scales, int(outside)


def _scale_tables(slot_bits: NDArray[np.uint16], exponent: int) -> tuple[NDArray[np.int32], ...]:
    """Return ms - 128, the byte of grid index 0, the grid index of the first candidate, clamped kg - es; [slots]."""
    fractions, exponents = np.frexp(bf16_values(slot_bits))
    mantissas_S = (fractions * (2 * MIN_MANTISSA)).astype(np.int64)
    # As in rules/mse.py: es = e - 8.
    offsets = exponent + 8 - exponents.astype(np.int64)
    starts = 16 + (mantissas_S + 15) // 16
    clamped = offsets.clip(LOWEST_OFFSET, HIGHEST_OFFSET) - LOWEST_OFFSET
    tables = (mantissas_S - MIN_MANTISSA, 8 * (10 - offsets), starts, clamped)
    return tuple(table.astype(np.int32) for table in tables)


@lru_cache(maxsize=8)
def _constant_tables(device: torch.device) -> tuple[Tensor, ...]:
    # The codes of |q| = 1..8 in 32 bits.
    codes = (candidate_tables().codes[:, :, 1:].astype(np.int64) << (4 * np.arange(NUM_MAGNITUDES - 1))).sum(axis=-1)
    arrays = (field_errors(), column_candidates()[1], codes.astype(np.int32))
    return tuple(to_tensor(array).to(device) for array in arrays)


def field_errors() -> NDArray[np.float64]:
    """Return the error of |q| = 0..8 under the grid indices from -64 on, in (s / 2ms)**2, float64 [128, 9, 224]."""
    indices = np.arange(_TABLE_SIZE) - _TABLE_BELOW
    steps_C = np.ldexp(8.0 + indices % 8, indices // 8)
    mantissas_S11 = np.arange(MIN_MANTISSA, MIN_MANTISSA + NUM_MANTISSAS, dtype=np.float64)[:, None, None]
    wanted_Sk1 = np.arange(NUM_MAGNITUDES, dtype=np.float64)[:, None] * mantissas_S11
    reached = np.array(DOUBLED_VALUES)[nearest_code(wanted_Sk1, steps_C)] * steps_C
    return np.ascontiguousarray((2 * wanted_Sk1 - reached) ** 2)


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor over the same memory."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
