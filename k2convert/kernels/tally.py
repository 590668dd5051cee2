"""Counting pairs of source scale and block scale while blocks pass: each thread's buffers, and the table they become.

Every distinct source scale met gets a slot. A slot has a few rows, one for each block scale its blocks usually get,
found without a search: `optimal` by the candidate's position, `plain` by the block's largest |q|. Blocks that a kernel
has to look at one by one (all zero, or best served outside the normal E4M3 range) are counted in a small hash table.
A row is one cache line, and holds all that a block needs to touch:

    uint32 lane  0..7                 8        9                                  12..15
                 elements with        blocks   `plain`: E4M3 byte, then bit       `plain`: output nibble
                 |q| = 1..8                    k - 1 where |q| = k is inexact     of each source nibble, in bytes

When slots or hash table run
full, the kernel stops, what was counted is taken away as a PairCounts, and it goes on.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from k2convert.formats.int4 import NUM_MAGNITUDES
from k2convert.formats.nvfp4 import BLOCK_SIZE
from k2convert.formats.pair_counts import PairCounts, merge_counts
from k2convert.formats.rule import Rule

NUM_SCALE_BITS: Final = 1 << 16
MAX_SLOTS: Final = 2048
ROWS_PER_SLOT: Final = 40
PLAIN_ROWS: Final = 9
"""`plain` has a row for each largest |q|, 0..8; `optimal` one for each position of a candidate."""
ROW_LANES: Final = 16
BLOCKS_LANE: Final = 8
ROW_BYTES: Final = 4 * ROW_LANES
SCALE_BYTE: Final = 36
INEXACT_BYTE: Final = 37
MAP_BYTE: Final = 48
"""Where the parts of a row begin, in bytes."""
ODD_CAPACITY: Final = 1 << 13
BATCH_GROUPS: Final = 64
"""Groups that pass through the phases of a kernel together; their buffers stay in the first-level cache."""
MAX_NEW_ODD: Final = ODD_CAPACITY // 2 - 2 * BATCH_GROUPS
"""A batch is begun while no more keys than this are in the hash table."""

NUM_SLOTS, NUM_ODD, EQUAL_BLOCKS, OUTSIDE_NORMAL = 0, 1, 2, 3
"""Places in Tally.totals."""


class Tally(NamedTuple):
    """The buffers of one thread (10 MB of address space, of which a usual tensor touches 2).

    slot_of     int32 [65536]          slot of a scale's BF16 bits, -1 where it has none
    slot_bits   int32 [slots]          the bits of each slot
    slot_first  int32 [slots]          `optimal`: E4M3 byte of position 0, any integer
    slot_table  int32 [slots]          `optimal`: ms - 128, or -1 where the scale is zero
    slot_rank   int32 [slots]          `optimal`: where position 0 stands in SearchTables.map_ids
    rows        uint32 [slots * 40 * 16]  `plain` uses the first slots * 9 * 16
    row_data    uint8 [slots * 40 * 64]   the same memory by bytes
    odd_keys    int64 [8192]           hash table of keys as in PairCounts, -1 where free
    odd_rows    uint32 [8192 * 16]
    totals      int64 [4]              slots and odd keys in use, equal blocks, blocks outside the normal range
    words, masks, slots, tables_at, floats, picks, block_maps: what one phase hands to the next, for BATCH_GROUPS groups
    """

    slot_of: NDArray[np.int32]
    slot_bits: NDArray[np.int32]
    slot_first: NDArray[np.int32]
    slot_table: NDArray[np.int32]
    slot_rank: NDArray[np.int32]
    rows: NDArray[np.uint32]
    row_data: NDArray[np.uint8]
    odd_keys: NDArray[np.int64]
    odd_rows: NDArray[np.uint32]
    totals: NDArray[np.int64]
    words: NDArray[np.uint64]
    masks: NDArray[np.uint16]
    slots: NDArray[np.int32]
    tables_at: NDArray[np.int32]
    floats: NDArray[np.float32]
    picks: NDArray[np.uint32]
    block_maps: NDArray[np.uint8]


_threads = threading.local()


def thread_tally() -> Tally:
    """Return this thread's buffers, empty."""
    tally = cast(Tally | None, getattr(_threads, "tally", None))
    if tally is None:
        tally = _allocate()
        _threads.tally = tally
    return tally


