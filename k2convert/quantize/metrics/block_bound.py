"""The least squared error that any NVFP4 block can have, over all real-valued scales, which include E4M3 times g.

For a fixed assignment of codes v to the elements, the best scale gives  sum k**2 - (sum k v)**2 / sum v**2.  Rounding
to nearest changes an assignment only where t crosses a breakpoint t = k / m, with m a midpoint between neighboring
E2M1 values. So the minimum over all real t is a minimum over the assignments between breakpoints. For |q| = 1..8 there
are at most 57, the same for every block. For real weights they differ from block to block.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.quantize.formats.e2m1 import DOUBLED_VALUES, QUADRUPLED_MIDPOINTS, nearest_code
from k2convert.quantize.formats.int4 import MAX_MAGNITUDE, NUM_MAGNITUDES
from k2convert.quantize.rules.optimal_bf16 import sum_in_order

BOUND_BLOCKS: Final = 1 << 14
"""Blocks bounded at once (2 MB a temporary)."""


@lru_cache(maxsize=1)
def int4_assignments() -> NDArray[np.int64]:
    """Return every code assignment of |q| = 0..8 that a real scale can give, as doubled values int64 [57, 9]."""
    midpoints = [Fraction(value, 4) for value in QUADRUPLED_MIDPOINTS]
    breakpoints = sorted({k / midpoint for k in range(1, MAX_MAGNITUDE + 1) for midpoint in midpoints})
    inner = [(low + high) / 2 for low, high in pairwise(breakpoints)]
    steps = [breakpoints[0] / 2, *inner, breakpoints[-1] * 2]
    # No step is a breakpoint, so no ratio is a midpoint, and counting the midpoints below it needs no tie rule.
    rows = [
        [DOUBLED_VALUES[sum(k / step > midpoint for midpoint in midpoints)] for k in range(NUM_MAGNITUDES)]
        for step in steps
    ]
    return np.unique(np.array(rows, dtype=np.int64), axis=0)


def int4_block_bounds(histograms_Mk: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the bound of each block in units of s**2, float64 [M], from counts of |q| = 0..8, int64 [M, 9]."""
    k = np.arange(NUM_MAGNITUDES, dtype=np.float64)
    values_Ak = int4_assignments().astype(np.float64)
    counts = histograms_Mk.astype(np.float64)
    # All sums are integers below 2**53: exact in any order.
    inner_MA = counts @ (k * values_Ak).T
    norm_MA = counts @ (values_Ak * values_Ak).T
    explained_MA = np.divide(inner_MA * inner_MA, norm_MA, out=np.zeros_like(norm_MA), where=norm_MA > 0)
    return counts @ (k * k) - explained_MA.max(axis=1)


def bf16_block_bounds(blocks_ME: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the least squared error a real-valued scale can have, float64 [M], for blocks float32 [M, 16].

    The values have at most 12 significant bits, as BF16 numbers and q * s do. The breakpoints are |w| / m for the
    sixteen weights of the block and the seven midpoints m.
    """
    weights_EM = np.ascontiguousarray(np.abs(blocks_ME).astype(np.float64).T)
    midpoints = np.array(QUADRUPLED_MIDPOINTS) / 4
    breakpoints = np.sort((weights_EM[:, None, :] / midpoints[:, None]).reshape(-1, weights_EM.shape[1]), axis=0)
    steps = np.concatenate((breakpoints[:1] / 2, (breakpoints[1:] + breakpoints[:-1]) / 2))
    doubled = np.array(DOUBLED_VALUES, dtype=np.float64)
    explained_M = np.zeros(weights_EM.shape[1])
    for step_M in steps:
        # A step of zero can only come from zeros; any other step gives a real assignment, so 1.0 does.
        values_EM = doubled[nearest_code(weights_EM, np.where(step_M > 0, step_M, 1.0))]
        inner_M, norm_M = sum_in_order(weights_EM * values_EM), sum_in_order(values_EM * values_EM)
        explained_M = np.maximum(explained_M, inner_M * inner_M / norm_M.clip(min=1.0))
    return (sum_in_order(weights_EM * weights_EM) - explained_M).clip(min=0.0)
