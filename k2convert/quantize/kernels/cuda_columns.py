"""Launching the triton kernel for columns that differ: `weighted`, and weights with column exponents.

As in kernels/cuda.py, every table is exact and filled here, and CPU tensors work under triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.choices import BLOCK_SIZE, MAX_COLUMN_EXPONENT, Rule
from k2convert.quantize.formats.bf16 import bf16_values
from k2convert.quantize.formats.e2m1 import DOUBLED_VALUES, nearest_code
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.kernels import cuda_columns_kernel
from k2convert.quantize.kernels.cuda import (
    TILE,
    DeviceInt4,
    DeviceNvfp4,
    distinct_bits,
    no_counts,
    packed_codes,
    to_tensor,
    upload,
)
from k2convert.quantize.metrics.pair_counts import SCALE_MASK, PairCounts, merge_counts
from k2convert.quantize.rules import check_rule_scale
from k2convert.quantize.rules.column_search import (
    HIGHEST_OFFSET,
    LOWEST_OFFSET,
    check_importance,
    column_candidates,
)
from k2convert.quantize.rules.optimal import global_exponent
from k2convert.quantize.rules.scale_tables import MIN_MANTISSA, NUM_MANTISSAS, candidate_tables

RULES_WITH_KERNEL: Final[tuple[Rule, ...]] = ("optimal", "weighted")

MAX_CELLS: Final = 1 << 27
"""Counters of one launch, 8 bytes each. A weight whose rows have more scales is converted in parts."""
MAX_ELEMENTS: Final = 1 << 27
"""Elements of one launch: a counter holds less than 2**28 of them, and 255 times as much importance."""
SEARCHED: Final = 48
"""Candidates that a block with equal exponents looks at, from 8 below the first with t >= 1 on (cpp/columns.hpp)."""

_kernels = cast(Any, cuda_columns_kernel)
_TABLE_BELOW: Final[int] = _kernels.TABLE_BELOW.value
_TABLE_SIZE: Final[int] = _kernels.TABLE_SIZE.value
_LANES: Final[int] = _kernels.LANES.value
_CELLS: Final[int] = _kernels.CELLS.value
_SUM_SHIFT: Final[int] = _kernels.SUM_SHIFT.value


def convert_columns(
    weight: Int4Weight, *, rule: Rule, global_scale: float, importance: NDArray[np.uint8] | None, device: str
) -> tuple[Nvfp4Weight, PairCounts]:
    """Quantize an INT4 weight with exponents, an importance uint8 [K], or both, and count its pairs.

    `rule` is one of RULES_WITH_KERNEL. Copies to the device and back.
    """
    check_rule_scale(rule, global_scale)
    if importance is not None:
        check_importance(importance, weight.shape[1])
    columns = describe_columns(weight.column_exponents, importance, columns=weight.shape[1], device=device)
    result, counts = convert_columns_on_device(upload(weight, device), columns, global_scale=global_scale)
    return Nvfp4Weight(result.packed.cpu().numpy(), result.block_scales.cpu().numpy(), global_scale), counts


@dataclass(frozen=True, slots=True, eq=False)
class DeviceColumns:
    """What the kernel has to know of K columns, on a device: the arrays that it takes, and the exponents that occur."""

    arrays: tuple[Tensor, ...]
    exponents: NDArray[np.int8]
    spread: int
    """The largest difference of exponents in a block."""
    has_importance: bool


def describe_columns(
    exponents: NDArray[np.int8] | None, importance: NDArray[np.uint8] | None, *, columns: int, device: str
) -> DeviceColumns:
    """Prepare exponents int8 [K] and importance uint8 [K] of the columns for the kernel."""
    exponents_K = np.zeros(columns, dtype=np.int8) if exponents is None else exponents
    importance_K = np.ones(columns, dtype=np.uint8) if importance is None else importance
    occurring, places_K = np.unique(exponents_K, return_inverse=True)
    by_block_BE = exponents_K.reshape(-1, BLOCK_SIZE).astype(np.int32)
    highest_B = by_block_BE.max(axis=1)
    arrays = (
        8 * exponents_K.astype(np.int32),
        places_K.astype(np.int32).reshape(-1),
        np.ldexp(importance_K.astype(np.float64), 2 * (MAX_COLUMN_EXPONENT - exponents_K.astype(np.int32))),
        importance_K.astype(np.int64),
        8 * highest_B,
    )
    spread = int((highest_B - by_block_BE.min(axis=1)).max(initial=0))
    tensors = tuple(to_tensor(array).to(device) for array in arrays)
    return DeviceColumns(tensors, occurring, spread, has_importance=importance is not None)


def convert_columns_on_device(
    weight: DeviceInt4, columns: DeviceColumns, *, global_scale: float
) -> tuple[DeviceNvfp4, PairCounts]:
    """Quantize an INT4 weight that is on a device, with a global scale that is a power of two, and count its pairs."""
    rows, row_bytes = weight.packed.shape
    device = weight.packed.device
    packed = torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)
    block_scales = torch.empty(rows, 2 * row_bytes // BLOCK_SIZE, dtype=torch.uint8, device=device)
    result = DeviceNvfp4(packed, block_scales)
    none = no_counts()
    parts = [replace(none, importance_sums=none.magnitude_counts if columns.has_importance else None)]
    waiting = [(0, rows)] if packed.numel() else []
    while waiting:
        start, stop = waiting.pop()
        bits = weight.scale_bits[start:stop].contiguous().flatten()
        slot_bits = distinct_bits(bits)
        cells = slot_bits.numel() * columns.exponents.size * 128 * _CELLS
        if stop - start > 1 and (cells > MAX_CELLS or (stop - start) * 2 * row_bytes > MAX_ELEMENTS):
            middle = (start + stop) // 2
            waiting += [(middle, stop), (start, middle)]
            continue
        part = weight.packed[start:stop].contiguous()
        parts.append(
            _launch(part, bits, slot_bits, columns, packed[start:stop], block_scales[start:stop], global_scale)
        )
    return result, merge_counts(parts)


def _launch(
    packed: Tensor,
    bits: Tensor,
    slot_bits: Tensor,
    columns: DeviceColumns,
    out: Tensor,
    out_scales: Tensor,
    global_scale: float,
) -> PairCounts:
    """Convert some rows into `out` and `out_scales`, which are contiguous."""
    device, num_blocks, num_slots = packed.device, out_scales.numel(), slot_bits.numel()
    slot_of = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    slot_of[slot_bits] = torch.arange(num_slots, dtype=torch.int32, device=device)
    counters = torch.zeros(num_slots, columns.exponents.size, 128, _CELLS, dtype=torch.int64, device=device)
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    source_bits = slot_bits.cpu().numpy().astype(np.uint16) & np.uint16(SCALE_MASK)
    by_slot = (to_tensor(table).to(device) for table in _slot_tables(source_bits, global_scale))
    buffers = (packed.view(torch.int64), bits, out.view(torch.int64), out_scales, counters, totals, slot_of)
    chunks = -(-(SEARCHED + 8 * columns.spread) // _LANES)
    sizes = (num_blocks, out_scales.shape[1], columns.exponents.size, chunks)
    _kernels.columns_kernel[(-(-num_blocks // TILE),)](
        *buffers, *by_slot, *columns.arrays, *_constants(device), *sizes, TILE=TILE
    )
    return _take_counts(counters, source_bits, totals, columns)


def _slot_tables(slot_bits: NDArray[np.uint16], global_scale: float) -> tuple[NDArray[np.int32], ...]:
    """Return ms - 128, the byte of grid index 0, the grid index of the first candidate, clamped kg - es; [slots]."""
    fractions, exponents = np.frexp(bf16_values(slot_bits))
    mantissas_S = (fractions * (2 * MIN_MANTISSA)).astype(np.int64)
    # As in column_search: es = e - 8.
    offsets = global_exponent(global_scale) + 8 - exponents.astype(np.int64)
    starts = 16 + (mantissas_S + 15) // 16
    clamped = offsets.clip(LOWEST_OFFSET, HIGHEST_OFFSET) - LOWEST_OFFSET
    tables = (mantissas_S - MIN_MANTISSA, 8 * (10 - offsets), starts, clamped)
    return tuple(table.astype(np.int32) for table in tables)


@lru_cache(maxsize=8)
def _constants(device: torch.device) -> tuple[Tensor, ...]:
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


def _take_counts(
    counters: Tensor, source_bits: NDArray[np.uint16], totals: Tensor, columns: DeviceColumns
) -> PairCounts:
    """Unpack counters int64 [slots, exponents, 128, 10] and add up those with the same pair."""
    pairs = torch.nonzero(counters.any(dim=-1), as_tuple=True)
    used = counters[pairs].cpu().numpy()
    slots, exponents, scale_bytes = (places.cpu().numpy() for places in pairs)
    counts = used & ((1 << _SUM_SHIFT) - 1)
    # A sum of importance may have the highest bit.
    sums = (used.view(np.uint64) >> np.uint64(_SUM_SHIFT)).astype(np.int64)
    divided = np.ldexp(bf16_values(source_bits[slots]), -columns.exponents[exponents].astype(np.int32))
    part = PairCounts(
        keys=(divided.view(np.uint32) >> 16).astype(np.int64) << 8 | scale_bytes,
        num_blocks=counts[:, -1],
        magnitude_counts=counts[:, :-1],
        equal_blocks=int(totals[0]),
        outside_normal=int(totals[1]),
        importance_sums=sums[:, :-1] if columns.has_importance else None,
    )
    return merge_counts([part])
