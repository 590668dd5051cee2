"""The constant tables of the mse search: one for every checkpoint, because everything in it is an integer.

Write a source scale as s = ms * 2**es with ms in 128..255, a block scale as b = mb * 2**eb with mb in 8..15, and
g = 2**kg. The FP4 step measured in INT4 steps is then

    t = b * g / s = mb * 2**j / ms        j = eb + (kg - es)

and the error of |q| = k, in units of (s / 2ms)**2, is an integer: the least (2k * ms - 2v * mb * 2**j)**2 over v.

Ten shifts j = 0..9 are enough, for any g and s:

  * j >= 10: t >= 8 * 1024 / 255 > 32, so even k = 8 is below t/4 and every code is zero. All such scales have the
    same error, and any scale with a non-zero code has strictly less. They are one candidate, first in rank.
  * j < 0: t <= 15/2 / 128 < 1/12, so every k >= 1 saturates at 6t <= 1/2 and the error falls as t grows: any larger
    scale with t <= 1/6 is strictly better. If even the largest scale, 448, has j < 0, it is therefore the best, with
    every non-zero code saturated. That is one candidate, last in rank.

Candidates are ranked from the larger scale to the smaller, because ties go to the larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.quantize.formats.e2m1 import DOUBLED_VALUES, QUADRUPLED_MIDPOINTS, SIGN_BIT
from k2convert.quantize.formats.e4m3 import MAX_BYTE, MAX_EXPONENT, MIN_EXPONENT
from k2convert.quantize.formats.int4 import MAX_MAGNITUDE, NUM_MAGNITUDES

MIN_MANTISSA: Final = 128
NUM_MANTISSAS: Final = 128
NUM_SHIFTS: Final = 10
NUM_SCALE_MANTISSAS: Final = 8

ZERO_CANDIDATE: Final = 0
"""A scale so large that every code is zero (j >= 10); the largest of them is 448."""
FIRST_CANDIDATE: Final = 1
NUM_GRID_CANDIDATES: Final = NUM_SHIFTS * NUM_SCALE_MANTISSAS
SATURATED_CANDIDATE: Final = FIRST_CANDIDATE + NUM_GRID_CANDIDATES
"""448, if even that is far too small (j < 0): every non-zero code saturates."""
NUM_CANDIDATES: Final = SATURATED_CANDIDATE + 1

LOWEST_OFFSET: Final = -6
HIGHEST_OFFSET: Final = NUM_SHIFTS - 1 - MIN_EXPONENT + 1
"""kg - es is clamped to this range. Outside it only one candidate exists, the saturated or the zero one."""


@dataclass(frozen=True, slots=True, eq=False)
class CandidateTables:
    """The tables; C = 82 candidates by rank, O = 26 offsets kg - es, S = 128 source mantissas.

    errors       float64 [S, 9, C]  error of |q| = k in units of (s / 2ms)**2, an integer below 2**25
    codes        uint8 [S, C, 9]    E2M1 code of |q| = k
    nibble_maps  int64 [S, C]       bits 4u..4u+3 are the output nibble of source nibble u = q + 8
    scale_bytes  uint8 [O, C]       E4M3 byte, 0 if the candidate does not exist at this offset
    """

    errors: NDArray[np.float64]
    codes: NDArray[np.uint8]
    nibble_maps: NDArray[np.int64]
    scale_bytes: NDArray[np.uint8]


@lru_cache(maxsize=1)
def candidate_tables() -> CandidateTables:
    """Build the tables, exactly."""
    mantissas_S = np.arange(MIN_MANTISSA, MIN_MANTISSA + NUM_MANTISSAS)
    codes_SCk = _candidate_codes(mantissas_S)
    doubled_SkC = 2 * np.arange(NUM_MAGNITUDES)[:, None] * mantissas_S[:, None, None]
    doubled_values_SCk = np.array(DOUBLED_VALUES)[codes_SCk]
    reached_SkC = doubled_values_SCk.transpose(0, 2, 1) * _grid_steps()
    return CandidateTables(
        errors=np.ascontiguousarray((doubled_SkC - reached_SkC) ** 2, dtype=np.float64),
        codes=codes_SCk,
        nibble_maps=_nibble_maps(codes_SCk),
        scale_bytes=_candidate_bytes(),
    )


def _grid_steps() -> NDArray[np.int64]:
    """Return int64 [82]: mb * 2**j of every candidate, 0 for the two that are not on the grid."""
    steps = [mantissa << shift for shift in reversed(range(NUM_SHIFTS)) for mantissa in reversed(range(8, 16))]
    return np.array([0, *steps, 0])


def _candidate_codes(mantissas_S: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return uint8 [S, C, 9]: the codes nearest to k * ms / step, as `e2m1.nearest_code` rounds."""
    quadrupled_SCk = 4 * (mantissas_S[:, None] * np.arange(NUM_MAGNITUDES))[:, None, :]
    steps_C1 = _grid_steps().clip(min=1)[:, None]
    codes_SCk = np.zeros((NUM_MANTISSAS, NUM_CANDIDATES, NUM_MAGNITUDES), dtype=np.uint8)
    for index, midpoint in enumerate(QUADRUPLED_MIDPOINTS):
        reaches = np.greater_equal if index % 2 else np.greater
        codes_SCk += reaches(quadrupled_SCk, midpoint * steps_C1)
    codes_SCk[:, ZERO_CANDIDATE] = 0
    codes_SCk[:, SATURATED_CANDIDATE, 1:] = 7
    return codes_SCk


def _nibble_maps(codes_SCk: NDArray[np.uint8]) -> NDArray[np.int64]:
    maps = np.zeros(codes_SCk.shape[:2], dtype=np.int64)
    for nibble in range(16):
        code = codes_SCk[..., abs(nibble - MAX_MAGNITUDE)].astype(np.int64)
        if nibble < MAX_MAGNITUDE:
            code = np.where(code > 0, code | SIGN_BIT, code)
        maps |= code << (4 * nibble)
    return maps


def _candidate_bytes() -> NDArray[np.uint8]:
    rows: list[list[int]] = []
    for offset in range(LOWEST_OFFSET, HIGHEST_OFFSET + 1):
        row = [MAX_BYTE if offset + MAX_EXPONENT >= NUM_SHIFTS else 0]
        for shift in reversed(range(NUM_SHIFTS)):
            for mantissa in reversed(range(8, 16)):
                exponent = shift - offset
                byte = (exponent + 10) << 3 | (mantissa - 8)
                row.append(byte if exponent >= MIN_EXPONENT and byte <= MAX_BYTE else 0)
        row.append(MAX_BYTE if offset + MAX_EXPONENT < 0 else 0)
        rows.append(row)
    return np.array(rows, dtype=np.uint8)
