"""The compiled kernels (cpp/): flat, contiguous NumPy arrays in, results into the caller's arrays.

They release the interpreter's lock. A group is 16 packed bytes and one scale as BF16 bits; its result is 16 bytes and 2
block scales. ValueError if sizes do not fit, TypeError if a dtype does not.
"""

import numpy as np
from numpy.typing import NDArray

_Counted = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int, int]
"""keys [P], num_blocks [P], magnitude_counts [P, 9], equal blocks, blocks outside the normal range; see PairCounts."""

class SearchTables:
    """The tables of `optimal`, described in cpp/groups.hpp; copies of the arrays."""

    def __init__(
        self,
        windows: NDArray[np.uint8],
        errors: NDArray[np.int16],
        keys: NDArray[np.int32],
        choices: NDArray[np.uint16],
        maps: NDArray[np.uint8],
        full_errors: NDArray[np.float64],
        scale_bytes: NDArray[np.uint8],
    ) -> None: ...

def convert_optimal(
    packed: NDArray[np.uint8],
    scale_bits: NDArray[np.uint16],
    exponent: int,
    tables: SearchTables,
    out: NDArray[np.uint8],
    scale_bytes: NDArray[np.uint8],
) -> _Counted:
    """Convert groups with g = 2**exponent."""

def convert_plain(
    packed: NDArray[np.uint8],
    scale_bits: NDArray[np.uint16],
    global_scale: float,
    out: NDArray[np.uint8],
    scale_bytes: NDArray[np.uint8],
) -> _Counted:
    """Convert groups with an FP32 global scale."""

def convert_columns(
    packed: NDArray[np.uint8],
    scale_bits: NDArray[np.uint16],
    exponents: NDArray[np.int8] | None,
    importance: NDArray[np.uint8] | None,
    is_plain: bool,
    exponent: int,
    global_scale: float,
    tables: SearchTables,
    out: NDArray[np.uint8],
    scale_bytes: NDArray[np.uint8],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int, int, NDArray[np.int64]]:
    """Convert whole rows of columns that differ, with g = 2**exponent, or FP32 under `plain`.

    As the others, and the summed importance by pair and |q|, [P, 9], at the end.
    """

def magnitude_of_columns(
    packed: NDArray[np.uint8], scale_bits: NDArray[np.uint16], exponents: NDArray[np.int8]
) -> tuple[float, float]:
    """Return (largest |s * 2**-a|, largest |bf16(q * s * 2**-a)|) of whole rows with usable scales."""

def measure(packed: NDArray[np.uint8], scale_bits: NDArray[np.uint16]) -> tuple[int, float, bool]:
    """Return (largest scale as BF16 bits, largest |bf16(q * s)|, whether every scale is usable)."""

def sample(
    packed: NDArray[np.uint8],
    scale_bits: NDArray[np.uint16],
    scale_bytes: NDArray[np.uint8],
    first: int,
    stride: int,
    is_plain: bool,
    global_scale: float,
    plain_scale: float,
    assignments: NDArray[np.float64],
) -> tuple[float, float, float]:
    """Return the achieved error, that of plain, and the bound, on every `stride`th block from `first` on."""

def figures_of_pairs(
    keys: NDArray[np.int64], counts: NDArray[np.int64], is_plain: bool, global_scale: float
) -> tuple[float, float, int, int, int, float]:
    """Return the fields of PairFigures for keys [P] and counts [P * 9]."""

def quantize_optimal_bf16(
    source: NDArray[np.uint16], global_scale: float, packed: NDArray[np.uint8], scale_bytes: NDArray[np.uint8]
) -> None:
    """Quantize blocks of 16 BF16 numbers, given as bits, into 8 bytes and a block scale each."""

def quantize_plain_bf16(
    source: NDArray[np.uint16], global_scale: float, packed: NDArray[np.uint8], scale_bytes: NDArray[np.uint8]
) -> None:
    """The same under `plain`; the global scale is FP32."""

def quantize_weighted_bf16(
    source: NDArray[np.uint16],
    global_scale: float,
    factors: NDArray[np.float64],
    packed: NDArray[np.uint8],
    scale_bytes: NDArray[np.uint8],
) -> None:
    """As quantize_optimal_bf16, with a factor for each column of a row."""

