"""Launching the triton kernels: slots for the scales that occur, and tables for them.

Every table is computed with the reference arithmetic of rules/, so the kernels never round. They also work on CPU
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

from k2convert.choices import BLOCK_SIZE, MAX_COLUMN_EXPONENT, Rule
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight, bf16_values, round_to_bf16
from k2convert.quantize.formats.nvfp4 import DOUBLED_VALUES, SIGN_BIT, Nvfp4Weight, nearest_code
from k2convert.quantize.kernels import cpu, cuda_kernel
from k2convert.quantize.kernels.search_tables import (
    HIGHEST_OFFSET,
    LAST_GRID_RANK,
    LOWEST_OFFSET,
    MIN_MANTISSA,
    NUM_MANTISSAS,
    WINDOW_STARTS,
    candidate_tables,
    lowest_rank,
    set_windows,
    window_errors,
)
from k2convert.quantize.rules import RULES, check_rule_scale
from k2convert.quantize.rules.max import max_block_scales, max_steps, plain_nibbles
from k2convert.quantize.rules.mse import HIGHEST_OFFSET as HIGHEST_COLUMN_OFFSET
from k2convert.quantize.rules.mse import LOWEST_OFFSET as LOWEST_COLUMN_OFFSET
from k2convert.quantize.rules.mse import check_importance, column_candidates, global_exponent

TILE: Final = 128
RULES_WITH_KERNEL: Final[frozenset[Rule]] = frozenset({"max", "mse", "imatrix"})
UNSIGNED: Final = -(1 << 31)
"""Codes of a zero scale under `max`: all zero, and without a sign."""
MAGNITUDE_BITS: Final = 0x7FFF
"""BF16 bits without the sign: minus zero is zero."""
LARGEST_OF_SET: Final = [members.bit_length() for members in range(256)]

_kernels = cast(Any, cuda_kernel)
SEARCHED: Final = 48
"""Candidates that a block with equal exponents looks at, from 8 below the first with t >= 1 on (cpp/channels.hpp)."""

_TABLE_BELOW: Final[int] = _kernels.TABLE_BELOW.value
_TABLE_SIZE: Final[int] = _kernels.TABLE_SIZE.value
_IN_FLIGHT: Final[int] = _kernels.IN_FLIGHT.value


@dataclass(frozen=True, slots=True, eq=False)
class DeviceInt4:
    """An INT4 weight on a device: `packed` uint8 [N, K/2], `scale_bits` int16 [N, K/32]."""

    packed: Tensor
    scale_bits: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceNvfp4:
    """An NVFP4 weight on a device: `packed` uint8 [N, K/2], `block_scales` uint8 [N, K/16]."""

    packed: Tensor
    block_scales: Tensor


def upload(weight: Int4Weight, device: str) -> DeviceInt4:
    """Copy an INT4 weight to a device."""
    return DeviceInt4(to_tensor(weight.packed).to(device), to_tensor(weight.scale_bits.view(np.int16)).to(device))


def convert(
    weight: Int4Weight, *, rule: Rule, global_scale: float, importance: NDArray[np.uint8] | None, device: str
) -> cpu.Converted:
    """Quantize an INT4 weight on a device by a rule of RULES_WITH_KERNEL, as `cpu.convert` does; copies there and back.

    What the kernels do not have is converted on the CPU: `max` with channel exponents or with unsigned zeros.
    """
    found = None
    if weight.channel_exponents is None and importance is None:
        found = convert_on_device(upload(weight, device), rule=rule, global_scale=global_scale)
    elif RULES[rule].has_power_of_two_scale:
        columns = describe_columns(weight.channel_exponents, importance, columns=weight.shape[1], device=device)
        found = convert_on_device(upload(weight, device), columns, rule=rule, global_scale=global_scale)
    if found is None:
        return cpu.convert(weight, rule=rule, global_scale=global_scale, importance=importance)
    result, outside = found
    written = Nvfp4Weight(result.packed.cpu().numpy(), result.block_scales.cpu().numpy(), global_scale)
    return cpu.Converted(written, outside)


def convert_on_device(
    weight: DeviceInt4, columns: DeviceColumns | None = None, *, rule: Rule, global_scale: float
) -> tuple[DeviceNvfp4, int | None] | None:
    """Quantize an INT4 weight that is on a device, and return the blocks that want a scale outside the normal range.

    With factors of `columns`, rules with a power of two as global scale. None if the kernel cannot represent the rule's
    codes for the weight.
    """
    check_rule_scale(rule, global_scale)
    result, device, is_max = allocate(weight), weight.packed.device, not RULES[rule].has_power_of_two_scale
    outside = torch.zeros(1, dtype=torch.int64, device=device)
    if num_blocks := result.block_scales.numel():
        sizes: tuple[int, ...] = (num_blocks,)
        if columns is not None:
            kernel, make_tables = _kernels.channels_kernel, _column_tables
            constants = *columns.arrays, *_column_tensors(device)
            chunks = (SEARCHED + 8 * columns.spread) // _IN_FLIGHT
            sizes = num_blocks, result.block_scales.shape[1], chunks, BLOCK_SIZE // 4
        elif is_max:
            kernel, make_tables, constants = _kernels.max_kernel, _max_tables, ()
        else:
            kernel, make_tables, constants = _kernels.mse_kernel, _mse_tables, _search_tensors(device)
        bits = weight.scale_bits.contiguous().flatten()
        slot_bits, slot_of = slots_of(bits)
        tables = make_tables(slot_bits.cpu().numpy().astype(np.uint16) & np.uint16(MAGNITUDE_BITS), global_scale)
        if tables is None:
            return None
        by_slot = (to_tensor(table).to(device) for table in tables)
        source = weight.packed.contiguous().view(torch.int64)
        buffers = (source, bits, result.packed.view(torch.int64), result.block_scales, outside, slot_of)
        kernel[(-(-num_blocks // TILE),)](*buffers, *by_slot, *constants, *sizes, TILE=TILE)
    return result, None if is_max else int(outside)


def allocate(weight: DeviceInt4) -> DeviceNvfp4:
    """Return room for the result of a weight on its device."""
    rows, row_bytes = weight.packed.shape
    sizes = (row_bytes, 2 * row_bytes // BLOCK_SIZE)
    return DeviceNvfp4(*(torch.empty(rows, size, dtype=torch.uint8, device=weight.packed.device) for size in sizes))


def slots_of(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct BF16 patterns among int16 bits, ascending int64 [slots], and the slot of each, int32."""
    occurs = torch.zeros(1 << 16, dtype=torch.bool, device=bits.device)
    occurs[bits.to(torch.int64) & 0xFFFF] = True
    slot_bits = torch.nonzero(occurs).flatten()
    slot_of = torch.zeros(1 << 16, dtype=torch.int32, device=bits.device)
    slot_of[slot_bits] = torch.arange(slot_bits.numel(), dtype=torch.int32, device=bits.device)
    return slot_bits, slot_of


