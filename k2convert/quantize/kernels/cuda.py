"""Launching the triton kernels: slots for the scales that occur, tables for them, and the counters they fill.

Every table is computed with the reference arithmetic of rules/, so the kernels never round. They also work on CPU
tensors under triton's interpreter (TRITON_INTERPRET=1 in the environment before the first import): tests without a
device use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.quantize.formats.bf16 import bf16_values, round_to_bf16
from k2convert.quantize.formats.e2m1 import SIGN_BIT
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.kernels import cpu, cuda_kernel
from k2convert.quantize.kernels.search_tables import (
    LAST_GRID_RANK,
    WINDOW_STARTS,
    lowest_rank,
    set_windows,
    window_errors,
)
from k2convert.quantize.metrics.pair_counts import SCALE_MASK, PairCounts, merge_counts, pair_values
from k2convert.quantize.rules import check_rule_scale
from k2convert.quantize.rules.optimal import global_exponent
from k2convert.quantize.rules.plain import plain_block_scales, plain_nibbles, plain_steps
from k2convert.quantize.rules.scale_tables import HIGHEST_OFFSET, LOWEST_OFFSET, MIN_MANTISSA, candidate_tables

TILE: Final = 128
MAX_COUNTED: Final = 1 << 16
"""Blocks counted by one set of 21-bit counters, 16 elements each; more blocks get further sets."""
UNSIGNED: Final = -(1 << 31)
"""Codes of a zero scale under `plain`: all zero, and without a sign."""
COUNTER_SHIFTS: Final = (0, 21, 42)
COUNTER_MASK: Final = (1 << 21) - 1
LARGEST_OF_SET: Final = [members.bit_length() for members in range(256)]

_kernels = cast(Any, cuda_kernel)


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


def convert_int4(weight: Int4Weight, *, rule: Rule, global_scale: float, device: str) -> tuple[Nvfp4Weight, PairCounts]:
    """Quantize an INT4 weight on a device and count its pairs, by a rule of KERNELS; copies there and back."""
    found = convert_on_device(upload(weight, device), rule=rule, global_scale=global_scale)
    if found is None:
        return cpu.convert_int4(weight, rule=rule, global_scale=global_scale)
    result, counts = found
    return Nvfp4Weight(result.packed.cpu().numpy(), result.block_scales.cpu().numpy(), global_scale), counts


def convert_on_device(weight: DeviceInt4, *, rule: Rule, global_scale: float) -> tuple[DeviceNvfp4, PairCounts] | None:
    """Quantize an INT4 weight that is on a device; None if the kernel cannot represent the rule's codes for it."""
    check_rule_scale(rule, global_scale)
    rows, row_bytes = weight.packed.shape
    device = weight.packed.device
    packed = torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)
    block_scales = torch.empty(rows, 2 * row_bytes // BLOCK_SIZE, dtype=torch.uint8, device=device)
    result = DeviceNvfp4(packed, block_scales)
    bits = weight.scale_bits.contiguous().flatten()
    slot_bits = distinct_bits(bits)
    num_blocks, num_slots = block_scales.numel(), slot_bits.numel()
    if num_blocks == 0:
        return result, merge_counts([no_counts()])
    tables = KERNELS[rule].tables(slot_bits.cpu().numpy().astype(np.uint16), global_scale)
    if tables is None:
        return None
    slot_of = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    slot_of[slot_bits] = torch.arange(num_slots, dtype=torch.int32, device=device)
    num_programs = -(-num_blocks // TILE)
    replicas = -(-num_programs // (MAX_COUNTED // TILE))
    counters = torch.zeros(replicas, num_slots, 128, 3, dtype=torch.int64, device=device)
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    source = weight.packed.contiguous().view(torch.int64)
    buffers = (source, bits, packed.view(torch.int64), block_scales, counters, totals, slot_of)
    on_device = (*(to_tensor(table).to(device) for table in tables), *KERNELS[rule].constants(device))
    KERNELS[rule].kernel[(num_programs,)](*buffers, *on_device, num_blocks, num_slots, replicas, TILE=TILE)
    return result, _take_counts(counters, slot_bits, totals)


def distinct_bits(bits: Tensor) -> Tensor:
    """Return the distinct BF16 patterns among int16 bits, ascending, int64."""
    occurs = torch.zeros(1 << 16, dtype=torch.bool, device=bits.device)
    occurs[bits.to(torch.int64) & 0xFFFF] = True
    return torch.nonzero(occurs).flatten()


def _plain_tables(slot_bits: NDArray[np.uint16], global_scale: float) -> tuple[NDArray[Any], ...] | None:
    """Return largest |q| of a set uint8 [256], and E4M3 byte, codes and inexact |q| for each (slot, largest).

    None if a negative weight becomes +0 by underflow: the kernel takes the sign only from the source code.
    """
    bits_S = slot_bits & np.uint16(SCALE_MASK)
    scales_S1 = bf16_values(bits_S)[:, None]
    weights_Sk = round_to_bf16(np.arange(NUM_MAGNITUDES, dtype=np.float32) * scales_S1)
    bytes_Sk = plain_block_scales(weights_Sk, global_scale)
    nonzero_S1k = weights_Sk[:, None, 1:]
    nibbles = plain_nibbles(-nonzero_S1k, plain_steps(bytes_Sk, global_scale)[:, :, None])
    if ((nibbles < SIGN_BIT) & (nonzero_S1k > 0)).any():
        return None
    keys = (bits_S.astype(np.int64)[:, None] << 8 | bytes_Sk).reshape(-1)
    wanted, written = pair_values(keys, rule="plain", global_scale=global_scale)
    inexact = ((wanted != written)[:, 1:] << np.arange(NUM_MAGNITUDES - 1)).sum(axis=1)
    return (
        np.array(LARGEST_OF_SET, dtype=np.uint8),
        bytes_Sk.astype(np.int32).reshape(-1),
        np.where(scales_S1 > 0, packed_codes(nibbles & np.uint8(7)), np.int32(UNSIGNED)).reshape(-1),
        inexact.astype(np.int32),
    )


def packed_codes(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Pack the codes of |q| = 1..8, uint8 [.., 8], into int32 [..]."""
    return (codes.astype(np.int64) << (4 * np.arange(NUM_MAGNITUDES - 1))).sum(axis=-1).astype(np.int32)


def _optimal_tables(slot_bits: NDArray[np.uint16], global_scale: float) -> tuple[NDArray[Any], ...]:
    """Return ms - 128, E4M3 byte of position 0, its place in the maps, clamped kg - es; all int32 [slots]."""
    fractions, exponents = np.frexp(bf16_values(slot_bits & np.uint16(SCALE_MASK)))
    mantissas_S = (fractions * (2 * MIN_MANTISSA)).astype(np.int64)
    first_ranks = lowest_rank(mantissas_S)
    # As in split_scales: es = e - 8, and byte = 8 * (10 - (kg - es)) + the candidate's grid index.
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


def _no_tensors(device: torch.device) -> tuple[Tensor, ...]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A rule's triton kernel, the tables that depend on the scales that occur, and those that do not."""

    kernel: Any
    tables: Callable[[NDArray[np.uint16], float], tuple[NDArray[Any], ...] | None]
    constants: Callable[[torch.device], tuple[Tensor, ...]]


KERNELS: Final[dict[Rule, CudaKernel]] = {
    "optimal": CudaKernel(_kernels.optimal_kernel, _optimal_tables, _search_tensors),
    # Columns of equal importance; kernels/cuda_columns.py has the others.
    "weighted": CudaKernel(_kernels.optimal_kernel, _optimal_tables, _search_tensors),
    "plain": CudaKernel(_kernels.plain_kernel, _plain_tables, _no_tensors),
}
"""The rules that have a kernel on CUDA devices."""


def _take_counts(counters: Tensor, slot_bits: Tensor, totals: Tensor) -> PairCounts:
    """Unpack counters int64 [replicas, slots, 128, 3] and add them up."""
    fields = torch.zeros(*counters.shape[1:], 3, dtype=torch.int64, device=counters.device)
    for replica in counters:
        fields += torch.stack([(replica >> shift) & COUNTER_MASK for shift in COUNTER_SHIFTS], dim=-1)
    fields = fields.flatten(2)
    slots, scale_bytes = torch.nonzero(fields[:, :, NUM_MAGNITUDES - 1], as_tuple=True)
    used = fields[slots, scale_bytes].cpu().numpy()
    num_blocks = used[:, -1]
    nonzero = used[:, :-1]
    zeros = BLOCK_SIZE * num_blocks - nonzero.sum(axis=1)
    part = PairCounts(
        keys=((slot_bits[slots] & SCALE_MASK) << 8 | scale_bytes).cpu().numpy(),
        num_blocks=num_blocks,
        magnitude_counts=np.concatenate([zeros[:, None], nonzero], axis=1),
        equal_blocks=int(totals[0]),
        outside_normal=int(totals[1]),
    )
    # Sorts the pairs, and puts zero and minus zero together.
    return merge_counts([part])


def no_counts() -> PairCounts:
    """Return the counts of a weight without blocks."""
    empty = np.zeros(0, dtype=np.int64)
    return PairCounts(empty, empty, np.zeros((0, NUM_MAGNITUDES), dtype=np.int64), 0, 0)


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor over the same memory."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
