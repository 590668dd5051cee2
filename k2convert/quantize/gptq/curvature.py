"""The curvature of the loss of a row, and its Cholesky factor.

    H_s = (1 - s) H + s diag H + .01 mean diag H        divided by mean diag H, which changes no code

With U^T U = H_s^-1 and U upper triangular, U_jk / U_jj says how the columns k > j best answer an error in column j.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.gptq.tiles import ALONE, Team, factor_lower, invert_lower

_linalg: Any = torch.linalg  # it has no types

DAMPING: Final = (0.01, 0.1, 1.0)
"""The share of the mean of the diagonal that is added to it: the first one that gives a positive definite matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class Curvature:
    """Curvature of the loss in K input channels, contiguous f32 tensors on one device.

    form            H_s over the mean of the diagonal of H, [K, K]
    factor          the upper triangular U with U^T U = form^-1, [K, K]
    block_factors   the same U for each diagonal block of 16 columns of `form`, [K/16, 16, 16]
    block_inverses  the inverses of these blocks, [K/16, 16, 16]
    is_even         whether every column counts the same, alone
    """

    form: Tensor
    factor: Tensor
    block_factors: Tensor
    block_inverses: Tensor
    is_even: bool = False

    def to(self, device: str) -> Curvature:
        """Return the curvature on a device."""
        tensors = (self.form, self.factor, self.block_factors, self.block_inverses)
        return Curvature(*(tensor.to(device) for tensor in tensors), is_even=self.is_even)


def make_curvature(form_KK: Tensor, shrinkage: float, team: Team = ALONE) -> Curvature:
    """Return the curvature of H f32 [K, K], positive semidefinite, with a shrinkage of 0..1 towards its diagonal.

    Computed in FP64. H may be singular. Without anything positive on its diagonal, every column counts the same.
    """
    return _with_blocks(*shrunk(form_KK, shrinkage, team))


def shrunk(form_KK: Tensor, shrinkage: float, team: Team = ALONE) -> tuple[Tensor, Tensor]:
    """Return `form` and `factor` of such a curvature, which rounding without sweeps needs."""
    mean = float(form_KK.diagonal().double().mean())
    if not 0 < mean < float("inf"):
        even = torch.ones(form_KK.shape[0], device=form_KK.device).diag()
        return even, even
    for damping in DAMPING:
        damped_KK = form_KK.double().mul_((1 - shrinkage) / mean)
        damped_KK.diagonal().add_(form_KK.diagonal().double(), alpha=shrinkage / mean).add_(damping)
        kept_KK = damped_KK.float()
        flipped_KK = damped_KK.flip(0, 1)
        del damped_KK
        factor_KK = _upper_factor(flipped_KK, team)
        del flipped_KK
        if factor_KK is not None:
            return kept_KK, factor_KK
    # Not a sum of squares, by far: the diagonal alone.
    diagonal_K = (form_KK.diagonal().double().clamp_min(0) / mean).add_(DAMPING[0])
    return diagonal_K.diag().float(), diagonal_K.rsqrt().diag().float()


def even_curvature(columns: int, *, device: str) -> Curvature:
    """Return the curvature of the plain squared error."""
    identity_KK = torch.ones(columns, device=device).diag()
    return replace(_with_blocks(identity_KK, identity_KK), is_even=True)


def _with_blocks(form_KK: Tensor, factor_KK: Tensor) -> Curvature:
    num_blocks = form_KK.shape[0] // BLOCK_SIZE
    diagonal = torch.arange(num_blocks, device=form_KK.device)
    blocks_BJJ = form_KK.view(num_blocks, BLOCK_SIZE, num_blocks, BLOCK_SIZE)[diagonal, :, diagonal].double()
    lower_BJJ: Tensor = _linalg.cholesky(blocks_BJJ.flip(-2, -1))
    identity_JJ = torch.ones(BLOCK_SIZE, dtype=torch.float64, device=form_KK.device).diag()
    solved_BJJ: Tensor = _linalg.solve_triangular(lower_BJJ, identity_JJ.expand_as(lower_BJJ), upper=False)
    upper_BJJ = solved_BJJ.flip(-2, -1)
    inverse_BJJ = upper_BJJ.mT @ upper_BJJ
    return Curvature(form_KK, factor_KK, upper_BJJ.float().contiguous(), inverse_BJJ.float().contiguous())


def _upper_factor(flipped_KK: Tensor, team: Team) -> Tensor | None:
    """Return U f32 of an f64 matrix, given with its columns and rows in reverse order; None if not positive definite.

    The memory of the matrix is used. It is L L^T, and U is L^-1, reversed again: half the work of inverting H.
    """
    if not factor_lower(flipped_KK, team):
        return None
    size = flipped_KK.shape[0]
    factor_KK = torch.zeros(size, size, device=flipped_KK.device)

    def keep(columns: slice, values: Tensor) -> None:
        factor_KK[: size - columns.start, size - columns.stop : size - columns.start] = values.flip(0, 1)

    invert_lower(flipped_KK, keep, team)
    return factor_KK if bool(torch.isfinite(factor_KK.diagonal()).all()) else None
