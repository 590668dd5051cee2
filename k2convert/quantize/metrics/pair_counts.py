"""The integer table that every INT4 metric is a function of, and the seam where fast kernels plug in.

Under a rule and a global scale, the code that |q| gets depends on the source scale s and the block scale b alone. So
it is enough to know, for each distinct pair (s, b), how many blocks have it and how often each |q| occurs in them:
a few thousand rows of integers, whoever counted them, on whatever device, in whatever order. Metrics computed from
the table are then identical too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import Rule
from k2convert.quantize.formats.blocks import (
    BLOCKS_PER_GROUP,
    block_histograms,
    equal_runs,
    presence_field_mask,
    presence_masks,
    unpack_histograms,
)
from k2convert.quantize.formats.e2m1 import E2M1_VALUES, nearest_code
from k2convert.quantize.formats.e4m3 import decode_e4m3
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight
from k2convert.quantize.formats.lazy_torch import torch
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.rules.optimal import count_outside_normal
from k2convert.quantize.rules.plain import plain_nibbles

if TYPE_CHECKING:
    from torch import Tensor

COUNT_BLOCKS: Final = 1 << 18
"""Blocks tallied at once (20 MB of counts)."""


@dataclass(frozen=True, slots=True, eq=False)
class PairCounts:
    """Counts by distinct pair of source scale and block scale, in ascending order of the key.

    keys              int64 [P]     BF16 bits of s << 8 | E4M3 byte of b
    num_blocks        int64 [P]     blocks with this pair
    magnitude_counts  int64 [P, 9]  elements with |q| = 0..8 in those blocks
    equal_blocks      blocks of the whole tensor in which every v * b * g equals its q * s
    outside_normal    blocks that a scale outside the normal range would serve strictly better; 0 under `plain`
    """

    keys: NDArray[np.int64]
    num_blocks: NDArray[np.int64]
    magnitude_counts: NDArray[np.int64]
    equal_blocks: int
    outside_normal: int

    @property
    def scales(self) -> NDArray[np.float64]:
        """The source scale s of each pair, float64 [P]."""
        return _source_scales(self.keys)

    @property
    def scale_bytes(self) -> NDArray[np.uint8]:
        """The E4M3 byte of each pair, uint8 [P]."""
        return (self.keys & 0xFF).astype(np.uint8)


def count_pairs(source: Int4Weight, result: Nvfp4Weight, *, rule: Rule) -> PairCounts:
    """Count the pairs of a converted weight; `result` must be what `rule` makes of `source`."""
    outside = count_outside_normal(source, result.global_scale) if rule == "optimal" else 0
    words_M = block_histograms(source.packed)
    bits_NG = source.scales.view(torch.int16).to(torch.int64) & 0x7FFF
    keys_M = bits_NG.repeat_interleave(BLOCKS_PER_GROUP, dim=-1).flatten() << 8 | result.block_scales.flatten()
    return count_blocks(words_M, keys_M, rule=rule, global_scale=result.global_scale, outside_normal=outside)


def count_blocks(
    words_M: Tensor, keys_M: Tensor, *, rule: Rule, global_scale: float, outside_normal: int
) -> PairCounts:
    """Count pairs from the blocks' histogram words and keys, both int64 [M]."""
    sorted_M, order_M = torch.sort(keys_M)
    starts_P, blocks_P = equal_runs(sorted_M)
    keys_P = sorted_M[starts_P]
    pairs_M = torch.arange(keys_P.numel(), device=keys_M.device).repeat_interleave(blocks_P)
    counts_Pk = torch.zeros(keys_P.numel(), NUM_MAGNITUDES, dtype=torch.int64, device=words_M.device)
    inexact_P = torch.as_tensor(inexact_masks(keys_P.cpu().numpy(), rule=rule, global_scale=global_scale))
    inexact_P = inexact_P.to(words_M.device)
    equal_blocks = 0
    for start in range(0, words_M.numel(), COUNT_BLOCKS):
        pairs = pairs_M[start : start + COUNT_BLOCKS]
        words = words_M[order_M[start : start + COUNT_BLOCKS]]
        counts_Pk.index_add_(0, pairs, unpack_histograms(words))
        equal_blocks += int((presence_masks(words) & inexact_P[pairs] == 0).sum())
    return PairCounts(
        keys=keys_P.cpu().numpy(),
        num_blocks=blocks_P.cpu().numpy(),
        magnitude_counts=counts_Pk.cpu().numpy(),
        equal_blocks=equal_blocks,
        outside_normal=outside_normal,
    )


