"""Cutting a tensor: rows into chunks of bounded memory, INT4 rows into the 16-element blocks of NVFP4.

The histogram of |q| in a block is kept in one int64: nine fields of five bits, field k counting |q| = k (0..16).
A block's error under any scale is a function of its histogram alone, so this word is what the search works on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from k2convert.choices import BLOCK_SIZE, GROUP_SIZE
from k2convert.quantize.formats.int4 import MAX_MAGNITUDE, NUM_MAGNITUDES
from k2convert.quantize.formats.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_ELEMENTS: Final = 1 << 20
"""Weights handled at once: working memory is a small multiple of it, whatever the tensor's size."""

SAMPLE_STRIDE: Final = 64
MIN_SAMPLED_BLOCKS: Final = 4096

BLOCKS_PER_GROUP: Final = GROUP_SIZE // BLOCK_SIZE
BYTES_PER_BLOCK: Final = BLOCK_SIZE // 2
FIELD_BITS: Final = 5
FIELD_MASK: Final = (1 << FIELD_BITS) - 1


def row_chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) over the rows, about CHUNK_ELEMENTS weights at a time."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def block_histograms(packed: Tensor) -> Tensor:
    """Return int64 [N * K/16] histogram words of INT4 bytes uint8 [N, K/2]."""
    rows, row_bytes = packed.shape
    table = _byte_histograms(packed.device)
    words = torch.empty(rows, row_bytes // BYTES_PER_BLOCK, dtype=torch.int64, device=packed.device)
    for start, stop in row_chunks(rows, 2 * row_bytes):
        per_byte = table[packed[start:stop].to(torch.int32)]
        words[start:stop] = per_byte.view(stop - start, -1, BYTES_PER_BLOCK).sum(dim=-1)
    return words.flatten()


def unpack_histograms(words_M: Tensor) -> Tensor:
    """Return int64 [M, 9] counts of |q| = 0..8 from histogram words int64 [M]."""
    shifts = torch.arange(0, FIELD_BITS * NUM_MAGNITUDES, FIELD_BITS, device=words_M.device)
    return (words_M.unsqueeze(-1) >> shifts) & FIELD_MASK


def presence_masks(words_M: Tensor) -> Tensor:
    """Return int64 [M]: bit 5k + 4 is set where the block holds some |q| = k."""
    # 15 + n has its fifth bit set exactly when n is 1..16, and never carries into the next field.
    fifteens = sum(15 << (FIELD_BITS * k) for k in range(NUM_MAGNITUDES))
    return (words_M + fifteens) & presence_field_mask()


def presence_field_mask() -> int:
    """All bits that `presence_masks` can set."""
    return sum(16 << (FIELD_BITS * k) for k in range(NUM_MAGNITUDES))


def sampled_range(num_blocks: int, *, sample_seed: int) -> range:
    """Return the row-major indices of the sampled blocks: one in 64, or about 4,096 of a smaller tensor."""
    stride = min(SAMPLE_STRIDE, max(1, num_blocks // MIN_SAMPLED_BLOCKS))
    return range(sample_seed % stride, num_blocks, stride)


def sampled_blocks(num_blocks: int, *, sample_seed: int, device: torch.device) -> Tensor:
    """Return `sampled_range` as int64 on a device."""
    chosen = sampled_range(num_blocks, sample_seed=sample_seed)
    return torch.arange(chosen.start, chosen.stop, chosen.step, device=device)


def equal_runs(sorted_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each run of equal values starts and how long it is, both int64, for a sorted tensor [M]."""
    begins = torch.ones(sorted_M.shape, dtype=torch.bool, device=sorted_M.device)
    begins[1:] = sorted_M[1:] != sorted_M[:-1]
    starts = torch.nonzero(begins).flatten()
    ends = torch.cat((starts[1:], torch.tensor([sorted_M.numel()], device=sorted_M.device)))
    return starts, (ends - starts if starts.numel() else starts)


@lru_cache(maxsize=8)
def _byte_histograms(device: torch.device) -> Tensor:
    fields = [1 << (FIELD_BITS * abs(nibble - MAX_MAGNITUDE)) for nibble in range(16)]
    return torch.tensor([fields[byte & 0xF] + fields[byte >> 4] for byte in range(256)], device=device)
