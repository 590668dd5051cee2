"""The `imatrix` rule: the E4M3 scale of every block that has the least error on the inputs that were seen.

    sum over the block of m_j * (W_j - v_j * b * g)**2        m_j = E[x_j**2], the mean square of input column j

is the error of the block's product with its input, if the inputs of different columns are not correlated. To stay exact
and equal on every device, the mean squares of a block become integers, its importance:

    w_j = max(1, round(255 * m_j / max of the block's m))        round half to even, in float64

A block whose mean squares are all zero has 255 everywhere, and so has a weight without an importance: both are the
`mse` rule. INT4 weights are searched by mse.py, BF16 weights by mse_bf16.py. The global scale is that of
`mse`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.errors import FormatError
from k2convert.quantize.formats.int4 import Bf16Weight, SourceWeight, describe
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.rules.mse import MAX_IMPORTANCE, check_importance, global_exponent, quantize_columns
from k2convert.quantize.rules.mse_bf16 import quantize_imatrix_bf16


def block_importance(mean_square: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the importance uint8 [K] of input columns with these mean squares, float32 [K].

    FormatError if a mean square is negative, NaN or infinite.
    """
    if mean_square.dtype != np.float32 or mean_square.ndim != 1 or mean_square.size % BLOCK_SIZE:
        raise FormatError(
            f"mean squares must be float32 [K], K a multiple of {BLOCK_SIZE}, not {describe(mean_square)}"
        )
    if not (np.isfinite(mean_square) & (mean_square >= 0)).all():
        raise FormatError("mean squares must be finite and not negative")
    blocks_BE = mean_square.reshape(-1, BLOCK_SIZE).astype(np.float64)
    largest_B1 = blocks_BE.max(axis=1, keepdims=True)
    shares_BE = np.divide(
        MAX_IMPORTANCE * blocks_BE, largest_B1, out=np.full_like(blocks_BE, MAX_IMPORTANCE), where=largest_B1 > 0
    )
    return np.maximum(1, np.rint(shares_BE)).astype(np.uint8).reshape(-1)


def quantize_imatrix(weight: SourceWeight, global_scale: float, importance: NDArray[np.uint8]) -> Nvfp4Weight:
    """Quantize an INT4 or BF16 weight [N, K] for g = 2**k with the importance uint8 [K] of its columns."""
    exponent = global_exponent(global_scale)
    check_importance(importance, weight.shape[1])
    if isinstance(weight, Bf16Weight):
        return quantize_imatrix_bf16(weight, global_scale, importance)
    return quantize_columns(weight, exponent, importance)