def merge_counts(parts: Sequence[PairCounts]) -> PairCounts:
    """Add up the counts of disjoint sets of blocks of one tensor."""
    all_keys = np.concatenate([part.keys for part in parts])
    order = np.argsort(all_keys, kind="stable")
    keys = all_keys[order]
    num_blocks = np.concatenate([part.num_blocks for part in parts])[order]
    counts = np.concatenate([part.magnitude_counts for part in parts])[order]
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    if begins.size < keys.size:
        keys = keys[begins]
        num_blocks, counts = np.add.reduceat(num_blocks, begins), np.add.reduceat(counts, begins, axis=0)
    return PairCounts(
        keys=keys,
        num_blocks=num_blocks,
        magnitude_counts=counts,
        equal_blocks=sum(part.equal_blocks for part in parts),
        outside_normal=sum(part.outside_normal for part in parts),
    )


def pair_codes(keys_P: NDArray[np.int64], *, rule: Rule, global_scale: float) -> NDArray[np.uint8]:
    """Return the E2M1 code 0..7 that each |q| = 0..8 gets under each pair, uint8 [P, 9]."""
    keys = torch.as_tensor(keys_P)
    scales_P1 = (keys >> 8).to(torch.int16).view(torch.bfloat16).unsqueeze(-1)
    block_scales_P1 = decode_e4m3((keys & 0xFF).to(torch.uint8)).unsqueeze(-1)
    if rule == "plain":
        weights = torch.arange(NUM_MAGNITUDES).to(torch.bfloat16) * scales_P1
        steps = block_scales_P1.to(torch.float32) * torch.tensor(global_scale, dtype=torch.float32)
        return plain_nibbles(weights, steps).numpy()
    # Both products are exact in float64, and so is every comparison between them.
    numerators = torch.arange(NUM_MAGNITUDES, dtype=torch.float64) * scales_P1.to(torch.float64)
    return nearest_code(numerators, block_scales_P1 * global_scale).numpy()


def pair_values(
    keys_P: NDArray[np.int64], *, rule: Rule, global_scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return |q| * s and v * b * g for |q| = 0..8 under each pair, both exact, float64 [P, 9]."""
    scales_P = _source_scales(keys_P)
    block_scales_P = decode_e4m3(torch.as_tensor((keys_P & 0xFF).astype(np.uint8))).numpy()
    wanted = np.arange(NUM_MAGNITUDES, dtype=np.float64) * scales_P[:, None]
    codes = pair_codes(keys_P, rule=rule, global_scale=global_scale)
    return wanted, np.array(E2M1_VALUES)[codes] * (block_scales_P * global_scale)[:, None]


def inexact_masks(keys_P: NDArray[np.int64], *, rule: Rule, global_scale: float) -> NDArray[np.int64]:
    """Return int64 [P]: bit 5k + 4 (as in `presence_masks`) is set where |q| = k is not reproduced exactly."""
    wanted, written = pair_values(keys_P, rule=rule, global_scale=global_scale)
    field_bits = np.int64(1) << (5 * np.arange(NUM_MAGNITUDES, dtype=np.int64) + 4)
    assert int(field_bits.sum()) == presence_field_mask()
    return ((wanted != written) * field_bits).sum(axis=-1)


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
    # A BF16 number is the upper half of an FP32 one.
    return ((keys_P >> 8).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
