"""Weights from the bytes of shards by the format documents alone, and what each rule demands of them.

Part of the certificate (certificate.py): it imports the standard library and NumPy only.

    INT4    q * s       q + 8 in 4 bits, the even column in the low nibble; BF16 s for 32 columns of a row
    MXFP4   v * 2**e    E2M1 v, the even column in the low nibble; e = byte - 127 for 32 columns of a row
    NVFP4   v * b * g   E2M1 v, the even column in the low nibble; E4M3 b for 16 columns; FP32 g, or 1/g in the layout
                        compressed-tensors
"""

import json
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
Rows = NDArray[np.int64]
Exponents = NDArray[np.int8]
Locate = Callable[[str], Path | None]

GROUP: Final = 32
BLOCK: Final = 16
E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3: Final = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127] + [math.nan] * 129
)
_INT4: Final = np.arange(-8.0, 8.0)
_MIDDLES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between E2M1 numbers
_CHUNK: Final = 1 << 18  # weights checked at once
_STEPS: Final = 88
MOST_ROW_ERROR: Final = 16.0
MOST_BLOCK_ERROR: Final = 32.0
"""Times the error of rounding to nearest. Right results of rule gptq have up to 6 in a row and 13 in a block."""
ONE_SIDED: Final = ((None, 0.02, "tensors"), (0, 0.05, "columns"), (1, 0.1, "numbers"))
"""The shares of w**2 by which errors may go to one side. Right results of rule gptq need nothing of them."""


class Fault(Exception):  # noqa: N818
    """A fault of one tensor or module, in words."""


class Tensor(NamedTuple):
    """A tensor of a file, by its header: `size` bytes from byte `begin` of the file on."""

    file: "ShardFile"
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int

    def read(self, begin: int = 0, end: int | None = None) -> U8:
        """Return bytes [begin, end) of the tensor."""
        return self.file.read(self.begin + begin, self.begin + (self.size if end is None else end))

    def rows(self, rows: Rows) -> U8:
        """Return the bytes of some ascending rows, [R, bytes of a row]."""
        width = self.size // self.shape[0]
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == rows.size:
            return self.read(first * width, (last + 1) * width).reshape(-1, width)
        return np.stack([self.read(row * width, (row + 1) * width) for row in rows.tolist()])


