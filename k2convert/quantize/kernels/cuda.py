"""Launching the triton kernel: slots for the scales that occur, tables for them, and the counters it leaves behind.

`formats` fills every table, on the same device, so the kernel itself decides nothing about rounding. Works on CPU
tensors under triton's interpreter (TRITON_INTERPRET=1 in the environment before the first import), which is how tests
without a device run it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.quantize.formats.e2m1 import SIGN_BIT
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight, check_global_scale
from k2convert.quantize.kernels import cuda_kernel
from k2convert.quantize.kernels.search_tables import (
    LAST_GRID_RANK,
    WINDOW_STARTS,
    lowest_rank,
    set_windows,
    window_errors,
)
from k2convert.quantize.metrics.pair_counts import PairCounts, count_pairs, merge_counts, pair_values
from k2convert.quantize.rules.optimal import global_exponent, split_scales
from k2convert.quantize.rules.plain import plain_block_scales, plain_nibbles, quantize_plain
from k2convert.quantize.rules.scale_tables import LOWEST_OFFSET, MIN_MANTISSA, scale_tables

TILE: Final = 128
MAX_COUNTED: Final = 1 << 16
"""Blocks counted by one set of 21-bit counters, 16 elements each; more blocks get further sets."""
UNSIGNED: Final = -(1 << 31)
"""Codes of a zero scale under `plain`: all zero, and without a sign."""
COUNTER_SHIFTS: Final = (0, 21, 42)
COUNTER_MASK: Final = (1 << 21) - 1
LARGEST_OF_SET: Final = [members.bit_length() for members in range(256)]

_kernels = cast(Any, cuda_kernel)


def convert_int4(weight: Int4Weight, *, rule: Rule, global_scale: float) -> tuple[Nvfp4Weight, PairCounts]:
    """Quantise an INT4 weight where it lies and count its pairs; byte for byte what `formats` makes of it."""
    check_global_scale(global_scale)
    rows, columns = weight.shape
    device = weight.packed.device
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    block_scales = torch.empty(rows, columns // BLOCK_SIZE, dtype=torch.uint8, device=device)
    result = Nvfp4Weight(packed=packed, block_scales=block_scales, global_scale=global_scale)
    bits = weight.scales.contiguous().view(torch.int16).flatten()
    slot_bits = _distinct(bits)
    num_blocks, num_slots = block_scales.numel(), slot_bits.numel()
    if num_blocks == 0:
        return result, merge_counts([_no_counts()])
    slot_of = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    slot_of[slot_bits] = torch.arange(num_slots, dtype=torch.int32, device=device)
    num_programs = -(-num_blocks // TILE)
    replicas = -(-num_programs // (MAX_COUNTED // TILE))
    counters = torch.zeros(replicas, num_slots, 128, 3, dtype=torch.int64, device=device)
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    source = weight.packed.contiguous().view(torch.int64)
    buffers = (source, bits, packed.view(torch.int64), block_scales, counters, totals, slot_of)
    sizes = (num_blocks, num_slots, replicas)
    if rule == "plain":
        tables = _plain_tables(slot_bits, global_scale)
        if tables is None:
            result = quantize_plain(weight, global_scale)
            return result, count_pairs(weight, result, rule=rule)
        _kernels.plain_kernel[(num_programs,)](*buffers, *tables, *sizes, TILE=TILE)
    else:
        tables = _optimal_tables(slot_bits, global_exponent(global_scale))
        _kernels.optimal_kernel[(num_programs,)](*buffers, *tables, *_search_tensors(device), *sizes, TILE=TILE)
    return result, _take_counts(counters, slot_bits, totals)


def _distinct(bits: Tensor) -> Tensor:
    """Return the distinct BF16 patterns among int16 bits, ascending, int64."""
    occurs = torch.zeros(1 << 16, dtype=torch.bool, device=bits.device)
    occurs[bits.to(torch.int64) & 0xFFFF] = True
    return torch.nonzero(occurs).flatten()


def _plain_tables(slot_bits: Tensor, global_scale: float) -> tuple[Tensor, ...] | None:
    """Return largest |q| of a set uint8 [256], and E4M3 byte, codes and inexact |q| for each (slot, largest).

    None where a negative weight becomes +0 by underflow: the kernel takes the sign from the source code alone.
    """
    device = slot_bits.device
    scales_S1 = (slot_bits & 0x7FFF).to(torch.int16).view(torch.bfloat16).unsqueeze(-1)
    weights_Sk = torch.arange(NUM_MAGNITUDES, device=device).to(torch.bfloat16) * scales_S1
    g = torch.tensor(global_scale, dtype=torch.float32, device=device)
    bytes_Sk = plain_block_scales(weights_Sk, g)
    steps_Sk1 = (bytes_Sk.view(torch.float8_e4m3fn).to(torch.float32) * g).unsqueeze(-1)
    nibbles = plain_nibbles(-weights_Sk[:, 1:].unsqueeze(1), steps_Sk1)
    if bool(((nibbles < SIGN_BIT) & (weights_Sk[:, 1:].unsqueeze(1) > 0)).any()):
        return None
    keys = ((slot_bits & 0x7FFF).unsqueeze(-1) << 8 | bytes_Sk).flatten()
    wanted, written = pair_values(keys.cpu().numpy(), rule="plain", global_scale=global_scale)
    inexact = ((wanted != written)[:, 1:] << np.arange(NUM_MAGNITUDES - 1)).sum(axis=1)
    return (
        torch.tensor(LARGEST_OF_SET, dtype=torch.uint8, device=device),
        bytes_Sk.to(torch.int32).flatten(),
        torch.where(scales_S1 > 0, _pack_codes(nibbles & 7), UNSIGNED).flatten(),
        torch.as_tensor(inexact.astype(np.int32)).to(device),
    )


def _pack_codes(codes: Tensor) -> Tensor:
    """Pack the codes of |q| = 1..8, uint8 [.., 8], into int32 [..]."""
    shifts = 4 * torch.arange(NUM_MAGNITUDES - 1, device=codes.device)
    return (codes.to(torch.int64) << shifts).sum(dim=-1).to(torch.int32)


def _optimal_tables(slot_bits: Tensor, exponent: int) -> tuple[Tensor, ...]:
    """Return ms - 128, E4M3 byte of position 0, its place in the maps, clamped kg - es; all int32 [slots]."""
    scales_S1 = (slot_bits & 0x7FFF).to(torch.int16).view(torch.bfloat16).unsqueeze(-1)
    fractions, exponents = torch.frexp(scales_S1.flatten().to(torch.float32))
    mantissas_S = (fractions * (2 * MIN_MANTISSA)).to(torch.int64)
    first_ranks = torch.as_tensor(lowest_rank(mantissas_S.cpu().numpy())).to(slot_bits.device)
    # As in split_scales, but not clamped: es = e - 8, and byte = 8 * (10 - (kg - es)) + the candidate's grid index.
    firsts = 8 * (10 - (exponent + 8 - exponents.to(torch.int64))) + LAST_GRID_RANK - first_ranks
    _, offsets_2S = split_scales(scales_S1, exponent)
    tables = (mantissas_S - MIN_MANTISSA, firsts, first_ranks, offsets_2S[::2] - LOWEST_OFFSET)
    return tuple(table.to(torch.int32) for table in tables)


@lru_cache(maxsize=8)
def _search_tensors(device: torch.device) -> tuple[Tensor, ...]:
    tables = scale_tables(device)
    return (
        torch.as_tensor(window_errors()).to(device),
        torch.as_tensor(set_windows()).to(device),
        torch.tensor(WINDOW_STARTS, dtype=torch.int32, device=device),
        tables.errors,
        tables.scale_bytes,
        _pack_codes(tables.codes[:, :, 1:]),
    )


def _take_counts(counters: Tensor, slot_bits: Tensor, totals: Tensor) -> PairCounts:
    """Unpack counters int64 [replicas, slots, 128, 3] and add them up."""
    fields = torch.zeros(*counters.shape[1:], 3, dtype=torch.int64, device=counters.device)
    for replica in counters:
        fields += torch.stack([(replica >> shift) & COUNTER_MASK for shift in COUNTER_SHIFTS], dim=-1)
    fields = fields.flatten(2)
    slots, scale_bytes = torch.nonzero(fields[:, :, NUM_MAGNITUDES - 1], as_tuple=True)
    used = fields[slots, scale_bytes].cpu().numpy()
    num_blocks = used[:, -1]
    elsewhere = used[:, :-1]
    zeros = BLOCK_SIZE * num_blocks - elsewhere.sum(axis=1)
    part = PairCounts(
        keys=((slot_bits[slots] & 0x7FFF) << 8 | scale_bytes).cpu().numpy(),
        num_blocks=num_blocks,
        magnitude_counts=np.concatenate([zeros[:, None], elsewhere], axis=1),
        equal_blocks=int(totals[0]),
        outside_normal=int(totals[1]),
    )
    # Sorts the pairs, and puts zero and minus zero together.
    return merge_counts([part])


def _no_counts() -> PairCounts:
    empty = np.zeros(0, dtype=np.int64)
    return PairCounts(empty, empty, np.zeros((0, NUM_MAGNITUDES), dtype=np.int64), 0, 0)
