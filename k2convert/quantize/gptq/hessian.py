"""The damped Hessian of the loss of a row, and its Cholesky factor.

    H_s = (1 - s) H + s diag H + .01 mean diag H        s is the damping; divided by mean diag H, which changes no code

With U^T U = H_s^-1 and U upper triangular, U_jk / U_jj says how the columns k > j best answer an error in column j.

Large matrices are cut into tiles, which threads compute: products, factors and their solutions, in place. The tiles
depend on the matrix's size alone, each is computed by one thread, and sums over tiles are taken in their order. So the
bytes are the same with any number of threads. A CUDA device gets whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from k2convert.choices import BLOCK_SIZE

Result = TypeVar("Result")

TILE: Final = 512
"""Rows and columns of a tile. A core multiplies tiles of this size as fast as larger ones."""
SMALL_TILE: Final = 256
"""The same for a factor of up to SMALL columns, so that it has enough tiles for many cores."""
SMALL: Final = 4096
ROWS: Final = 64
"""Rows of a solution that are computed together."""

_linalg: Any = torch.linalg  # it has no types


CheckStop = Callable[[], None]
"""Is called often, and raises if the work is to stop."""


def never_stop() -> None:
    """Never stop."""


def floats(values: Tensor) -> list[float]:
    """Return the numbers of a tensor [n]."""
    return [float(value) for value in values.cpu().numpy()]


class Team:
    """Threads that compute tiles, each with one thread of torch. One of them needs no thread: the caller computes.

    Before each tile `check_stop` is called.
    """

    def __init__(self, workers: int, check_stop: CheckStop = never_stop) -> None:
        self.workers = workers
        self.check_stop = check_stop
        self._pool = ThreadPoolExecutor(workers, "tiles", torch.set_num_threads, (1,)) if workers > 1 else None

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return what the calls return, in their order. A call must not use the team."""
        if self._pool is None or len(calls) < 2:
            return [self._compute(call) for call in calls]
        return [future.result() for future in [self._pool.submit(self._compute, call) for call in calls]]

    def _compute(self, call: Callable[[], Result]) -> Result:
        self.check_stop()
        with torch.no_grad():  # a setting of each thread
            return call()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


ONE_THREAD: Final = Team(1)
"""The caller's own thread."""


def cut(size: int, step: int, like: Tensor) -> list[slice]:
    """Return the parts of `size` rows, `step` each; one part on a CUDA device."""
    if like.device.type != "cpu":
        return [slice(0, size)]
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def add_product(result: Tensor, left: Tensor, right: Tensor, team: Team, *, lower: bool = False) -> None:
    """Add left [N, T] times right [T, K] to result [N, K]; with `lower`, only to the tiles down to the diagonal."""
    rows = cut(result.shape[0], TILE, result)
    columns = cut(result.shape[1], TILE, result)

    def add(row: slice, column: slice) -> None:
        result[row, column].addmm_(left[row], right[:, column])

    team.run([partial(add, r, c) for r in rows for c in columns if not lower or c.start <= r.start])


def mirror_lower(matrix: Tensor, team: Team) -> None:
    """Copy the tiles below the diagonal of a symmetric matrix to those above it."""
    tiles = cut(matrix.shape[0], TILE, matrix)

    def mirror(row: slice, column: slice) -> None:
        matrix[column, row] = matrix[row, column].T

    team.run([partial(mirror, r, c) for r in tiles for c in tiles if c.start < r.start])


def factor_lower(matrix: Tensor, team: Team) -> Tensor:
    """Replace the lower triangle of a symmetric matrix by L, with L L^T the matrix. Above it the numbers have no sense.

    Returns an integer [] on its device, which is not 0 if the matrix is not positive definite. A device is not waited
    for.
    """
    step = SMALL_TILE if matrix.shape[0] <= SMALL else TILE
    tiles = cut(matrix.shape[0], step, matrix)
    info = torch.zeros((), dtype=torch.int32, device=matrix.device)
    for index, own in enumerate(tiles):
        factor, info = _linalg.cholesky_ex(matrix[own, own])
        if len(tiles) > 1 and int(info):
            return info
        matrix[own, own] = factor
        behind = tiles[index + 1 :]
        team.run([partial(_divide, matrix[row, own], factor) for row in behind])
        lower = combinations_with_replacement(behind, 2)
        team.run([partial(_subtract, matrix, row, column, own) for column, row in lower])
    return info


def _divide(rows: Tensor, factor: Tensor) -> None:
    rows.copy_(_linalg.solve_triangular(factor.mT, rows, upper=True, left=False))


def _subtract(matrix: Tensor, row: slice, column: slice, own: slice) -> None:
    matrix[row, column].addmm_(matrix[row, own], matrix[column, own].T, alpha=-1)


def solve_rows(rows: Tensor, lower: Tensor) -> Tensor:
    """Return rows [n, K] times the inverse of L L^T, for L [K, K]."""
    half = _linalg.solve_triangular(lower.mT, rows, upper=True, left=False)
    return _linalg.solve_triangular(lower, half, upper=False, left=False)


