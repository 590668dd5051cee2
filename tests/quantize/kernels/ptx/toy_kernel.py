"""A small triton kernel that does what a kernel of weights does: masks, nibbles, a table, exact sums, a count."""

# triton's language has no types, and its functions are compiled from this source.
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportMissingTypeArgument=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
NIBBLES = 8


@triton.jit(do_not_specialize=["num_words", "nibbles"])
def sum_kernel(words, table, sums, negative, num_words, nibbles, TILE: tl.constexpr):
    """Sum the table's values of the nibbles of TILE words; `negative` int64 [1] counts the sums below zero."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = place < num_words
    word = tl.load(words + place, mask=valid, other=0)
    total = tl.zeros(place.shape, tl.float64)
    for number in range(nibbles):
        total += tl.load(table + ((word >> (4 * number)) & 15))
    tl.store(sums + place, total, mask=valid)
    is_negative = valid & (total < 0)
    if tl.max(is_negative.to(tl.int32), axis=0) > 0:
        tl.atomic_add(negative, tl.sum(is_negative.to(tl.int64), axis=0), sem="relaxed")


def sum_nibbles(words: Tensor, table: Tensor) -> tuple[Tensor, int]:
    """Return the sums float64 [n] of the table float64 [16] over the nibbles of words int32 [n], and how many are
    negative.
    """
    sums = torch.full(words.shape, torch.nan, dtype=torch.float64)
    negative = torch.zeros(1, dtype=torch.int64)
    programs = -(-words.numel() // TILE)
    sum_kernel[(programs,)](words, table, sums, negative, words.numel(), NIBBLES, TILE=TILE)
    return sums, int(negative)


def expected(words: Tensor, table: Tensor) -> tuple[Tensor, int]:
    """Return what `sum_nibbles` returns, by PyTorch."""
    nibbles = (words[:, None] >> (4 * torch.arange(NIBBLES, dtype=torch.int32))) & 15
    sums = table[nibbles.long()].sum(dim=1)
    return sums, int((sums < 0).sum())