class ShardFile:
    """An open safetensors file: 8 bytes with the length of the header, the header, the tensors."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        (length,) = struct.unpack("<Q", self.read(0, 8).tobytes())
        self._data_begin = 8 + length
        self.header: dict[str, dict[str, Any]] = json.loads(self.read(8, 8 + length).tobytes())
        self.header.pop("__metadata__", None)

    def tensor(self, name: str) -> Tensor | None:
        """Return a tensor by its name; None if there is none."""
        if (entry := self.header.get(name)) is None:
            return None
        begin, end = entry["data_offsets"]
        return Tensor(self, entry["dtype"], tuple(entry["shape"]), self._data_begin + begin, end - begin)

    def read(self, begin: int, end: int) -> U8:
        """Return bytes [begin, end); Fault if the file ends before."""
        data = os.pread(self.descriptor, end - begin, begin)
        while data and len(data) < end - begin:
            part = os.pread(self.descriptor, end - begin - len(data), begin + len(data))
            data = data + part if part else b""
        expect(len(data) == end - begin, f"the file ends before byte {end:,}")
        return np.frombuffer(data, dtype=np.uint8)


class Checkpoint:
    """The tensors of a checkpoint by name: of the "source" or the "result". `locate` names a tensor's file, or None."""

    def __init__(self, locate: Locate, side: str) -> None:
        self._locate = locate
        self._side = side
        self._files: dict[Path, ShardFile] = {}
        self._lock = Lock()

    def release(self) -> None:
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def file(self, path: Path) -> ShardFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = ShardFile(path)
            return self._files[path]

    def find(self, name: str) -> Tensor | None:
        """Return a tensor by its name; None if there is none."""
        path = self._locate(name)
        return None if path is None else self.file(path).tensor(name)

    def get(self, name: str) -> Tensor:
        if (tensor := self.find(name)) is None:
            raise Fault(f"the {self._side} has no {name}")
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class SourceWeight:
    """A weight [N, K] of the source, INT4, MXFP4 or BF16, column j over 2**a_j where there are exponents."""

    kind: str
    codes: Tensor
    scales: Tensor | None
    shape: tuple[int, int]
    exponents: Exponents | None

    def values(self, rows: Rows) -> F64:
        """Return the exact weights of some rows, float64 [R, K]."""
        values = self._numbers(self.codes.rows(rows))
        if self.scales is not None:
            units = self.units(self.scales.rows(rows)).reshape(-1, 1)
            values = (values.reshape(-1, GROUP) * units).reshape(values.shape)
        return values if self.exponents is None else np.ldexp(values, -self.exponents.astype(np.int32))

    def _numbers(self, data: U8) -> F64:
        if self.kind == "BF16":
            return bf16(data)
        return (_INT4 if self.kind == "INT4" else E2M1)[nibbles_of(data)]

    def units(self, scales: U8) -> F64:
        """Return the numbers of bytes of scales."""
        return bf16(scales) if self.kind == "INT4" else np.ldexp(1.0, scales.astype(np.int32) - 127)

    def scale_max(self) -> Fraction:
        """Return the largest scale, over the powers of two of its columns; of a BF16 weight the largest |w| / 7."""
        if self.scales is None:
            return Fraction(self.amax()) / 7
        keys, units = self._sizes()
        if self.exponents is None:
            return Fraction(float(units[keys.max(initial=0)]))
        powers = self.exponents.reshape(-1, GROUP).min(axis=1).astype(np.int32)
        return Fraction(float(np.ldexp(units[keys].reshape(-1, powers.size), -powers).max(initial=0.0)))

    @np.errstate(invalid="ignore")
    def _sizes(self) -> tuple[NDArray[np.integer[Any]], F64]:
        """Return the bytes of all scales without their signs, as ascending numbers, and the scales that these are."""
        assert self.scales is not None
        if self.kind == "MXFP4":
            return self.scales.read().reshape(-1), self.units(np.arange(256, dtype=np.uint8))
        every = np.arange(1 << 15, dtype="<u2")
        return self.scales.read().view("<u2") & every[-1], self.units(every.view(np.uint8))

    def amax(self) -> float:
        """Return the largest |w| after rounding to BF16."""
        if self.scales is None or self.exponents is not None:
            parts = parts_of(np.arange(self.shape[0]), self.shape[1])
            return max((float(np.abs(to_bf16(self.values(part))).max(initial=0.0)) for part in parts), default=0.0)
        keys, units = self._sizes()
        largest = 0.0
        candidates = np.flatnonzero(keys == keys.max(initial=0))[:GROUP]  # most weights are answered by these
        for _ in range(2):
            sizes = np.abs(self._group_numbers(candidates)).max(axis=1, initial=0.0)
            largest = max(largest, float(to_bf16(sizes * units[keys[candidates]]).max(initial=0.0)))
            least = np.searchsorted(units * (8 if self.kind == "INT4" else 6), largest, side="right")
            candidates = np.flatnonzero(keys >= least)
        return largest

    def largest_exponent(self) -> int | None:
        """Return the largest exponent of an MXFP4 group that has anything but zeros; None if there is none."""
        assert self.scales is not None
        scales = self.scales.read().reshape(-1)
        for byte in np.flatnonzero(np.bincount(scales, minlength=256))[::-1].tolist():
            groups = np.flatnonzero(scales == byte)
            for start in range(0, groups.size, GROUP):
                if self._group_numbers(groups[start : start + GROUP]).any():
                    return byte - 127
        return None

    def _group_numbers(self, groups: Rows) -> F64:
        """Return q or v of some groups, float64 [M, 32]."""
        width = GROUP // 2
        if 16 * groups.size > self.shape[0] * self.shape[1] // GROUP:
            data = self.codes.read().reshape(-1, width)[groups]
        else:
            parts = [self.codes.read(group * width, (group + 1) * width) for group in groups.tolist()]
            data = np.stack(parts) if parts else np.empty((0, width), dtype=np.uint8)
        return self._numbers(data)


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Rows of a result: nibbles [R, K], block scales [R, K/16] and g."""

    nibbles: U8
    scales: U8
    g: float

    def steps(self, offset: int = 0) -> F64:
        """Return b * g for the scale so many steps away, float64 [M, 1] for all blocks."""
        return E4M3[(self.scales.reshape(-1, 1) + np.int64(offset)).clip(0, 0x7E)] * self.g

    def values(self) -> F64:
        """Return v * b * g, float64 [R, K]."""
        return (E2M1[blocks_of(self.nibbles)] * self.steps()).reshape(self.nibbles.shape)


def expect(holds: bool, problem: str) -> None:
    if not holds:
        raise Fault(problem)


def expect_none(wrong: NDArray[np.bool_], problem: str) -> None:
    if wrong.any():
        raise Fault(f"{np.count_nonzero(wrong):,} of {wrong.size:,} {problem}")


def parts_of(rows: Rows, columns: int) -> list[Rows]:
    """Return rows in parts that are checked at once."""
    step = max(1, _CHUNK // columns)
    return [rows[start : start + step] for start in range(0, rows.size, step)]


def nibbles_of(data: U8) -> U8:
    """Return two nibbles for each byte, the low one first."""
    return np.stack((data & np.uint8(15), data >> np.uint8(4)), axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])


def blocks_of(rows: NDArray[Any]) -> NDArray[Any]:
    return rows.reshape(-1, BLOCK)


def bf16(data: U8) -> F64:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(values: F64) -> F64:
    """Round numbers of at most 24 bits to BF16, ties to even."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def nearest_codes(sizes: NDArray[Any], steps: NDArray[Any] | float) -> U8:
    """Return the code of the E2M1 number next to sizes / steps, both >= 0; ties to the even code."""
    codes = np.zeros(np.broadcast(sizes, steps).shape, dtype=np.uint8)
    for code, middle in enumerate(_MIDDLES):
        codes += sizes > middle * steps if code % 2 == 0 else sizes >= middle * steps
    return codes