def invert_lower(lower: Tensor, keep: Callable[[slice, Tensor], None], team: Team) -> None:
    """Pass the inverse of L [K, K] to `keep`: some columns, and their rows from the first of them on.

    The others are zero.
    """
    size = lower.shape[0]

    def invert(columns: slice) -> None:
        count = columns.stop - columns.start
        ones = torch.zeros(size - columns.start, count, dtype=lower.dtype, device=lower.device)
        ones[:count].fill_diagonal_(1)
        keep(columns, _linalg.solve_triangular(lower[columns.start :, columns.start :], ones, upper=False))

    team.run([partial(invert, columns) for columns in cut(size, SMALL_TILE, lower)])


DIAGONAL_SHARES: Final = (0.01, 0.1, 1.0)
"""The share of the mean of the diagonal that is added to it: the first one that gives a positive definite matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class DampedHessian:
    """Damped Hessian of the loss in K input channels, contiguous f32 tensors on one device.

    matrix          H_s over the mean of the diagonal of H, [K, K]
    factor          the upper triangular U with U^T U = matrix^-1, [K, K]
    block_factors   the same U for each diagonal block of 16 columns of `matrix`, [K/16, 16, 16]
    block_inverses  the inverses of these blocks, [K/16, 16, 16]
    damping         the s of H_s; None if every column counts the same, alone
    """

    matrix: Tensor
    factor: Tensor
    block_factors: Tensor
    block_inverses: Tensor
    damping: float | None = None

    def to(self, device: str) -> DampedHessian:
        """Return the damped Hessian on a device."""
        tensors = (self.matrix, self.factor, self.block_factors, self.block_inverses)
        return DampedHessian(*(tensor.to(device) for tensor in tensors), damping=self.damping)


def damp_hessian(hessian_KK: Tensor, damping: float, team: Team = ONE_THREAD) -> DampedHessian:
    """Return the damped Hessian of H f32 [K, K], positive semidefinite, with a damping of 0..1 towards its diagonal.

    Computed in FP64. H may be singular. Without anything positive on its diagonal, every column counts the same.
    """
    return replace(_with_blocks(*damped(hessian_KK, damping, team)), damping=damping)


def damped(hessian_KK: Tensor, damping: float, team: Team = ONE_THREAD) -> tuple[Tensor, Tensor]:
    """Return `matrix` and `factor` of such a damped Hessian, which rounding without sweeps needs."""
    mean = float(hessian_KK.diagonal().double().mean())
    if not 0 < mean < float("inf"):
        even = torch.ones(hessian_KK.shape[0], device=hessian_KK.device).diag()
        return even, even
    for share in DIAGONAL_SHARES:
        damped_KK = hessian_KK.double().mul_((1 - damping) / mean)
        damped_KK.diagonal().add_(hessian_KK.diagonal().double(), alpha=damping / mean).add_(share)
        kept_KK = damped_KK.float()
        flipped_KK = damped_KK.flip(0, 1)
        del damped_KK
        factor_KK = _upper_factor(flipped_KK, team)
        del flipped_KK
        if factor_KK is not None:
            return kept_KK, factor_KK
    # Not a sum of squares, by far: the diagonal alone.
    diagonal_K = (hessian_KK.diagonal().double().clamp_min(0) / mean).add_(DIAGONAL_SHARES[0])
    return diagonal_K.diag().float(), diagonal_K.rsqrt().diag().float()


def identity_hessian(columns: int, *, device: str) -> DampedHessian:
    """Return the damped Hessian of the plain squared error."""
    identity_KK = torch.ones(columns, device=device).diag()
    return _with_blocks(identity_KK, identity_KK)


def _with_blocks(hessian_KK: Tensor, factor_KK: Tensor) -> DampedHessian:
    num_blocks = hessian_KK.shape[0] // BLOCK_SIZE
    diagonal = torch.arange(num_blocks, device=hessian_KK.device)
    blocks_BJJ = hessian_KK.view(num_blocks, BLOCK_SIZE, num_blocks, BLOCK_SIZE)[diagonal, :, diagonal].double()
    lower_BJJ: Tensor = _linalg.cholesky(blocks_BJJ.flip(-2, -1))
    identity_JJ = torch.ones(BLOCK_SIZE, dtype=torch.float64, device=hessian_KK.device).diag()
    solved_BJJ: Tensor = _linalg.solve_triangular(lower_BJJ, identity_JJ.expand_as(lower_BJJ), upper=False)
    upper_BJJ = solved_BJJ.flip(-2, -1)
    inverse_BJJ = upper_BJJ.mT @ upper_BJJ
    return DampedHessian(hessian_KK, factor_KK, upper_BJJ.float().contiguous(), inverse_BJJ.float().contiguous())


def _upper_factor(flipped_KK: Tensor, team: Team) -> Tensor | None:
    """Return U f32 of an f64 matrix, given with its columns and rows in reverse order; None if not positive definite.

    The memory of the matrix is used. It is L L^T, and U is L^-1, reversed again: half the work of inverting H.
    """
    if int(factor_lower(flipped_KK, team)):
        return None
    size = flipped_KK.shape[0]
    factor_KK = torch.zeros(size, size, device=flipped_KK.device)

    def keep(columns: slice, values: Tensor) -> None:
        factor_KK[: size - columns.start, size - columns.stop : size - columns.start] = values.flip(0, 1)

    invert_lower(flipped_KK, keep, team)
    if bool(torch.isfinite(factor_KK.diagonal()).all()):
        return factor_KK
    return None
