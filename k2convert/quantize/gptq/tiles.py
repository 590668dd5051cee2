"""Large matrices cut into tiles, which threads compute: products, Cholesky factors and their solutions, in place.

The tiles of a matrix depend on its size alone, each is computed by one thread, and sums over tiles are taken in their
order. So the bytes are the same with any number of threads. A CUDA device gets whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

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


def go_on() -> None:
    """Never stop."""


def floats(values: Tensor) -> list[float]:
    """Return the numbers of a tensor [n]."""
    return [float(value) for value in values.cpu().numpy()]


class Team:
    """Threads that compute tiles, each with one thread of torch. One of them needs no thread: the caller computes.

    Before each tile `check_stop` is called.
    """

    def __init__(self, workers: int, check_stop: CheckStop = go_on) -> None:
        self._check_stop = check_stop
        self._pool = ThreadPoolExecutor(workers, "tiles", torch.set_num_threads, (1,)) if workers > 1 else None

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return what the calls return, in their order. A call must not use the team."""
        if self._pool is None or len(calls) < 2:
            return [self._compute(call) for call in calls]
        return [future.result() for future in [self._pool.submit(self._compute, call) for call in calls]]

    def _compute(self, call: Callable[[], Result]) -> Result:
        self._check_stop()
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


ALONE: Final = Team(1)
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
    for place, own in enumerate(tiles):
        factor, info = _linalg.cholesky_ex(matrix[own, own])
        if len(tiles) > 1 and int(info):
            return info
        matrix[own, own] = factor
        behind = tiles[place + 1 :]
        team.run([partial(_divide, matrix[row, own], factor) for row in behind])
        team.run([partial(_subtract, matrix, row, column, own) for column, row in _lower(behind)])
    return info


def _lower(tiles: list[slice]) -> Iterator[tuple[slice, slice]]:
    for place, column in enumerate(tiles):
        for row in tiles[place:]:
            yield column, row


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