def _check_codes(written: Written, codes: U8, is_negative: NDArray[np.bool_]) -> None:
    """Check all codes, [M, 16]: those without signs, and which of them are negative."""
    nibbles = blocks_of(written.nibbles)
    expect_none(nibbles & 7 != codes, "codes are not the nearest ones")
    expect_none((nibbles >= 8) != is_negative, "signs are not the source's")


@lru_cache(maxsize=1)
def _int4_tables() -> tuple[U8, F64]:
    """Return code and squared error of each |q|, [128, _STEPS, 9], for s = 1 .. 255/128 and steps from 1/16 on."""
    steps = (8 + np.arange(_STEPS) % 8) * 2.0 ** (np.arange(_STEPS) // 8 - 7)
    sizes = np.arange(9) * (np.arange(128, 256) / 128)[:, None, None]
    codes = nearest_codes(sizes, steps[:, None])
    return codes, (sizes - E2M1[codes] * steps[:, None]) ** 2


def check_int4(nibbles: U8, units: F64, written: Written) -> tuple[float, float]:
    """Check INT4 weights q * s: codes and errors follow from |q| and from the ratio of b * g and s."""
    fractions, powers = (x.repeat(2) for x in np.frexp(units))  # two blocks of a group
    scales = written.scales.reshape(-1).astype(np.int64)
    index = (scales + 8 * (round(math.log2(written.g)) - powers - 2)).clip(3, _STEPS - 4)
    index = ((np.abs(fractions) * 256).astype(np.int64) - 128).clip(0, 127) * _STEPS + index
    numbers = blocks_of(nibbles).astype(np.int64) - 8
    sizes = np.abs(numbers)
    codes, table = _int4_tables()
    wanted = codes.reshape(-1)[9 * index[:, None] + sizes]
    wanted[fractions == 0] = 0
    _check_codes(written, wanted, ((numbers < 0) ^ (fractions < 0)[:, None]) & (wanted > 0))
    counts = np.bincount((9 * np.arange(len(sizes))[:, None] + sizes).reshape(-1), minlength=9 * len(sizes))
    counts = counts.reshape(-1, 9).astype(np.float64)
    near = np.lib.stride_tricks.sliding_window_view(table.reshape(-1), 63)[9 * (index - 3)].reshape(-1, 7, 9)
    errors = np.einsum("mnl,ml->nm", near, counts)
    energy = (counts @ np.arange(9.0) ** 2) * units.reshape(-1).repeat(2) ** 2
    _check_neighbors(written, energy > 0, errors)
    return float(energy.sum()), float(np.ldexp(errors[3] * (fractions != 0), 2 * powers - 2).sum())


def check_scales(written: Written, has_numbers: NDArray[np.bool_]) -> None:
    scales = written.scales.reshape(-1)
    expect_none((scales != 0x38) & ~has_numbers, "blocks of zeros have another scale than 1")
    expect_none((scales < 8) & has_numbers, "block scales are below 2**-6")


def _check_neighbors(written: Written, has_numbers: NDArray[np.bool_], errors: F64) -> None:
    """Check that no scale up to three steps away has less error: errors [7, M], from three steps down to three up."""
    check_scales(written, has_numbers)
    scales = written.scales.reshape(-1).astype(np.int64)
    for offset in (-3, -2, -1, 1, 2, 3):
        exists = (scales + offset >= 8) & (scales + offset <= 0x7E) & has_numbers
        is_better = errors[3 + offset] <= errors[3] if offset > 0 else errors[3 + offset] < errors[3]
        expect_none(exists & is_better, "block scales are not the best ones, the larger one of equals")


def check_best(values: F64, written: Written) -> None:
    sizes = np.abs(blocks_of(values))
    codes = nearest_codes(sizes, written.steps())
    _check_codes(written, codes, blocks_of(values < 0) & (codes > 0))
    errors = np.zeros((7, len(sizes)))
    for offset, error in enumerate(errors):
        steps = written.steps(offset - 3)
        for terms in ((sizes - E2M1[nearest_codes(sizes, steps)] * steps) ** 2).T:  # added in their order
            error += terms
    _check_neighbors(written, sizes.max(axis=1) > 0, errors)


def check_max(values: F64, written: Written) -> None:
    weights = blocks_of(to_bf16(values)).astype(np.float32)
    g = np.float32(written.g)
    scales = E4M3[written.scales.reshape(-1)]
    with np.errstate(all="ignore"):
        wanted = np.abs(weights).max(axis=1) / (np.float32(6) * g)
        wanted = np.where(wanted == 0, np.float32(1), wanted).clip(2**-9, 448).astype(np.float64)
        ratio = weights / (scales.astype(np.float32) * g)[:, None]
    unit = np.ldexp(1.0, np.maximum(np.frexp(wanted)[1] - 4, -9))  # of E4M3 numbers there
    expect_none(scales != np.rint(wanted / unit) * unit, "block scales are not the formula's")
    _check_codes(written, nearest_codes(np.abs(ratio), 1.0), ratio < 0)


def check_cast(nibbles: U8, scales: U8, written: Written) -> None:
    """MXFP4: each group keeps its codes and its power of two, as far as E4M3 has it."""
    groups = nibbles.reshape(-1, GROUP)
    after = written.nibbles.reshape(-1, GROUP)
    steps = scales.reshape(-1).astype(np.int64) - 127 - round(math.log2(written.g))
    is_empty = ~(groups & 7).any(axis=1)
    is_below = (steps < -9) & ~is_empty
    powers = np.where(is_empty & ((steps < -9) | (steps > 8)), 0, np.maximum(steps, -9))
    wrong = E4M3[written.scales.reshape(-1, 2)] != np.ldexp(1.0, powers.astype(np.int32))[:, None]
    expect_none(wrong, "block scales are not the source's powers of two")
    expect_none((groups != after)[~is_below], "codes are not the source's")
    shifted = np.ldexp(E2M1[groups[is_below] & 7], (steps[is_below] + 9).astype(np.int32)[:, None])
    expect_none(after[is_below] & 7 != nearest_codes(shifted, 1.0), "codes below the window are not the nearest ones")
    expect_none((after ^ groups)[is_below] > 7, "signs are not the source's")


@np.errstate(over="ignore", invalid="ignore")
def check_errors(values: F64, written: Written) -> None:
    """Check codes that no formula gives, by the size and the direction of their errors.

    Rule gptq moves weights w to make up for the errors of others, so the limits of a row and a block are wide. But it
    moves them up as often as down: the sum of (v * b * g - w) * w is near zero over all weights, over a column, and
    over those that round to one E2M1 number. It may be a share of the sum of w**2, beside what rounding to nearest
    under the same scales gives and six standard deviations.
    """
    weights = blocks_of(values / written.g).astype(np.float32)
    sizes = np.abs(weights)
    own = E4M3[written.scales.reshape(-1, 1)].astype(np.float32)
    errors = E2M1[blocks_of(written.nibbles)].astype(np.float32) * own - weights
    largest = sizes.max(axis=1, keepdims=True)
    scales = np.where(largest > 0, (largest / 6).clip(2**-6, 448), np.float32(1))
    usual = ((sizes - E2M1[nearest_codes(sizes, scales)].astype(np.float32) * scales) ** 2).sum(axis=1)
    usual = usual.reshape(len(values), -1)
    error = np.einsum("mj,mj->m", errors, errors).reshape(usual.shape)
    wrong = ~(error.sum(axis=1) <= MOST_ROW_ERROR * usual.sum(axis=1))
    expect_none(wrong, "rows have far more error than rounding to nearest")
    wrong = ~(error <= MOST_BLOCK_ERROR * (usual + usual.mean(axis=1, keepdims=True)))
    expect_none(wrong, "blocks have far more error than rounding to nearest")
    codes = nearest_codes(sizes, own)
    columns = values.shape[1]
    bins = (columns * codes.reshape(-1, columns).astype(np.int64) + np.arange(columns, dtype=np.int64)).reshape(-1)

    def total(terms: NDArray[np.float32]) -> F64:
        return np.bincount(bins, terms.reshape(-1), minlength=8 * columns).astype(np.float64).reshape(8, columns)

    directed = errors * weights
    sums, squares, variances = total(directed), total(weights**2), total(directed**2)
    nearest = total((E2M1[codes].astype(np.float32) * own - sizes) * sizes)
    for axis, share, label in ONE_SIDED:
        most = share * squares.sum(axis) + np.abs(nearest.sum(axis)) + 6 * np.sqrt(variances.sum(axis))
        expect_none(np.atleast_1d(np.abs(sums.sum(axis)) > most), f"{label} are rounded to one side")