def _max_tables(slot_bits: NDArray[np.uint16], global_scale: float) -> tuple[NDArray[Any], ...] | None:
    """Return largest |q| of a set uint8 [256], and E4M3 byte and codes for each (slot, largest).

    None if a negative weight becomes +0 by underflow: the kernel takes the sign only from the source code.
    """
    scales_S1 = bf16_values(slot_bits)[:, None]
    weights_Sk = round_to_bf16(np.arange(NUM_MAGNITUDES, dtype=np.float32) * scales_S1)
    bytes_Sk = max_block_scales(weights_Sk, global_scale)
    nonzero_S1k = weights_Sk[:, None, 1:]
    nibbles = plain_nibbles(-nonzero_S1k, max_steps(bytes_Sk, global_scale)[:, :, None])
    if ((nibbles < SIGN_BIT) & (nonzero_S1k > 0)).any():
        return None
    return (
        np.array(LARGEST_OF_SET, dtype=np.uint8),
        bytes_Sk.astype(np.int32).reshape(-1),
        np.where(scales_S1 > 0, packed_codes(nibbles & np.uint8(7)), np.int32(UNSIGNED)).reshape(-1),
    )


def packed_codes(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Pack the codes of |q| = 1..8, uint8 [.., 8], into int32 [..]."""
    return (codes.astype(np.int64) << (4 * np.arange(NUM_MAGNITUDES - 1))).sum(axis=-1).astype(np.int32)


def _mse_tables(slot_bits: NDArray[np.uint16], global_scale: float) -> tuple[NDArray[Any], ...]:
    """Return ms - 128, E4M3 byte of position 0, its place in the maps, clamped kg - es; all int32 [slots]."""
    fractions, exponents = np.frexp(bf16_values(slot_bits))
    mantissas_S = (fractions * (2 * MIN_MANTISSA)).astype(np.int64)
    first_ranks = lowest_rank(mantissas_S)
    # As in rules/mse.py: es = e - 8, and byte = 8 * (10 - (kg - es)) + the candidate's grid index.
    offsets = global_exponent(global_scale) + 8 - exponents.astype(np.int64)
    firsts = 8 * (10 - offsets) + LAST_GRID_RANK - first_ranks
    clamped = offsets.clip(LOWEST_OFFSET, HIGHEST_OFFSET) - LOWEST_OFFSET
    return tuple(table.astype(np.int32) for table in (mantissas_S - MIN_MANTISSA, firsts, first_ranks, clamped))


@lru_cache(maxsize=8)
def _search_tensors(device: torch.device) -> tuple[Tensor, ...]:
    tables = candidate_tables()
    arrays = (
        window_errors(),
        set_windows(),
        np.array(WINDOW_STARTS, dtype=np.int32),
        tables.errors,
        tables.scale_bytes,
        packed_codes(tables.codes[:, :, 1:]),
    )
    return tuple(to_tensor(array).to(device) for array in arrays)


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


def _column_tables(slot_bits: NDArray[np.uint16], global_scale: float) -> tuple[NDArray[np.int32], ...]:
    """Return ms - 128, the byte of grid index 0, the grid index of the first candidate, clamped kg - es; [slots]."""
    fractions, exponents = np.frexp(bf16_values(slot_bits))
    mantissas_S = (fractions * (2 * MIN_MANTISSA)).astype(np.int64)
    # As in rules/mse.py: es = e - 8.
    offsets = global_exponent(global_scale) + 8 - exponents.astype(np.int64)
    starts = 16 + (mantissas_S + 15) // 16
    clamped = offsets.clip(LOWEST_COLUMN_OFFSET, HIGHEST_COLUMN_OFFSET) - LOWEST_COLUMN_OFFSET
    tables = (mantissas_S - MIN_MANTISSA, 8 * (10 - offsets), starts, clamped)
    return tuple(table.astype(np.int32) for table in tables)


@lru_cache(maxsize=8)
def _column_tensors(device: torch.device) -> tuple[Tensor, ...]:
    arrays = (field_errors(), column_candidates()[1], packed_codes(candidate_tables().codes[:, :, 1:]))
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
