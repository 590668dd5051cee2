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

def instructions() -> str:
    """The instructions that convert and decode INT4 weights: "avx2" if the CPU has it, else "portable"."""

def use_instructions(name: str) -> None:
    """Choose the instructions, so that tests cover both on one CPU; ValueError if the CPU does not have them."""
