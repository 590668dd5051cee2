"""The curvature of the loss of a row, and its Cholesky factor.

    H_s = (1 - s) H + s diag H + .01 mean diag H        divided by mean diag H, which changes no code

With U^T U = H_s^-1 and U upper triangular, U_jk / U_jj says how the columns k > j best answer an error in column j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from k2convert.choices import BLOCK_SIZE

DAMPING: Final = (0.01, 0.1, 1.0)
"""The share of the mean of the diagonal that is added to it: the first one that gives a positive definite matrix."""

_SMALL: Final = 128
"""Triangles up to this size are inverted at once."""

_linalg: Any = torch.linalg  # it has no types


@dataclass(frozen=True, slots=True, eq=False)
class Curvature:
    """What rounding has to know of K columns, contiguous f32 tensors on one device.

    form           H_s over the mean of the diagonal of H, [K, K]
    factor         the upper triangular U with U^T U = form^-1, [K, K]
    block_factors  the same U for each diagonal block of 16 columns of `form`, [K/16, 16, 16]
    """

    form: Tensor
    factor: Tensor
    block_factors: Tensor


def make_curvature(form_KK: Tensor, shrinkage: float) -> Curvature:
    """Return the curvature of H f32 [K, K], positive semidefinite, with a shrinkage of 0..1 towards its diagonal.

    Computed in FP64. H may be singular. Without anything positive on its diagonal, every column counts the same.
    """
    mean = float(form_KK.diagonal().double().mean())
    if not 0 < mean < float("inf"):
        return even_curvature(form_KK.shape[0], device=str(form_KK.device))
    for damping in DAMPING:
        damped_KK = form_KK.double().mul_((1 - shrinkage) / mean)
        damped_KK.diagonal().add_(form_KK.diagonal().double(), alpha=shrinkage / mean).add_(damping)
        kept_KK = damped_KK.float()
        factor_KK = _upper_factor(damped_KK)
        if factor_KK is not None:
            return _with_blocks(kept_KK, factor_KK)
    # Not a sum of squares, by far: the diagonal alone.
    diagonal_K = (form_KK.diagonal().double().clamp_min(0) / mean).add_(DAMPING[0])
    return _with_blocks(diagonal_K.diag().float(), diagonal_K.rsqrt().diag().float())


def even_curvature(columns: int, *, device: str) -> Curvature:
    """Return the curvature of the plain squared error."""
    identity_KK = torch.ones(columns, device=device).diag()
    return _with_blocks(identity_KK, identity_KK)


def _with_blocks(form_KK: Tensor, factor_KK: Tensor) -> Curvature:
    num_blocks = form_KK.shape[0] // BLOCK_SIZE
    diagonal = torch.arange(num_blocks, device=form_KK.device)
    blocks_BJJ = form_KK.view(num_blocks, BLOCK_SIZE, num_blocks, BLOCK_SIZE)[diagonal, :, diagonal].double()
    lower_BJJ: Tensor = _linalg.cholesky(blocks_BJJ.flip(-2, -1))
    identity_JJ = torch.ones(BLOCK_SIZE, dtype=torch.float64, device=form_KK.device).diag()
    inverse_BJJ: Tensor = _linalg.solve_triangular(lower_BJJ, identity_JJ.expand_as(lower_BJJ), upper=False)
    return Curvature(form_KK, factor_KK, inverse_BJJ.flip(-2, -1).float().contiguous())


def _upper_factor(form_KK: Tensor) -> Tensor | None:
    """Return U f32 of an f64 matrix, whose memory is used; None if it is not positive definite.

    With the order of the columns reversed, H = L L^T and U is L^-1, reversed again: half the work of inverting H.
    """
    lower_KK: Tensor
    lower_KK, info = _linalg.cholesky_ex(form_KK.flip(0, 1))
    if int(info):
        return None
    _invert_lower(lower_KK)
    factor_KK = lower_KK.float().flip(0, 1).contiguous()
    return factor_KK if bool(torch.isfinite(factor_KK.diagonal()).all()) else None


def _invert_lower(lower: Tensor) -> None:
    """Invert a lower triangular matrix in place, by quarters: products of matrices, and little memory."""
    size = lower.shape[0]
    if size <= _SMALL:
        identity = torch.ones(size, dtype=lower.dtype, device=lower.device).diag()
        lower.copy_(_linalg.solve_triangular(lower, identity, upper=False))
        return
    half = (size // 2 + _SMALL - 1) // _SMALL * _SMALL
    first, second, below = lower[:half, :half], lower[half:, half:], lower[half:, :half]
    _invert_lower(first)
    _invert_lower(second)
    below.copy_((second @ below @ first).neg_())
