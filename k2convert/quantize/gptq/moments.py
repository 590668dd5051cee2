"""Sums of one input over tokens, by halves, and the correction of a weight for what its input lacks.

x is the input that the converted model has, `missing` what should be added to the output or to the input: there is a
matrix d with d x close to `missing`. Half a of the tokens fits it, half b says whether it helps:

    d_a = D_a (H + lambda P)^-1      D = E[w missing x^T], H = E[w x x^T], P = (diag H + mean diag H) / 2
    loss = sum over both orders of tr(gram d_a H_b d_a^T) - 2 tr(gram d_a D_b^T)

The strength lambda with the least loss wins if that is below zero; all tokens then fit d with lambda / 2, because they
are twice as many. A fixed small lambda is worse than no correction.

Also here: the curvature of the loss of a row, and its Cholesky factor.

    H_s = (1 - s) H + s diag H + .01 mean diag H        divided by mean diag H, which changes no code

With U^T U = H_s^-1 and U upper triangular, U_jk / U_jj says how the columns k > j best answer an error in column j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from k2convert.choices import BLOCK_SIZE

MIN_TOKENS: Final = 512
"""With fewer tokens there is no correction."""

STRENGTHS: Final = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

_linalg: Any = torch.linalg  # it has no types


@dataclass(frozen=True, slots=True)
class Ridge:
    """How a correction was found.

    strength  lambda, None if there is no correction
    gain      the share of sum of w * |missing|^2 that the corrections of each half remove on the other half, 0..1
    """

    strength: float | None
    gain: float


@dataclass(slots=True, eq=False)
class Moments:
    """Sums over tokens, by halves, all f32 on one device but `weights`.

    forms     sum of w x x^T [2, K, K]
    crosses   sum of w missing x^T [2, N, K]
    energies  sum of w missing^2 [2, N]
    weights   sum of w of each half
    tokens    how many tokens were added
    """

    forms: Tensor
    crosses: Tensor
    energies: Tensor
    weights: tuple[float, float] = (0.0, 0.0)
    tokens: int = 0

    @classmethod
    def start(cls, columns: int, rows: int, *, device: str) -> Moments:
        """Return sums of nothing for inputs [t, columns] and missing outputs [t, rows]."""
        return cls(
            torch.zeros(2, columns, columns, device=device),
            torch.zeros(2, rows, columns, device=device),
            torch.zeros(2, rows, device=device),
        )

    def add(self, inputs_tK: Tensor, missing_tN: Tensor, weights_t: Tensor, halves_t: Tensor) -> None:
        """Add tokens: f32 inputs [t, K] and missing [t, N], weights [t] of at least 0, halves 0 or 1 [t]."""
        self.tokens += inputs_tK.shape[0]
        halves_t = halves_t.to(torch.bool)
        added = [0.0, 0.0]
        for half, chosen_t in enumerate((~halves_t, halves_t)):
            weights = weights_t[chosen_t]
            roots = weights.sqrt().float()[:, None]
            inputs, missing = inputs_tK[chosen_t] * roots, missing_tN[chosen_t] * roots
            self.forms[half].addmm_(inputs.T, inputs)
            self.crosses[half].addmm_(missing.T, inputs)
            self.energies[half] += missing.square().sum(dim=0)
            added[half] = float(weights.double().sum())
        self.weights = self.weights[0] + added[0], self.weights[1] + added[1]

    def form(self) -> Tensor:
        """Return H = E[w x x^T] f32 [K, K] over all tokens: the sum over the sum of w; zeros without tokens."""
        return (self.forms[0] + self.forms[1]).div_(_divisor(sum(self.weights)))

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return H of each half, each over its own sum of w."""
        first, second = (self.forms[half] / _divisor(self.weights[half]) for half in (0, 1))
        return first, second

    def scaled(self, exponents_K: Tensor) -> Moments:
        """Return the sums of inputs and missing inputs times 2**a, exactly; a is an integer [K].

        `missing` must be a difference of inputs, so N = K. The result takes over the memory of these sums, so they must
        not be used again.
        """
        assert self.crosses.shape == self.forms.shape
        factors_K = torch.exp2(exponents_K.to(self.forms))
        for sums in (self.forms, self.crosses):
            sums.mul_(factors_K).mul_(factors_K[:, None])
        self.energies.mul_(factors_K.square())
        return self

    def correction(self, gram_NN: Tensor | None = None) -> tuple[Tensor, Ridge]:
        """Return d f32 [N, K] with d x close to `missing`, and how it was found; zeros if nothing is gained.

        `gram` is the weight of the rows in the loss, f32 [N, N]; without it every row counts the same. For N = K and a
        weight W [.., K], W d is what to add to W.
        """
        nothing = torch.zeros_like(self.crosses[0]), Ridge(None, 0.0)
        if self.tokens < MIN_TOKENS or min(self.weights) <= 0:
            return nothing
        form_KK = self.form()
        mean = form_KK.diagonal().mean()
        if not (bool(torch.isfinite(mean)) and mean > 0):
            return nothing
        # In columns times `scales_K`, P is the identity.
        scales_K = (0.5 * (form_KK.diagonal() + mean)).rsqrt()
        form_KK.mul_(scales_K).mul_(scales_K[:, None])
        crosses = [self.crosses[half] * scales_K / self.weights[half] for half in (0, 1)]
        forms = [half_KK.mul_(scales_K).mul_(scales_K[:, None]) for half_KK in self.halves()]
        losses = _held_out_losses(form_KK, forms, crosses, gram_NN)
        best = min(range(len(STRENGTHS)), key=losses.__getitem__)
        if not losses[best] < 0:
            return nothing
        inverse_KK = _ridge_inverse(form_KK, STRENGTHS[best])
        held_out = sum(_loss(crosses[a] @ inverse_KK, forms[1 - a], crosses[1 - a]) for a in (0, 1))
        energy = sum(float(self.energies[half].sum()) / self.weights[half] for half in (0, 1))
        gain = min(1.0, max(0.0, -held_out / energy)) if energy > 0 else 0.0
        del forms, crosses, inverse_KK
        cross_NK = (self.crosses[0] + self.crosses[1]).mul_(scales_K / sum(self.weights))
        return (cross_NK @ _ridge_inverse(form_KK, STRENGTHS[best] / 2)).mul_(scales_K), Ridge(STRENGTHS[best], gain)


