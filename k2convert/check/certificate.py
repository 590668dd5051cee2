"""The verdict on a converted shard, from the bytes of result and source by the format documents alone.

Only the standard library and NumPy are imported, and no other module of the package, so a fault that the conversion
has in common with other readers of a checkpoint is found here. It decodes headers and numbers itself:

    INT4    q * s       q + 8 in 4 bits, the even column in the low nibble; BF16 s for 32 columns of a row
    MXFP4   v * 2**e    E2M1 v, the even column in the low nibble; e = byte - 127 for 32 columns of a row
    NVFP4   v * b * g   E2M1 v, the even column in the low nibble; E4M3 b for 16 columns; FP32 g, or 1/g in the layout
                        compressed-tensors

Modules, experts and partners are found by their names. A right result fulfills these conditions:

    g        mse, gptq: the least 2**k, k >= -126, with 448 * g >= 2.6 * s_max; of MXFP4 2**(k_max - 8).
             max: amax / 2688. Over gate and up together. s_max of BF16 is amax / 7. 1.0 if there is nothing but zeros
    mse      every code is the nearest under its scale, ties to even, never -0. No normal E4M3 number up to three steps
             away has less error, none above it the same. MXFP4: codes are copied, scales are the powers of two
    max      block scales and codes are those of the formula, in FP32 from BF16 weights
    gptq     scales are normal E4M3 numbers, 1 in an empty block, and no code is -0. Codes and scales depend on inputs
             that are not here, so beside this only size and direction of the errors are checked: see `_check_errors`
    copies   the source's bytes; under smoothing, the source's numbers times the power of two of their column

Every weight of a shard of up to `ALL_WEIGHTS` is checked. Of a larger one, rows are drawn: at least one in 1,024 and
two of every tensor, and its last one. A hash of the tensor's name and the shard's content draws them, so a conversion
cannot know them. Global and input scales, dtypes and shapes are always checked.

Missed are: of rule gptq 7 of 10 changed bytes of codes, 1 of 8 changed block scales, and what is one step off in few
rows or blocks; of a large shard, where 1 row in 1,024 is drawn, 1,023 of 1,024 faults that are in a single row.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
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

KNOWN_RULES: Final = ("max", "mse", "gptq")
ALL_WEIGHTS: Final = 1 << 22
LEAST_SHARE: Final = 1 / 1024
MOST_ROW_ERROR: Final = 16.0
MOST_BLOCK_ERROR: Final = 32.0
"""Times the error of rounding to nearest. Right results of rule gptq have up to 6 in a row and 13 in a block."""
ONE_SIDED: Final = ((None, 0.02, "tensors"), (0, 0.05, "columns"), (1, 0.1, "numbers"))
"""The shares of w**2 by which errors may go to one side. Right results of rule gptq need nothing of them."""
_CHUNK: Final = 1 << 18  # weights checked at once

_E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_MIDDLES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between E2M1 numbers
_INT4: Final = np.arange(-8.0, 8.0)
_E4M3: Final = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127] + [math.nan] * 129
)
_GROUP: Final = 32
_BLOCK: Final = 16
_STEPS: Final = 88
_PARAMETERS: Final = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}
_DIVISORS: Final = ("compressed-tensors",)  # layouts that store 1/g
_PARTNERS: Final = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_DOWN: Final = ("down_proj", "w2")
_ROLE: Final = re.compile(r".*\.(?:(shared_experts|experts(?=\.\d))\..*|layers\.\d+\.mlp\.(?:gate|up|down)_proj)")
_NORM: Final = re.compile(r".*\.layers\.(\d+)\.post_attention_layernorm\.weight")
_READERS: Final = re.compile(
    r".*\.layers\.(\d+)\.mlp\.(?:gate|(?:shared_experts|experts\.\d+)\.(?:gate|up)_proj)\.weight(?:_packed|_scale\w*)?"
)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a result says of its conversion. None: it does not say.

    rule           "max", "mse" or "gptq"; of any other only codes, scales and the error are checked
    layout         "modelopt" or "compressed-tensors"
    input_scales   those of gate and up, and of down; empty in W4A16
    roles          of the weights that are converted
    exponents      of smoothing, by layer: int8 [K], a in the norm's w * 2**a
    """

    rule: str | None = None
    layout: str | None = None
    input_scales: tuple[float, ...] | None = None
    roles: tuple[str, ...] | None = None
    exponents: Mapping[int, NDArray[np.int8]] = field(default_factory=dict[int, NDArray[np.int8]])


