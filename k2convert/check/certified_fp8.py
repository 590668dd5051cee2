"""FP8 weights from the bytes of shards by the format documents alone, and what a conversion demands of them.

Part of the certificate (certificate.py): it imports the standard library and NumPy only.

    FP8     v * s       E4M3 v with a sign; FP32 s for the tensor, for a row, or for a block of 128 x 128
"""

from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from k2convert.check.certified_weights import (
    E4M3,
    F64,
    U8,
    Checkpoint,
    Fault,
    Rows,
    Tensor,
    bf16,
    expect,
    expect_none,
    parts_of,
)

FP8_BLOCK: Final = 128
_MIDDLES: Final = (E4M3[:0x7E] + E4M3[1:0x7F]) / 2
_SIGNED: Final = np.concatenate((E4M3[:128], -E4M3[:128]))


class Scales(NamedTuple):
    """The scales of an FP8 weight: `numbers` float64 [N, 1], or [R, C] of blocks of `rows` rows."""

    numbers: F64
    rows: int

    def parts(self, chosen: Rows, num_rows: int, columns: int) -> list[Rows]:
        """Return the rows with these scales, in parts that are checked at once: of blocks, those of one row of them."""
        if self.rows == 1:
            return parts_of(chosen, columns)
        starts = (number * self.rows for number in chosen.tolist())
        return [np.arange(start, min(start + self.rows, num_rows)) for start in starts]

    def of(self, rows: Rows, columns: int) -> F64:
        """Return the scales of some rows, float64 [M, 1] or [M, columns]."""
        numbers = self.numbers[rows // self.rows]
        return numbers if self.rows == 1 else np.repeat(numbers, FP8_BLOCK, axis=1)[:, :columns]


def read_scales(tensor: Tensor, rows: int, columns: int) -> Scales:
    """Return the scales of a weight [rows, columns] by their shape; Fault for those that are not known here."""
    grid = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    expect(tensor.dtype in ("F32", "BF16"), f"weight_scale is {tensor.dtype}")
    data = tensor.read()
    numbers = bf16(data) if tensor.dtype == "BF16" else data.view("<f4").astype(np.float64)
    if tensor.shape in ((), (1,)):
        return Scales(np.full((rows, 1), numbers[0]), 1)
    if tensor.shape in ((rows, 1), (rows,)):
        return Scales(numbers.reshape(rows, 1), 1)
    expect(tensor.shape in (grid, (grid[0], 1, grid[1], 1)), f"weight_scale is {list(tensor.shape)}")
    return Scales(numbers.reshape(grid), FP8_BLOCK)


def check_decoded(values: F64, codes: U8, scales: F64) -> tuple[float, float]:
    """Check that rows [R, K] of any FP8 weight are numbers; return energy and squared error."""
    expect_none((codes & 0x7F) == 0x7F, "codes are NaN")
    expect_none(~(np.isfinite(scales) & (scales > 0)), "scales are not positive numbers")
    return float((values**2).sum()), float(((values - _SIGNED[codes] * scales) ** 2).sum())


def check_fp8(values: F64, codes: U8, scales: F64, wanted: F64) -> tuple[float, float]:
    """Check rows [R, K] of an FP8 weight of ours, with `scales` that are `wanted`; return energy and squared error."""
    sums = check_decoded(values, codes, scales)
    expect_none(scales != wanted, "scales are not those of the largest weights")
    ratio = values.astype(np.float32) / wanted.astype(np.float32)
    sizes = np.minimum(np.abs(ratio), 448).astype(np.float64)
    nearest = cast("NDArray[np.int64]", np.searchsorted(_MIDDLES, sizes))
    is_tie = sizes == np.append(_MIDDLES, np.inf)[nearest]
    nearest = nearest + ((nearest % 2 == 1) & is_tie)  # to the even code
    expect_none((codes & 0x7F) != nearest, "codes are not the nearest ones")
    expect_none((codes >= 0x80) != np.signbit(values), "signs are not the source's")
    return sums


def row_scales(values: F64) -> F64:
    """Return max |w| / 448 in FP32 of rows [R, K], 1 for zeros: float64 [R, 1]."""
    scales = np.abs(values).max(axis=1, keepdims=True).astype(np.float32) / np.float32(448)
    return np.where(scales == 0, np.float32(1), scales).astype(np.float64)


def largest_of_columns(values: F64) -> F64:
    """Return max |w| of a block of rows [R, K] for each 128 columns, float64 [C]."""
    sizes = np.abs(values).max(axis=0)
    padded = np.append(sizes, np.zeros(-sizes.size % FP8_BLOCK))
    return padded.reshape(-1, FP8_BLOCK).max(axis=1)


def largest_of_all(source: Checkpoint, *modules: str) -> F64:
    """Return max |w| of whole weights together, for each 128 columns: float64 [C]."""
    largest = list[F64]()
    for weight in (source.get(f"{module}.weight") for module in modules):
        parts = parts_of(np.arange(weight.shape[0]), weight.shape[1])
        largest += [largest_of_columns(bf16(weight.rows(part))) for part in parts]
    return np.maximum.reduce(largest)


def is_known(source: Checkpoint, written: Checkpoint, module: str) -> bool:
    """Return whether an FP8 weight of another tool has scales that are known here, and is in the source."""
    weight = written.get(f"{module}.weight")
    scales = written.find(f"{module}.weight_scale")
    if not any(source.find(f"{module}.{name}") for name in ("weight", "weight_packed")):
        return False
    if scales is None or len(weight.shape) != 2:
        return False
    try:
        read_scales(scales, *weight.shape)
    except Fault:
        return False
    return True


def block_scales(largest: F64) -> F64:
    """Return the least powers of two that are the largest weights over 448 or more, 1 for zeros: float64 [C]."""
    exponents = np.arange(-149, 128)
    at_least = np.searchsorted(np.ldexp(448.0, exponents), largest)
    powers = np.ldexp(1.0, np.maximum(exponents[np.minimum(at_least, exponents.size - 1)], -126))
    return np.where(largest > 0, powers, 1.0)


def expect_scales(tensor: Tensor, shape: tuple[int, ...]) -> None:
    is_right = (tensor.dtype, tensor.shape) == ("F32", shape)
    expect(is_right, f"weight_scale is {tensor.dtype} {list(tensor.shape)}, not F32 {list(shape)}")
