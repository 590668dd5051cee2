"""The integer table from which every INT4 metric is computed, and which fast kernels return.

Under a rule and a global scale, the code that |q| gets depends only on the source scale s and the block scale b. So it
is enough to know, for each distinct pair (s, b), how many blocks have it and how often each |q| occurs in them. That
is a few thousand rows of integers. They do not depend on device, order or thread count, so the metrics do not either.

In a weight with column exponents the scale of an element is s * 2**-a, which is a BF16 number too. So the elements of
one block can belong to several pairs; the block itself is counted in the pair of its first column. If columns have an
importance, it is added up by the same pairs and |q|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE, Rule
from k2convert.quantize.formats.bf16 import bf16_values
from k2convert.quantize.formats.blocks import BLOCKS_PER_GROUP, row_chunks, run_starts
from k2convert.quantize.formats.e2m1 import E2M1_VALUES
from k2convert.quantize.formats.e4m3 import decode_e4m3
from k2convert.quantize.formats.histograms import PRESENCE_BITS, block_histograms, presence_masks, unpack_histograms
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight, unpack_int4
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.rules import RULES

COUNT_BLOCKS: Final = 1 << 18
"""Blocks tallied at once (20 MB of counts)."""

SCALE_MASK: Final = 0x7FFF
"""BF16 bits without the sign: minus zero is counted with zero."""


@dataclass(frozen=True, slots=True, eq=False)
class PairCounts:
    """Counts by distinct pair of source scale and block scale, in ascending order of the key.

    keys              int64 [P]     BF16 bits of s (or s * 2**-a) << 8 | E4M3 byte of b
    num_blocks        int64 [P]     blocks with this pair (the pair of their first column)
    magnitude_counts  int64 [P, 9]  elements with |q| = 0..8 in those blocks
    equal_blocks      blocks of the whole tensor in which every v * b * g equals its q * s
    outside_normal    blocks that a scale outside the normal range would serve strictly better; 0 if the rule does not
                      count them
    importance_sums   int64 [P, 9]  summed importance of those elements; None if columns have none
    """

    keys: NDArray[np.int64]
    num_blocks: NDArray[np.int64]
    magnitude_counts: NDArray[np.int64]
    equal_blocks: int
    outside_normal: int
    importance_sums: NDArray[np.int64] | None = None

    @property
    def scales(self) -> NDArray[np.float64]:
        """The source scale s of each pair, float64 [P]."""
        return _source_scales(self.keys)

    @property
    def scale_bytes(self) -> NDArray[np.uint8]:
        """The E4M3 byte of each pair, uint8 [P]."""
        return (self.keys & 0xFF).astype(np.uint8)


def count_pairs(
    source: Int4Weight, result: Nvfp4Weight, *, rule: Rule, importance: NDArray[np.uint8] | None = None
) -> PairCounts:
    """Count the pairs of a converted weight; `result` must be the result of `rule` for `source` and `importance`."""
    count_outside = RULES[rule].count_outside_normal
    outside = count_outside(source, result.global_scale, importance) if count_outside else 0
    if source.column_exponents is not None or importance is not None:
        parts = [
            _count_elements(source.rows(*rows), result.rows(*rows), rule=rule, importance=importance)
            for rows in row_chunks(*source.shape)
        ]
        return replace(merge_counts(parts), outside_normal=outside)
    keys_M = pair_keys(source.scale_bits.reshape(-1).repeat(BLOCKS_PER_GROUP), result.block_scales.reshape(-1))
    words_M = block_histograms(source.packed)
    return count_blocks(words_M, keys_M, rule=rule, global_scale=result.global_scale, outside_normal=outside)


def _count_elements(
    source: Int4Weight, result: Nvfp4Weight, *, rule: Rule, importance: NDArray[np.uint8] | None
) -> PairCounts:
    """Count the pairs of a weight element by element; `outside_normal` is left at zero."""
    bits_NK = (source.element_scales().view(np.uint32) >> 16).astype(np.uint16)
    keys_NK = pair_keys(bits_NK, result.block_scales.repeat(BLOCK_SIZE, axis=1))
    return count_elements(
        np.abs(unpack_int4(source.packed)).reshape(-1, BLOCK_SIZE),
        keys_NK.reshape(-1, BLOCK_SIZE),
        rule=rule,
        global_scale=result.global_scale,
        importance_ME=None if importance is None else np.tile(importance, len(keys_NK)).reshape(-1, BLOCK_SIZE),
    )


def count_elements(
    magnitudes_ME: NDArray[np.int8],
    keys_ME: NDArray[np.int64],
    *,
    rule: Rule,
    global_scale: float,
    importance_ME: NDArray[np.uint8] | None = None,
) -> PairCounts:
    """Count pairs from |q| and the key of every element of M blocks, [M, 16]; `outside_normal` is left at zero."""
    keys_P, pairs = np.unique(keys_ME, return_inverse=True)
    pairs_ME = pairs.reshape(keys_ME.shape)
    fields_ME = pairs_ME * NUM_MAGNITUDES + magnitudes_ME
    size = keys_P.size * NUM_MAGNITUDES

    def by_field(weights: NDArray[np.uint8] | None) -> NDArray[np.int64]:
        flat = None if weights is None else weights.reshape(-1)
        return np.bincount(fields_ME.reshape(-1), flat, size).astype(np.int64).reshape(-1, NUM_MAGNITUDES)

    wanted_Pk, written_Pk = pair_values(keys_P, rule=rule, global_scale=global_scale)
    exact_ME = (wanted_Pk == written_Pk).reshape(-1)[fields_ME]
    return PairCounts(
        keys=keys_P,
        num_blocks=np.bincount(pairs_ME[:, 0], minlength=keys_P.size).astype(np.int64),
        magnitude_counts=by_field(None),
        equal_blocks=int(exact_ME.all(axis=1).sum()),
        outside_normal=0,
        importance_sums=None if importance_ME is None else by_field(importance_ME),
    )


def pair_keys(scale_bits_M: NDArray[np.uint16], block_bytes_M: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the key int64 [M] of each block's pair from BF16 bits and E4M3 bytes."""
    return (scale_bits_M.astype(np.int64) & SCALE_MASK) << 8 | block_bytes_M