@dataclass(slots=True)
class Verdict:
    """Findings: rows checked by module, number of copies compared, and what is wrong, by tensor or module.

    `errors` are energy and squared error of the modules of which every row was checked.
    """

    rows: dict[str, int] = field(default_factory=dict[str, int])
    copies: int = 0
    all_rows: bool = True
    problems: dict[str, str] = field(default_factory=dict[str, str])
    errors: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def add(self, other: "Verdict") -> None:
        self.rows |= other.rows
        self.copies += other.copies
        self.all_rows &= other.all_rows
        self.problems |= other.problems
        self.errors |= other.errors


class Fault(Exception):  # noqa: N818
    """What is wrong with one tensor or module."""


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
        _expect(len(data) == end - begin, f"the file ends before byte {end:,}")
        return np.frombuffer(data, dtype=np.uint8)


class Checkpoint:
    """The tensors of a checkpoint by name. `locate` says in which file one lies; None: in none."""

    def __init__(self, locate: Locate) -> None:
        self._locate = locate
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
            raise Fault(f"there is no {name}")
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
            values = (values.reshape(-1, _GROUP) * units).reshape(values.shape)
        return values if self.exponents is None else np.ldexp(values, -self.exponents.astype(np.int32))

    def _numbers(self, data: U8) -> F64:
        if self.kind == "BF16":
            return _bf16(data)
        return (_INT4 if self.kind == "INT4" else _E2M1)[_nibbles(data)]

    def units(self, scales: U8) -> F64:
        """Return the numbers of bytes of scales."""
        return _bf16(scales) if self.kind == "INT4" else np.ldexp(1.0, scales.astype(np.int32) - 127)

    def scale_max(self) -> Fraction:
        """Return the largest scale, over the powers of two of its columns; of a BF16 weight the largest |w| / 7."""
        if self.scales is None:
            return Fraction(self.amax()) / 7
        keys, units = self._sizes()
        if self.exponents is None:
            return Fraction(float(units[keys.max(initial=0)]))
        powers = self.exponents.reshape(-1, _GROUP).min(axis=1).astype(np.int32)
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
            parts = _cut(np.arange(self.shape[0]), self.shape[1])
            return max((float(np.abs(_to_bf16(self.values(part))).max(initial=0.0)) for part in parts), default=0.0)
        keys, units = self._sizes()
        largest = 0.0
        candidates = np.flatnonzero(keys == keys.max(initial=0))[:_GROUP]  # most weights are answered by these
        for _ in range(2):
            sizes = np.abs(self._group_numbers(candidates)).max(axis=1, initial=0.0)
            largest = max(largest, float(_to_bf16(sizes * units[keys[candidates]]).max(initial=0.0)))
            least = np.searchsorted(units * (8 if self.kind == "INT4" else 6), largest, side="right")
            candidates = np.flatnonzero(keys >= least)
        return largest

    def largest_exponent(self) -> int | None:
        """Return the largest exponent of an MXFP4 group that has anything but zeros; None if there is none."""
        assert self.scales is not None
        scales = self.scales.read().reshape(-1)
        for byte in np.flatnonzero(np.bincount(scales, minlength=256))[::-1].tolist():
            groups = np.flatnonzero(scales == byte)
            for start in range(0, groups.size, _GROUP):
                if self._group_numbers(groups[start : start + _GROUP]).any():
                    return byte - 127
        return None

    def _group_numbers(self, groups: Rows) -> F64:
        """Return q or v of some groups, float64 [M, 32]."""
        width = _GROUP // 2
        if 16 * groups.size > self.shape[0] * self.shape[1] // _GROUP:
            data = self.codes.read().reshape(-1, width)[groups]
        else:
            parts = [self.codes.read(group * width, (group + 1) * width) for group in groups.tolist()]
            data = np.stack(parts) if parts else np.empty((0, width), dtype=np.uint8)
        return self._numbers(data)


