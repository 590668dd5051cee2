"""Second moments of one input over tokens, by halves, and the correction of a weight by the residual of its output.

x is the input that the converted model has, r the residual: what should be added to the output. There is a matrix d
with d x close to r. Half a of the tokens fits it, half b says whether it helps:

    d_a = D_a (H + lambda P)^-1      D = E[w r x^T], H = E[w x x^T], P = (diag H + mean diag H) / 2
    loss = sum over both orders of tr(R d_a H_b d_a^T R^T) - 2 tr(R d_a D_b^T R^T)

R is the identity, or for many outputs some sums of them.
The strength lambda with the least loss wins if that is below zero; all tokens then fit d with lambda / 2, because they
are twice as many. A fixed small lambda is worse than no correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Final

import numpy as np
import torch
from torch import Tensor

from k2convert.quantize.gptq.hessian import (
    ONE_THREAD,
    ROWS,
    Team,
    add_product,
    cut,
    factor_lower,
    floats,
    mirror_lower,
    solve_rows,
)

MIN_TOKENS: Final = 512
"""With fewer tokens there is no correction."""

STRENGTHS: Final = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

SKETCHED_ROWS: Final = 512
"""The loss of more than twice as many rows is that of so many sums of them, with random signs: its mean is the same.

The strengths are compared on the same sums. Without this, choosing one for 7168 outputs takes five times as long."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightedTokens:
    """Tokens of one half: their indices int64 [t], and the roots f32 [t, 1] of their weights, whose sum is `total`."""

    indices: Tensor
    roots: Tensor
    total: float

    @staticmethod
    def by_halves(weights_t: Tensor, halves_t: Tensor) -> tuple[WeightedTokens, WeightedTokens]:
        """Deal tokens out: weights [t] of at least 0, halves 0 or 1 [t]."""
        first, second = (_of_half(weights_t, halves_t == half) for half in (0, 1))
        return first, second


def _of_half(weights_t: Tensor, chosen_t: Tensor) -> WeightedTokens:
    weights = weights_t[chosen_t]
    indices = torch.where(chosen_t)[0]
    return WeightedTokens(indices, weights.sqrt().float()[:, None], float(weights.double().sum()))


@dataclass(slots=True, eq=False)
class Moments:
    """Second moments of one input over tokens, by halves.

    sums     sum of w x x^T, f32 [2, K, K] on one device: tiles on and below the diagonal, until `complete`
    weights  sum of w of each half
    tokens   how many tokens were added
    """

    sums: Tensor
    weights: tuple[float, float] = (0.0, 0.0)
    tokens: int = 0

    @classmethod
    def start(cls, columns: int, *, device: str) -> Moments:
        """Return sums of nothing for inputs [t, columns]."""
        return cls(torch.zeros(2, columns, columns, device=device))

    def add(self, inputs_tK: Tensor, halves: tuple[WeightedTokens, WeightedTokens], team: Team = ONE_THREAD) -> None:
        """Add tokens: f32 inputs [t, K]."""
        for matrix, half in zip(self.sums, halves, strict=True):
            inputs = inputs_tK[half.indices] * half.roots
            add_product(matrix, inputs.T, inputs, team, lower=True)
        self.tokens += inputs_tK.shape[0]
        self.weights = self.weights[0] + halves[0].total, self.weights[1] + halves[1].total

    def complete(self, team: Team = ONE_THREAD) -> Moments:
        """Fill in what is above the diagonal. No tokens can be added any more."""
        for matrix in self.sums:
            mirror_lower(matrix, team)
        return self

    def hessian(self) -> Tensor:
        """Return H = E[w x x^T] f32 [K, K] over all tokens: the sum over the sum of w; zeros without tokens."""
        return (self.sums[0] + self.sums[1]).div_(_divisor(sum(self.weights)))

    def half(self, half: int) -> Tensor:
        """Return H of one half, over its own sum of w."""
        return self.sums[half] / _divisor(self.weights[half])

    def scale(self, exponents_K: Tensor) -> None:
        """Multiply the inputs by 2**a, exactly; a is an integer [K]."""
        factors_K = torch.exp2(exponents_K.to(self.sums))
        self.sums.mul_(factors_K).mul_(factors_K[:, None])

    @property
    def can_correct(self) -> bool:
        """Return whether there are tokens enough, of both halves, for a correction."""
        return self.tokens >= MIN_TOKENS and min(self.weights) > 0


@dataclass(slots=True, eq=False)
class CrossMoments:
    """Moments of residuals and inputs over the same tokens, by halves.

    crosses   sum of w r x^T, f32 [2, N, K] on one device
    """

    crosses: Tensor

    @classmethod
    def start(cls, columns: int, rows: int, *, device: str) -> CrossMoments:
        """Return sums of nothing for inputs [t, columns] and residuals [t, rows]."""
        return cls(torch.zeros(2, rows, columns, device=device))

    def add(
        self,
        inputs_tK: Tensor,
        residual_tN: Tensor,
        halves: tuple[WeightedTokens, WeightedTokens],
        team: Team = ONE_THREAD,
    ) -> None:
        """Add tokens: f32 inputs [t, K] and residuals [t, N]."""
        for cross, half in zip(self.crosses, halves, strict=True):
            inputs = inputs_tK[half.indices] * half.roots
            residual = residual_tN[half.indices] * half.roots
            add_product(cross, residual.T, inputs, team)