def take_counts(tally: Tally, *, rule: Rule) -> PairCounts:
    """Return what was counted since the last call and leave the buffers empty."""
    num_slots = int(tally.totals[NUM_SLOTS])
    rows_per_slot = ROWS_PER_SLOT if rule == "optimal" else PLAIN_ROWS
    rows = tally.rows.reshape(-1, ROW_LANES)[: num_slots * rows_per_slot]
    used = np.flatnonzero(rows[:, BLOCKS_LANE])
    slots = used // rows_per_slot
    if rule == "optimal":
        scale_bytes = tally.slot_first[slots] + used % rows_per_slot
    else:
        scale_bytes = tally.row_data[used * ROW_BYTES + SCALE_BYTE].astype(np.int64)
    # Minus zero is counted with zero, as everywhere.
    keys = (tally.slot_bits[slots].astype(np.int64) & 0x7FFF) << 8 | scale_bytes
    odd = np.flatnonzero(tally.odd_keys >= 0)
    counts = merge_counts(
        [
            _pair_counts(keys, rows[used], tally.totals),
            _pair_counts(tally.odd_keys[odd], tally.odd_rows.reshape(-1, ROW_LANES)[odd], None),
        ]
    )
    tally.slot_of[tally.slot_bits[:num_slots]] = -1
    tally.odd_keys[odd] = -1
    tally.totals[:] = 0
    return counts


def _pair_counts(keys: NDArray[np.int64], rows: NDArray[np.uint32], totals: NDArray[np.int64] | None) -> PairCounts:
    counts = np.empty((len(keys), NUM_MAGNITUDES), dtype=np.int64)
    counts[:, 1:] = rows[:, :BLOCKS_LANE]
    num_blocks = rows[:, BLOCKS_LANE].astype(np.int64)
    counts[:, 0] = BLOCK_SIZE * num_blocks - counts[:, 1:].sum(axis=1)
    return PairCounts(
        keys=keys,
        num_blocks=num_blocks,
        magnitude_counts=counts,
        equal_blocks=0 if totals is None else int(totals[EQUAL_BLOCKS]),
        outside_normal=0 if totals is None else int(totals[OUTSIDE_NORMAL]),
    )


def _allocate() -> Tally:
    # One more row, so that the first can begin with a cache line.
    memory = np.zeros((MAX_SLOTS * ROWS_PER_SLOT + 1) * ROW_LANES, dtype=np.uint32)
    skipped = -memory.ctypes.data % ROW_BYTES // memory.itemsize
    rows = memory[skipped : skipped + MAX_SLOTS * ROWS_PER_SLOT * ROW_LANES]
    counts = np.zeros(16 * (BATCH_GROUPS + 1), dtype=np.float32)
    skipped = -counts.ctypes.data % ROW_BYTES // counts.itemsize
    return Tally(
        slot_of=np.full(NUM_SCALE_BITS, -1, dtype=np.int32),
        slot_bits=np.zeros(MAX_SLOTS, dtype=np.int32),
        slot_first=np.zeros(MAX_SLOTS, dtype=np.int32),
        slot_table=np.zeros(MAX_SLOTS, dtype=np.int32),
        slot_rank=np.zeros(MAX_SLOTS, dtype=np.int32),
        rows=rows,
        row_data=rows.view(np.uint8),
        odd_keys=np.full(ODD_CAPACITY, -1, dtype=np.int64),
        odd_rows=np.zeros(ODD_CAPACITY * ROW_LANES, dtype=np.uint32),
        totals=np.zeros(4, dtype=np.int64),
        words=np.zeros(2 * BATCH_GROUPS, dtype=np.uint64),
        masks=np.zeros(BATCH_GROUPS, dtype=np.uint16),
        slots=np.zeros(BATCH_GROUPS, dtype=np.int32),
        tables_at=np.zeros(BATCH_GROUPS, dtype=np.int32),
        floats=counts[skipped : skipped + 16 * BATCH_GROUPS],
        picks=np.zeros(2 * BATCH_GROUPS, dtype=np.uint32),
        block_maps=np.zeros(2 * BATCH_GROUPS, dtype=np.uint8),
    )
