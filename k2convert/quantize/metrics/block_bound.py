"""The least squared error that any NVFP4 block can have, over all real-valued scales, which include E4M3 times g.

For a fixed assignment of codes v to the elements, the best scale gives  sum k**2 - (sum k v)**2 / sum v**2.  Rounding
to nearest changes an assignment only where t crosses a breakpoint t = k / m, with m a midpoint between neighboring
E2M1 values. So the minimum over all real t is a minimum over the assignments between breakpoints. For |q| = 1..8 there
are at most 57, the same for every block.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from k2convert.quantize.formats.e2m1 import DOUBLED_VALUES, QUADRUPLED_MIDPOINTS
from k2convert.quantize.formats.int4 import MAX_MAGNITUDE, NUM_MAGNITUDES


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