def count_blocks(
    words_M: NDArray[np.int64], keys_M: NDArray[np.int64], *, rule: Rule, global_scale: float, outside_normal: int
) -> PairCounts:
    """Count pairs from the blocks' histogram words and keys, both int64 [M]."""
    order_M = np.argsort(keys_M, kind="stable")
    sorted_M = keys_M[order_M]
    starts_P = run_starts(sorted_M)
    keys_P, blocks_P = sorted_M[starts_P], np.diff(starts_P, append=sorted_M.size)
    pairs_M = np.arange(keys_P.size).repeat(blocks_P)
    counts_Pk = np.zeros((keys_P.size, NUM_MAGNITUDES), dtype=np.int64)
    inexact_P = inexact_masks(keys_P, rule=rule, global_scale=global_scale)
    equal_blocks = 0
    for start in range(0, words_M.size, COUNT_BLOCKS):
        pairs = pairs_M[start : start + COUNT_BLOCKS]
        words = words_M[order_M[start : start + COUNT_BLOCKS]]
        runs = run_starts(pairs)
        counts_Pk[pairs[runs]] += np.add.reduceat(unpack_histograms(words), runs, axis=0)
        equal_blocks += int((presence_masks(words) & inexact_P[pairs] == 0).sum())
    return PairCounts(keys_P, blocks_P, counts_Pk, equal_blocks, outside_normal)


def merge_counts(parts: Sequence[PairCounts]) -> PairCounts:
    """Add up the counts of disjoint sets of blocks of one tensor."""
    all_keys = np.concatenate([part.keys for part in parts])
    order = np.argsort(all_keys, kind="stable")
    keys = all_keys[order]
    num_blocks = np.concatenate([part.num_blocks for part in parts])[order]
    counts = np.concatenate([part.magnitude_counts for part in parts])[order]
    sums = [part.importance_sums for part in parts if part.importance_sums is not None]
    importance = np.concatenate(sums)[order] if sums else None
    begins = run_starts(keys)
    if begins.size < keys.size:
        keys = keys[begins]
        num_blocks, counts = np.add.reduceat(num_blocks, begins), np.add.reduceat(counts, begins, axis=0)
        importance = None if importance is None else np.add.reduceat(importance, begins, axis=0)
    return PairCounts(
        keys=keys,
        num_blocks=num_blocks,
        magnitude_counts=counts,
        equal_blocks=sum(part.equal_blocks for part in parts),
        outside_normal=sum(part.outside_normal for part in parts),
        importance_sums=importance,
    )


def pair_values(
    keys_P: NDArray[np.int64], *, rule: Rule, global_scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return |q| * s and v * b * g for |q| = 0..8 under each pair, both exact, float64 [P, 9]."""
    scales_P, bytes_P = _source_scales(keys_P), (keys_P & 0xFF).astype(np.uint8)
    wanted = np.arange(NUM_MAGNITUDES, dtype=np.float64) * scales_P[:, None]
    codes = RULES[rule].pair_codes(scales_P, bytes_P, global_scale)
    return wanted, np.array(E2M1_VALUES)[codes] * (decode_e4m3(bytes_P) * global_scale)[:, None]


def inexact_masks(keys_P: NDArray[np.int64], *, rule: Rule, global_scale: float) -> NDArray[np.int64]:
    """Return int64 [P]: bit 5k + 4 (as in `presence_masks`) is set if |q| = k is not reproduced exactly."""
    wanted, written = pair_values(keys_P, rule=rule, global_scale=global_scale)
    return ((wanted != written) * PRESENCE_BITS).sum(axis=-1)


def sum_squared_error(counts: PairCounts, *, rule: Rule, global_scale: float) -> float:
    """Return the sum of (q * s - v * b * g)**2 over all counted elements."""
    wanted_Pk, written_Pk = pair_values(counts.keys, rule=rule, global_scale=global_scale)
    return sum_by_pair(counts.magnitude_counts * (wanted_Pk - written_Pk) ** 2)


def sum_by_pair(terms_Pk: NDArray[np.float64]) -> float:
    """Add float64 terms [P, 9]: each pair's nine in ascending |q|, then the pairs with math.fsum."""
    sums_P = terms_Pk[:, 0].copy()
    for k in range(1, NUM_MAGNITUDES):
        sums_P += terms_Pk[:, k]
    return math.fsum(sums_P.tolist())


def _source_scales(keys_P: NDArray[np.int64]) -> NDArray[np.float64]:
    return bf16_values((keys_P >> 8).astype(np.uint16)).astype(np.float64)