def correct(moments: Moments, residual: CrossMoments, team: Team = ONE_THREAD) -> tuple[Tensor | None, float | None]:
    """Return d f32 [N, K] with d x close to the residual, and its strength; neither if nothing is gained.

    A weight W [N, K] becomes W + d. The moments must be complete.
    """
    if not moments.can_correct:
        return None, None
    hessian_KK = moments.hessian()
    mean = hessian_KK.diagonal().mean()
    if not (bool(torch.isfinite(mean)) and mean > 0):
        return None, None
    # In columns times `scales_K`, P is the identity.
    scales_K = (0.5 * (hessian_KK.diagonal() + mean)).rsqrt()
    hessian_KK.mul_(scales_K).mul_(scales_K[:, None])
    crosses = residual.crosses
    sums_nN = _sketch(crosses.shape[1]).to(hessian_KK.device)
    sketches = torch.zeros(2, sums_nN.shape[0], crosses.shape[2], device=crosses.device)
    for half in (0, 1):
        add_product(sketches[half], sums_nN, crosses[half], team)
        sketches[half].mul_(scales_K / moments.weights[half])
    lower_KK = torch.empty_like(hessian_KK)
    device_losses: list[Tensor] = []
    for strength in STRENGTHS:
        _factor(lower_KK, hessian_KK, strength, team)
        device_losses.append(_loss(moments, sketches, scales_K, lower_KK, team))
    losses = floats(torch.stack(device_losses))  # a device is waited for once
    best = min(range(len(STRENGTHS)), key=losses.__getitem__)
    if not losses[best] < 0:
        return None, None
    if int(_factor(lower_KK, hessian_KK, STRENGTHS[best] / 2, team)):
        raise AssertionError("a sum of squares and a ridge is positive definite")
    del hessian_KK, sums_nN
    return _solution(moments, residual, scales_K, lower_KK, team), STRENGTHS[best]


def _loss(moments: Moments, sketches: Tensor, scales_K: Tensor, lower_KK: Tensor, team: Team) -> Tensor:
    """Return the sum over both orders of tr(d_a H_b d_a^T) - 2 tr(d_a D_b^T), f64, for factors L of H + lambda.

    `sketches` are sums of rows of the crosses, f32 [2, n, K], each over its sum of w, in columns times `scales_K`.
    """

    def of_tile(a: int, rows: slice) -> Tensor:
        fitted = solve_rows(sketches[a, rows], lower_KK)
        gradient = (fitted * scales_K) @ moments.sums[1 - a]
        gradient.mul_(scales_K / moments.weights[1 - a]).sub_(sketches[1 - a, rows], alpha=2)
        return fitted.mul_(gradient).sum(dtype=torch.float64)

    tiles = [partial(of_tile, a, rows) for a in (0, 1) for rows in cut(sketches.shape[1], ROWS, sketches)]
    return reduce(torch.add, team.run(tiles))


def _solution(moments: Moments, residual: CrossMoments, scales_K: Tensor, lower_KK: Tensor, team: Team) -> Tensor:
    """Return d f32 [N, K], fitted to both halves."""
    first, second = residual.crosses
    solution = torch.empty_like(first)
    factors_K = scales_K / sum(moments.weights)

    def solve(rows: slice) -> None:
        cross = (first[rows] + second[rows]).mul_(factors_K)
        solution[rows] = solve_rows(cross, lower_KK).mul_(scales_K)

    team.run([partial(solve, rows) for rows in cut(solution.shape[0], ROWS, solution)])
    return solution


def _sketch(rows: int) -> Tensor:
    """Return sums of rows with random signs, f32 [SKETCHED_ROWS, rows], or the identity for few rows."""
    if rows <= 2 * SKETCHED_ROWS:
        return torch.eye(rows)
    signs = np.random.RandomState(0).randint(0, 2, size=(SKETCHED_ROWS, rows)).astype(np.float32)
    return torch.as_tensor((2 * signs - 1) * np.float32(SKETCHED_ROWS**-0.5))


def _factor(lower_KK: Tensor, hessian_KK: Tensor, strength: float, team: Team) -> Tensor:
    """Set the lower triangle of a matrix to the factor L of H + strength; returns what `factor_lower` does.

    What is positive definite with the half of the best strength, which is factored last, is so with that strength too.
    """
    lower_KK.copy_(hessian_KK)
    lower_KK.diagonal().add_(strength)
    return factor_lower(lower_KK, team)


def _divisor(weight: float) -> float:
    return weight if weight > 0 else 1.0
