"""`mse` for BF16 sources equals a search over all 119 normal scales, term by term in the same order."""

import numpy as np
import torch
from exact_search import NORMAL_BYTES, e4m3_value
from hypothesis import example, given, settings
from hypothesis import strategies as st
from weight_makers import bf16_weight, blocks_of

from k2convert.quantize.formats.bf16 import Magnitude
from k2convert.quantize.formats.nvfp4 import unpack_nibbles
from k2convert.quantize.rules import quantize_best
from k2convert.quantize.rules.search_int4 import mse_global_scale

VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest_codes(block: np.ndarray, step: float) -> np.ndarray:
    """Nearest value by exhaustive comparison; of two equally near the even code."""
    distance = np.abs(np.minimum(block / step, 100.0)[:, None] - VALUES)
    rank = distance.argmin(axis=1)
    tied = (rank < 7) & (distance[np.arange(16), rank] == distance[np.arange(16), np.minimum(rank + 1, 7)])
    return np.where(tied & (rank % 2 == 1), rank + 1, rank)


def search(block: np.ndarray, global_scale: float) -> tuple[int, np.ndarray]:
    best = 0x38
    least = np.inf
    if not block.any():
        return best, np.zeros(16, dtype=np.int64)
    for byte in NORMAL_BYTES:
        step = float(e4m3_value(byte)) * global_scale
        error = 0.0
        for w, v in zip(block.tolist(), VALUES[nearest_codes(block, step)].tolist(), strict=True):
            difference = w - v * step
            error += difference * difference
        if error <= least:
            best = byte
            least = error
    return best, nearest_codes(block, float(e4m3_value(best)) * global_scale)


def assert_equals_full_search(weight: torch.Tensor, global_scale: float) -> None:
    result = quantize_best(bf16_weight(weight), global_scale)
    nibbles = unpack_nibbles(result.packed).reshape(-1, 16)
    blocks = blocks_of(weight).to(torch.float64).numpy()
    for block, written, byte in zip(blocks, nibbles, result.block_scales.reshape(-1).tolist(), strict=True):
        best, codes = search(np.abs(block), global_scale)
        assert byte == best, block
        assert np.array_equal(written, np.where((block < 0) & (codes > 0), codes + 8, codes))


def own_scale(weight: torch.Tensor) -> float:
    return mse_global_scale(bf16_weight(weight).magnitude())


def awkward(seed: int) -> torch.Tensor:
    """Dense, sparse, heavy-tailed, few-valued, tiny and empty blocks."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(12, 64, generator=generator)
    weight[2:4] *= torch.rand(2, 64, generator=generator) < 0.1
    weight[4:6] = weight[4:6] ** 7
    weight[6:8] = torch.round(weight[6:8] * 2) / 2
    weight[8] *= torch.exp2(-torch.arange(64.0) / 2)
    weight[9] *= 2.0**-14
    weight[10, :16] = 0
    weight[11] = 1.5
    return (weight * 0.03).to(torch.bfloat16)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(-124, 100), exponent=st.none() | st.integers(-126, 20))
@example(seed=0, size=0, exponent=None)
@example(seed=2, size=0, exponent=-9)
@example(seed=3, size=-124, exponent=None)  # subnormal weights
def test_awkward_blocks_of_any_size_equal_the_full_search(seed: int, size: int, exponent: int | None) -> None:
    weight = (awkward(seed).to(torch.float32) * 2.0**size).to(torch.bfloat16)
    assert_equals_full_search(weight, own_scale(weight) if exponent is None else 2.0**exponent)


def test_the_global_scale_lets_the_largest_weight_be_a_seven() -> None:
    assert mse_global_scale(Magnitude(7.0, 7.0, is_int4=False)) == mse_global_scale(Magnitude(1.0, 0.0, is_int4=True))