class Certificate:
    """The checks of one result.

    `result` and `source` say in which file a tensor lies; headers decide what it is. Files stay open until `release`.
    """

    def __init__(self, *, result: Locate, source: Locate, claim: Claim) -> None:
        self.written = Checkpoint(result)
        self.source = Checkpoint(source)
        self.claim = claim
        self.seed = ""
        self.share = 1.0
        self.found = Verdict()
        self.source_weight = lru_cache(maxsize=8)(self._source_weight)
        self._shared_scale = lru_cache(maxsize=8)(self._scale_of)

    def release(self) -> None:
        self.source_weight.cache_clear()
        self.written.release()
        self.source.release()

    def _source_weight(self, module: str) -> SourceWeight:
        """Return the weight of a module in the source; Fault if there is none."""
        codes = self.source.find(f"{module}.weight_packed")
        if codes is None:
            codes = self.source.get(f"{module}.weight")
            is_right = codes.dtype == "BF16" and len(codes.shape) == 2
            _expect(is_right, f"the source's weight is {codes.dtype} {codes.shape}")
            rows, columns = codes.shape
            return SourceWeight("BF16", codes, None, (rows, columns), self.exponents(f"{module}.weight"))
        kind, wide, dtypes = ("INT4", 8, ("BF16",)) if codes.dtype == "I32" else ("MXFP4", 2, ("U8", "F8_E8M0"))
        scales = self.source.get(f"{module}.weight_scale")
        shape = (codes.shape[0], codes.shape[1] * wide)
        is_right = codes.dtype in ("I32", "U8") and scales.dtype in dtypes
        is_right &= scales.shape == (shape[0], shape[1] // _GROUP)
        _expect(is_right, f"the source's codes {codes.dtype} {codes.shape} have scales {scales.dtype} {scales.shape}")
        return SourceWeight(kind, codes, scales, shape, self.exponents(f"{module}.weight_packed"))

    def exponents(self, name: str) -> Exponents | None:
        """Return a [K] of a tensor whose columns smoothing divides by 2**a; None: it does not."""
        reader = _READERS.fullmatch(name)
        exponents = None if reader is None else self.claim.exponents.get(int(reader[1]))
        return None if exponents is None or not exponents.any() else exponents

    def global_scale(self, module: str) -> float | None:
        """Return the scale that the rule gives a module; None if the rule is not known, Fault if it has none."""
        if self.claim.rule not in KNOWN_RULES:
            return None
        names = [module]
        partner = _partner(module)
        if partner is not None and any(self.source.find(f"{partner}.{p}") for p in ("weight_packed", "weight")):
            names.append(partner)
        return self._shared_scale(*sorted(names))

    def _scale_of(self, *names: str) -> float:
        weights = [self.source_weight(name) for name in names]
        if self.claim.rule == "max":
            amax = max(weight.amax() for weight in weights)
            return float(np.float32(amax) / np.float32(2688)) if amax else 1.0
        if any(weight.kind == "MXFP4" for weight in weights):
            exponents = [e for e in (weight.largest_exponent() for weight in weights) if e is not None]
            return 2.0 ** max(max(exponents) - 8, -126) if exponents else 1.0
        least = max(weight.scale_max() for weight in weights) * Fraction(26, 10) / 448
        if not least:
            return 1.0
        exponent = max(math.frexp(float(least))[1] - 2, -126)
        while Fraction(2) ** exponent < least:
            exponent += 1
        return 2.0**exponent

    def check_shard(self, path: Path, *, seed: str) -> Verdict:
        """Check the modules whose global scales lie in this shard, and its copies; OSError if a file cannot be read.

        `seed` is the hash of the shard. One shard is checked at a time.
        """
        file = self.written.file(path)
        self.seed = seed
        names = [name.rpartition(".") for name in file.header]
        modules = {m: layout for m, _, p in names for layout, own in _PARAMETERS.items() if p == own[2]}
        of_modules = {f"{module}.{p}" for module, layout in modules.items() for p in _PARAMETERS[layout]}
        tensors = {name: tensor for name in file.header if (tensor := file.tensor(name)) is not None}
        weights = sum(2 * t.size for n, t in tensors.items() if n in of_modules and t.dtype == "U8")
        self.share = min(1.0, max(LEAST_SHARE, ALL_WEIGHTS / max(weights, 1)))
        self.found = Verdict(all_rows=self.share == 1.0)
        checks: dict[str, Callable[[], None]] = {m: partial(self._module, m, layout) for m, layout in modules.items()}
        checks |= {name: partial(self._copy, name, t) for name, t in tensors.items() if name not in of_modules}
        for name, check in checks.items():
            try:
                check()
            except Fault as fault:
                self.found.problems[name] = str(fault)
        return self.found

    def _module(self, module: str, layout: str) -> None:
        self.found.rows[module] = 0
        is_named = self.claim.layout in (None, layout)
        _expect(is_named, f"is in the layout {layout}, but the recipe's is {self.claim.layout}")
        role = _role(module)
        is_named = self.claim.roles is None or role is None or role in self.claim.roles
        _expect(is_named, f"was converted, but the recipe does not name {role}")
        weight = self.source_weight(module)
        rows, columns = weight.shape
        codes = self._tensor(f"{module}.{_PARAMETERS[layout][0]}", "U8", (rows, columns // 2))
        scales = self._tensor(f"{module}.{_PARAMETERS[layout][1]}", "F8_E4M3", (rows, columns // _BLOCK))
        g = self._scalars(module, layout)
        chosen = self._rows(module, rows)
        self.found.rows[module] = chosen.size
        energy = error = 0.0
        for part in _cut(chosen, columns):
            sums = self._errors(weight, part, Written(_nibbles(codes.rows(part)), scales.rows(part), g))
            energy, error = energy + sums[0], error + sums[1]
        if self.found.all_rows:
            self.found.errors[module] = (energy, error)

    def _errors(self, weight: SourceWeight, rows: Rows, written: "Written") -> tuple[float, float]:
        """Check the conditions of the rule in some rows; return energy and squared error."""
        rule = self.claim.rule
        _expect(bool((written.scales < 0x7F).all()), "has block scales that are negative or NaN")
        if rule == "mse" and weight.scales is not None and weight.exponents is None:
            nibbles = _nibbles(weight.codes.rows(rows))
            scales = weight.scales.rows(rows)
            if weight.kind == "INT4":
                return _check_int4(nibbles, weight.units(scales), written)
            _check_cast(nibbles, scales, written)
        values = weight.values(rows)
        if rule == "max":
            _check_max(values, written)
        elif rule == "mse" and weight.kind != "MXFP4":
            _check_best(values, written)
        elif rule != "mse":
            if rule == "gptq" and weight.kind != "MXFP4":
                _count(written.nibbles == 8, "codes are -0")
                _check_scales(written, _blocks((values != 0) | (written.nibbles != 0)).max(axis=1))
            _check_errors(values, written)
        return float((values**2).sum()), float(((values - written.values()) ** 2).sum())

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.written.get(name)
        is_right = (tensor.dtype, tensor.shape) == (dtype, shape)
        _expect(is_right, f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
        return tensor

    def _scalars(self, module: str, layout: str) -> float:
        """Check global scale and input scale; return g."""
        _, _, scale, input_scale = _PARAMETERS[layout]
        is_divisor = layout in _DIVISORS
        shape = (1,) if is_divisor else ()
        stored = self._tensor(f"{module}.{scale}", "F32", shape).read().tobytes()
        (number,) = struct.unpack("<f", stored)
        _expect(0 < number < math.inf, f"{scale} is {number!r}")
        g = 1 / number if is_divisor else number
        expected = self.global_scale(module)
        if expected is not None:
            wanted = struct.pack("<f", 1 / expected if is_divisor else expected)
            _expect(stored == wanted, f"{scale} is {number!r}, the rule gives {struct.unpack('<f', wanted)[0]!r}")
            g = expected
        else:
            partner = _partner(module)
            other = None if partner is None else self.written.find(f"{partner}.{scale}")
            _expect(other is None or other.read().tobytes() == stored, f"{scale} differs between gate and up")
        wanted = self.claim.input_scales
        if wanted is not None and not wanted:
            _expect(self.written.find(f"{module}.{input_scale}") is None, f"has {input_scale}, but is W4A16")
        elif wanted is not None:
            value = wanted[module.endswith(_DOWN)]
            found = self._tensor(f"{module}.{input_scale}", "F32", shape).read().tobytes()
            is_right = found == struct.pack("<f", 1 / value if is_divisor else value)
            _expect(is_right, f"{input_scale} is {struct.unpack('<f', found)[0]!r}, the recipe's is {value!r}")
        return g

    def _rows(self, name: str, rows: int) -> Rows:
        """Draw the rows or pages to check, in ascending order: the last one is always among them."""
        count = max(2, math.ceil(rows * self.share))
        if count >= rows:
            return np.arange(rows)
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        draw = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        return np.unique(np.append(draw.choice(rows, count, replace=False), rows - 1))

    def _copy(self, name: str, tensor: Tensor) -> None:
        before = self.source.get(name)
        is_same = (tensor.dtype, tensor.shape, tensor.size) == (before.dtype, before.shape, before.size)
        _expect(is_same, f"{tensor.dtype} {list(tensor.shape)}, was {before.dtype} {list(before.shape)}")
        role = _role(name.rpartition(".")[0])
        is_left = tensor.dtype != "I32" and self.claim.roles is not None and role in self.claim.roles
        _expect(not is_left, f"was copied, but the recipe names {role}")
        self.found.copies += 1
        page = 1 << 22 if self.share == 1.0 else 1 << 12
        for number in self._rows(name, math.ceil(tensor.size / page)).tolist():
            begin, end = number * page, min(number * page + page, tensor.size)
            self._compare(name, before.dtype, begin, before.read(begin, end), tensor.read(begin, end))

    def _compare(self, name: str, dtype: str, begin: int, before: U8, after: U8) -> None:
        norm = _NORM.fullmatch(name)
        exponents = self.claim.exponents.get(int(norm[1])) if norm is not None else None
        if exponents is None and (divided := self.exponents(name)) is not None:
            exponents = -divided
        if exponents is None:
            _expect(np.array_equal(before, after), "is not the source's, byte for byte")
            return
        _expect(dtype in ("BF16", "F32"), f"is {dtype}, but smoothing scales its columns")
        old, new = (_bf16(x) if dtype == "BF16" else x.view("<f4").astype(np.float64) for x in (before, after))
        columns = (begin // (2 if dtype == "BF16" else 4) + np.arange(old.size)) % exponents.size
        scaled = np.ldexp(old, exponents[columns].astype(np.int32))
        is_right = np.array_equal(scaled, new) and np.array_equal(np.signbit(old), np.signbit(new))
        _expect(is_right, "is not the source's times the powers of two of its columns")


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Rows of a result: nibbles [R, K], block scales [R, K/16] and g."""

    nibbles: U8
    scales: U8
    g: float

    def steps(self, offset: int = 0) -> F64:
        """Return b * g for the scale so many steps away, float64 [M, 1] for all blocks."""
        return _E4M3[(self.scales.reshape(-1, 1) + np.int64(offset)).clip(0, 0x7E)] * self.g

    def values(self) -> F64:
        """Return v * b * g, float64 [R, K]."""
        return (_E2M1[_blocks(self.nibbles)] * self.steps()).reshape(self.nibbles.shape)


def _partner(module: str) -> str | None:
    """Return the module that shares the global scale of this one; None for a down projection."""
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_PARTNERS[last]}" if last in _PARTNERS else None


def _role(module: str) -> str | None:
    found = _ROLE.fullmatch(module)
    return None if found is None else found[1] or "dense_mlp"


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise Fault(problem)


def _count(wrong: NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        raise Fault(f"{np.count_nonzero(wrong):,} of {wrong.size:,} {what}")


def _cut(rows: Rows, columns: int) -> list[Rows]:
    """Return rows in parts that are checked at once."""
    step = max(1, _CHUNK // columns)
    return [rows[start : start + step] for start in range(0, rows.size, step)]


def _nibbles(data: U8) -> U8:
    """Return two nibbles for each byte, the low one first."""
    return np.stack((data & np.uint8(15), data >> np.uint8(4)), axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])


def _blocks(rows: NDArray[Any]) -> NDArray[Any]:
    return rows.reshape(-1, _BLOCK)


def _bf16(data: U8) -> F64:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _to_bf16(values: F64) -> F64:
    """Round numbers of at most 24 bits to BF16, ties to even."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def _nearest(sizes: NDArray[Any], steps: NDArray[Any] | float) -> U8:
    """Return the code of the E2M1 number next to sizes / steps, both >= 0; ties to the even code."""
    codes = np.zeros(np.broadcast(sizes, steps).shape, dtype=np.uint8)
    for code, middle in enumerate(_MIDDLES):
        codes += sizes > middle * steps if code % 2 == 0 else sizes >= middle * steps
    return codes


def _check_codes(written: Written, codes: U8, is_negative: NDArray[np.bool_]) -> None:
    """Check all codes, [M, 16]: those without signs, and which of them are negative."""
    nibbles = _blocks(written.nibbles)
    _count(nibbles & 7 != codes, "codes are not the nearest ones")
    _count((nibbles >= 8) != is_negative, "signs are not the source's")


@lru_cache(maxsize=1)
def _int4_tables() -> tuple[U8, F64]:
    """Return code and squared error of each |q|, [128, _STEPS, 9], for s = 1 .. 255/128 and steps from 1/16 on."""
    steps = (8 + np.arange(_STEPS) % 8) * 2.0 ** (np.arange(_STEPS) // 8 - 7)
    sizes = np.arange(9) * (np.arange(128, 256) / 128)[:, None, None]
    codes = _nearest(sizes, steps[:, None])
    return codes, (sizes - _E2M1[codes] * steps[:, None]) ** 2


def _check_int4(nibbles: U8, units: F64, written: Written) -> tuple[float, float]:
    """Check INT4 weights q * s: codes and errors follow from |q| and from the ratio of b * g and s."""
    fractions, powers = (x.repeat(2) for x in np.frexp(units))  # two blocks of a group
    scales = written.scales.reshape(-1).astype(np.int64)
    place = (scales + 8 * (round(math.log2(written.g)) - powers - 2)).clip(3, _STEPS - 4)
    place = ((np.abs(fractions) * 256).astype(np.int64) - 128).clip(0, 127) * _STEPS + place
    numbers = _blocks(nibbles).astype(np.int64) - 8
    sizes = np.abs(numbers)
    codes, table = _int4_tables()
    wanted = codes.reshape(-1)[9 * place[:, None] + sizes]
    wanted[fractions == 0] = 0
    _check_codes(written, wanted, ((numbers < 0) ^ (fractions < 0)[:, None]) & (wanted > 0))
    counts = np.bincount((9 * np.arange(len(sizes))[:, None] + sizes).reshape(-1), minlength=9 * len(sizes))
    counts = counts.reshape(-1, 9).astype(np.float64)
    near = np.lib.stride_tricks.sliding_window_view(table.reshape(-1), 63)[9 * (place - 3)].reshape(-1, 7, 9)
    errors = np.einsum("mnl,ml->nm", near, counts)
    energy = (counts @ np.arange(9.0) ** 2) * units.reshape(-1).repeat(2) ** 2
    _check_neighbors(written, energy > 0, errors)
    return float(energy.sum()), float(np.ldexp(errors[3] * (fractions != 0), 2 * powers - 2).sum())


def _check_scales(written: Written, has_numbers: NDArray[np.bool_]) -> None:
    scales = written.scales.reshape(-1)
    _count((scales != 0x38) & ~has_numbers, "blocks of zeros have another scale than 1")
    _count((scales < 8) & has_numbers, "block scales are below 2**-6")


def _check_neighbors(written: Written, has_numbers: NDArray[np.bool_], errors: F64) -> None:
    """Check that no scale up to three steps away has less error: errors [7, M], from three steps down to three up."""
    _check_scales(written, has_numbers)
    scales = written.scales.reshape(-1).astype(np.int64)
    for offset in (-3, -2, -1, 1, 2, 3):
        exists = (scales + offset >= 8) & (scales + offset <= 0x7E) & has_numbers
        is_better = errors[3 + offset] <= errors[3] if offset > 0 else errors[3 + offset] < errors[3]
        _count(exists & is_better, "block scales are not the best ones, the larger one of equals")


def _check_best(values: F64, written: Written) -> None:
    sizes = np.abs(_blocks(values))
    codes = _nearest(sizes, written.steps())
    _check_codes(written, codes, _blocks(values < 0) & (codes > 0))
    errors = np.zeros((7, len(sizes)))
    for offset, error in enumerate(errors):
        steps = written.steps(offset - 3)
        for terms in ((sizes - _E2M1[_nearest(sizes, steps)] * steps) ** 2).T:  # added in their order
            error += terms
    _check_neighbors(written, sizes.max(axis=1) > 0, errors)


def _check_max(values: F64, written: Written) -> None:
    weights = _blocks(_to_bf16(values)).astype(np.float32)
    g = np.float32(written.g)
    scales = _E4M3[written.scales.reshape(-1)]
    with np.errstate(all="ignore"):
        wanted = np.abs(weights).max(axis=1) / (np.float32(6) * g)
        wanted = np.where(wanted == 0, np.float32(1), wanted).clip(2**-9, 448).astype(np.float64)
        ratio = weights / (scales.astype(np.float32) * g)[:, None]
    unit = np.ldexp(1.0, np.maximum(np.frexp(wanted)[1] - 4, -9))  # of E4M3 numbers there
    _count(scales != np.rint(wanted / unit) * unit, "block scales are not the formula's")
    _check_codes(written, _nearest(np.abs(ratio), 1.0), ratio < 0)


def _check_cast(nibbles: U8, scales: U8, written: Written) -> None:
    """MXFP4: each group keeps its codes and its power of two, as far as E4M3 has it."""
    groups = nibbles.reshape(-1, _GROUP)
    after = written.nibbles.reshape(-1, _GROUP)
    steps = scales.reshape(-1).astype(np.int64) - 127 - round(math.log2(written.g))
    is_empty = ~(groups & 7).any(axis=1)
    is_below = (steps < -9) & ~is_empty
    powers = np.where(is_empty & ((steps < -9) | (steps > 8)), 0, np.maximum(steps, -9))
    wrong = _E4M3[written.scales.reshape(-1, 2)] != np.ldexp(1.0, powers.astype(np.int32))[:, None]
    _count(wrong, "block scales are not the source's powers of two")
    _count((groups != after)[~is_below], "codes are not the source's")
    shifted = np.ldexp(_E2M1[groups[is_below] & 7], (steps[is_below] + 9).astype(np.int32)[:, None])
    _count(after[is_below] & 7 != _nearest(shifted, 1.0), "codes below the window are not the nearest ones")
    _count((after ^ groups)[is_below] > 7, "signs are not the source's")


@np.errstate(over="ignore", invalid="ignore")
def _check_errors(values: F64, written: Written) -> None:
    """Check codes that no formula gives, by the size and the direction of their errors.

    Rule gptq moves weights w to make up for the errors of others, so the limits of a row and a block are wide. But it
    moves them up as often as down: the sum of (v * b * g - w) * w is near zero over all weights, over a column, and
    over those that round to one E2M1 number. It may be a share of the sum of w**2, beside what rounding to nearest
    under the same scales gives and six standard deviations.
    """
    weights = _blocks(values / written.g).astype(np.float32)
    sizes = np.abs(weights)
    own = _E4M3[written.scales.reshape(-1, 1)].astype(np.float32)
    errors = _E2M1[_blocks(written.nibbles)].astype(np.float32) * own - weights
    largest = sizes.max(axis=1, keepdims=True)
    scales = np.where(largest > 0, (largest / 6).clip(2**-6, 448), np.float32(1))
    usual = ((sizes - _E2M1[_nearest(sizes, scales)].astype(np.float32) * scales) ** 2).sum(axis=1)
    usual = usual.reshape(len(values), -1)
    error = np.einsum("mj,mj->m", errors, errors).reshape(usual.shape)
    wrong = ~(error.sum(axis=1) <= MOST_ROW_ERROR * usual.sum(axis=1))
    _count(wrong, "rows have far more error than rounding to nearest")
    wrong = ~(error <= MOST_BLOCK_ERROR * (usual + usual.mean(axis=1, keepdims=True)))
    _count(wrong, "blocks have far more error than rounding to nearest")
    codes = _nearest(sizes, own)
    columns = values.shape[1]
    place = (columns * codes.reshape(-1, columns).astype(np.int64) + np.arange(columns, dtype=np.int64)).reshape(-1)

    def total(terms: NDArray[np.float32]) -> F64:
        return np.bincount(place, terms.reshape(-1), minlength=8 * columns).astype(np.float64).reshape(8, columns)

    directed = errors * weights
    sums, squares, variances = total(directed), total(weights**2), total(directed**2)
    nearest = total((_E2M1[codes].astype(np.float32) * own - sizes) * sizes)
    for axis, share, what in ONE_SIDED:
        most = share * squares.sum(axis) + np.abs(nearest.sum(axis)) + 6 * np.sqrt(variances.sum(axis))
        _count(np.atleast_1d(np.abs(sums.sum(axis)) > most), f"{what} are rounded to one side")