def weigh_rows_bf16(
    source: NDArray[np.uint16],
    packed: NDArray[np.uint8],
    scale_bytes: NDArray[np.uint8],
    global_scale: float,
    importance: NDArray[np.uint8],
    energies: NDArray[np.float64],
    errors: NDArray[np.float64],
) -> None:
    """Write the sums of importance * w**2 and importance * (w - w')**2 of each row."""

def measure_rows_bf16(
    source: NDArray[np.uint16],
    packed: NDArray[np.uint8],
    scale_bytes: NDArray[np.uint8],
    global_scale: float,
    energies: NDArray[np.float64],
    errors: NDArray[np.float64],
) -> tuple[int, int, int]:
    """Write sum w**2 and sum (w - w')**2 of each row; return counts of non-zero and unchanged weights and blocks."""

def block_errors_bf16(
    source: NDArray[np.uint16],
    packed: NDArray[np.uint8],
    scale_bytes: NDArray[np.uint8],
    global_scale: float,
    errors: NDArray[np.float64],
) -> None:
    """Write the squared error of each block."""

def block_bounds_bf16(source: NDArray[np.uint16], bounds: NDArray[np.float64]) -> None:
    """Write the bound of each block (see metrics/bf16_error.py)."""

def bounds_of_columns(
    packed: NDArray[np.uint8], scales: NDArray[np.float32], exponents: NDArray[np.int8], bounds: NDArray[np.float64]
) -> None:
    """Write the bound of each INT4 block with exponents, a scale for each block."""

def measure_decoded_int4(
    source: NDArray[np.uint8],
    scales: NDArray[np.float64],
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    block_values: NDArray[np.float64],
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> None:
    """Write energy, error and largest error in steps to sums [N * 3], non-zero and unchanged weights to counts [N * 2].

    `scales` has one number for each group; `block_values` is b * g for each of the 256 bytes of a block scale.
    """

def measure_decoded_bf16(
    source: NDArray[np.uint16],
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    block_values: NDArray[np.float64],
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> None:
    """The same for BF16 bits; the largest error stays zero."""

def measure_columns_int4(
    source: NDArray[np.uint8],
    scales: NDArray[np.float64],
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    block_values: NDArray[np.float64],
    powers: NDArray[np.float64],
    inverses: NDArray[np.float64],
    shares: NDArray[np.float64],
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> None:
    """The same for weights q * s * 2**-a: `powers` 2**-a [K] and `inverses` 2**a [K].

    `sums` [N * 5] get the energy and the error weighted by the `shares` [K] too.
    """

def measure_columns_bf16(
    source: NDArray[np.uint16],
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    block_values: NDArray[np.float64],
    shares: NDArray[np.float64],
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
) -> None:
    """The same for BF16 bits; the largest error stays zero."""

def round_with_feedback(
    target: NDArray[np.float32],
    form: NDArray[np.float32],
    factor: NDArray[np.float32],
    block_factors: NDArray[np.float32],
    sweeps: int,
    threads: int,
    packed: NDArray[np.uint8],
    scale_bytes: NDArray[np.uint8],
) -> None:
    """Round rows [N * K] in units of the global scale: H and U [K * K], U of the diagonal blocks [K/16 * 16 * 16]."""

def measure_codes(
    source: NDArray[np.uint8],
    scales: NDArray[np.float64],
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    block_values: NDArray[np.float64],
    powers: NDArray[np.float64] | None,
    inverses: NDArray[np.float64] | None,
    importance: NDArray[np.float64] | None,
    sums: NDArray[np.float64],
) -> tuple[int, int, int, int, int, int, float, float]:
    """Write energy, error, and both times the importance to sums [N * 4]; return the other figures of the codes.

    Columns as in measure_columns_int4; `scales` has one number for each group or for each block. Returned are the
    counts of non-zero weights, unchanged ones and unchanged blocks, recoverable codes, those with |q| of 5 or 7, those
    of -8, the largest error in steps and the least scale of a weight that is not zero (infinite without one).
    """

def instructions() -> str:
    """The instructions that convert and decode INT4 weights: "avx2" if the CPU has it, else "portable"."""

def use_instructions(name: str) -> None:
    """Choose the instructions, so that tests cover both on one CPU; ValueError if the CPU does not have them."""