def _divisor(weight: float) -> float:
    return weight if weight > 0 else 1.0


def _ridge_inverse(form_KK: Tensor, strength: float) -> Tensor:
    """Return (H + strength)^-1."""
    ridged = form_KK.clone()
    ridged.diagonal().add_(strength)
    return torch.cholesky_inverse(_linalg.cholesky(ridged))


def _loss(correction_NK: Tensor, form_KK: Tensor, cross_NK: Tensor) -> float:
    """Return tr(d H d^T) - 2 tr(d D^T)."""
    return _sum_of_products(correction_NK, torch.addmm(cross_NK, correction_NK, form_KK, beta=-2))


def _held_out_losses(
    form_KK: Tensor, forms: list[Tensor], crosses: list[Tensor], gram_NN: Tensor | None
) -> list[float]:
    """Return the loss of each strength. With d = D M, all rows are in D_a^T gram D_b [K, K], so M alone changes."""
    weighted = [cross if gram_NN is None else gram_NN @ cross for cross in crosses]
    squares = [cross.T @ other for cross, other in zip(crosses, weighted, strict=True)]
    product_KK = crosses[0].T @ weighted[1]
    del weighted
    losses: list[float] = []
    for strength in STRENGTHS:
        inverse_KK = _ridge_inverse(form_KK, strength)
        loss = -4 * _sum_of_products(inverse_KK, product_KK)
        for a in (0, 1):
            term_KK = forms[1 - a] @ inverse_KK
            loss += float(term_KK.mul_((squares[a] @ inverse_KK).T).sum(dtype=torch.float64))
        losses.append(loss)
    return losses


def _sum_of_products(first: Tensor, second: Tensor) -> float:
    return float((first * second).sum(dtype=torch.float64))


DAMPING: Final = (0.01, 0.1, 1.0)
"""The share of the mean of the diagonal that is added to it: the first one that gives a positive definite matrix."""

_SMALL: Final = 128
"""Triangles up to this size are inverted at once."""


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
