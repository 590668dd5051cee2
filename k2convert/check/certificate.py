"""The verdict on a converted shard, from the bytes of result and source by the format documents alone.

Only the standard library and NumPy are imported here and in certified_weights.py, which decodes headers and numbers. So
a fault that the conversion has in common with other readers of a checkpoint is found.

Modules, experts and partners are found by their names. A right result fulfills these conditions:

    g        mse, gptq: the least 2**k, k >= -126, with 448 * g >= 2.6 * s_max; of MXFP4 2**(k_max - 8).
             max: amax / 2688. Over gate and up together. s_max of BF16 is amax / 7. 1.0 if there is nothing but zeros
    mse      every code is the nearest under its scale, ties to even, never -0. No normal E4M3 number up to three steps
             away has less error, none above it the same. MXFP4: codes are copied, scales are the powers of two
    max      block scales and codes are those of the formula, in FP32 from BF16 weights
    gptq     scales are normal E4M3 numbers, 1 in an empty block, and no code is -0. Codes and scales depend on inputs
             that are not here, so beside this only size and direction of the errors are checked: see `check_errors`
    fp8      s of a row: max |w| / 448 in FP32, 1 for zeros. s of a block: the least power of two that is that or more.
             g_proj and kv_a_proj_with_mqa of one layer share the s of a column of blocks. Every code is the nearest to
             w / s in FP32, at most 448, ties to even, with the sign of w. Of another tool's only the error is computed
    copies   the source's bytes; under smoothing, the source's numbers times the power of two of their column

Every weight of a shard of up to `ALL_WEIGHTS` is checked. Of a larger one, rows are drawn: at least one in 1,024 and
two of every tensor, and its last one. A hash of the tensor's name and the shard's content draws them, so a conversion
cannot know them. Global and input scales, dtypes, shapes and all that smoothing scales are always checked.

Missed are: of rule gptq 7 of 10 changed bytes of codes, 1 of 8 changed block scales, and what is one step off in few
rows or blocks; of a large shard, where 1 row in 1,024 is drawn, 1,023 of 1,024 faults that are in a single row.
"""

import hashlib
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.check.certified_fp8 import (
    FP8_BLOCK,
    Scales,
    block_scales,
    check_decoded,
    check_fp8,
    expect_scales,
    is_known,
    largest_of_all,
    largest_of_columns,
    read_scales,
    row_scales,
)
from k2convert.check.certified_weights import (
    BLOCK,
    F64,
    GROUP,
    Checkpoint,
    Exponents,
    Fault,
    Locate,
    Rows,
    SourceWeight,
    Tensor,
    Written,
    bf16,
    blocks_of,
    check_best,
    check_cast,
    check_errors,
    check_int4,
    check_max,
    check_scales,
    expect,
    expect_none,
    nibbles_of,
    parts_of,
    to_bf16,
)

KNOWN_RULES: Final = ("max", "mse", "gptq")
ALL_WEIGHTS: Final = 1 << 22
LEAST_SHARE: Final = 1 / 1024
_PARAMETERS: Final = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}
_DIVISORS: Final = ("compressed-tensors",)  # layouts that store 1/g
_PARTNERS: Final = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_DOWN: Final = ("down_proj", "w2")
_ROLE: Final = re.compile(r".*\.(?:(shared_experts|experts(?=\.\d))\..*|layers\.\d+\.mlp\.(?:gate|up|down)_proj)")
_ATTENTION: Final = {
    "modelopt": re.compile(r".*\.self_attn\.(?:(?:q|k|v|g|o|f_a|f_b|b|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa)"),
    "compressed-tensors": re.compile(r".*\.self_attn\.(?:q_a_proj|kv_a_proj_with_mqa|q_b_proj|o_proj)"),
}
"""The linear layers of attention that become FP8: Kimi K3's in blocks, Kimi K2's without kv_b_proj."""
_JOINED: Final = {"g_proj": "kv_a_proj_with_mqa", "kv_a_proj_with_mqa": "g_proj"}
_FP8_PARAMETERS: Final = ("weight", "weight_scale")
_NORM: Final = re.compile(r".*\.layers\.(\d+)\.post_attention_layernorm\.weight")
_READERS: Final = re.compile(
    r".*\.layers\.(\d+)\.mlp\.(?:gate|(?:shared_experts|experts\.\d+)\.(?:gate|up)_proj)\.weight(?:_packed|_scale\w*)?"
)


@dataclass(frozen=True, slots=True)
class Claim:
    """Claims of a result about its conversion. None: it does not say.

    rule           "max", "mse" or "gptq"; of any other only codes, scales and the error are checked
    layout         "modelopt" or "compressed-tensors"
    input_scales   those of gate and up, and of down; empty in W4A16
    roles          of the weights that are converted to NVFP4
    fp8            of the weights that are converted to FP8
    exponents      of smoothing, by layer: int8 [K], a in the norm's w * 2**a
    """

    rule: str | None = None
    layout: str | None = None
    input_scales: tuple[float, ...] | None = None
    roles: tuple[str, ...] | None = None
    fp8: tuple[str, ...] | None = None
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


class Certificate:
    """The checks of one result.

    `result` and `source` say in which file a tensor lies; headers decide what it is. Files stay open until `release`.
    """

    def __init__(self, *, result: Locate, source: Locate, claim: Claim) -> None:
        self.written = Checkpoint(result, "result")
        self.source = Checkpoint(source, "source")
        self.claim = claim
        self.seed = ""
        self.share = 1.0
        self.verdict = Verdict()
        self.source_weight = lru_cache(maxsize=8)(self._source_weight)
        self._shared_scale = lru_cache(maxsize=8)(self._scale_of)
        self._largest_of_both = lru_cache(maxsize=8)(partial(largest_of_all, self.source))

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
            expect(is_right, f"the source's weight is {codes.dtype} {codes.shape}")
            rows, columns = codes.shape
            return SourceWeight("BF16", codes, None, (rows, columns), self.exponents(f"{module}.weight"))
        kind, wide, dtypes = ("INT4", 8, ("BF16",)) if codes.dtype == "I32" else ("MXFP4", 2, ("U8", "F8_E8M0"))
        scales = self.source.get(f"{module}.weight_scale")
        shape = (codes.shape[0], codes.shape[1] * wide)
        is_right = codes.dtype in ("I32", "U8", "I8") and scales.dtype in dtypes
        is_right &= scales.shape == (shape[0], shape[1] // GROUP)
        expect(is_right, f"the source's codes {codes.dtype} {codes.shape} have scales {scales.dtype} {scales.shape}")
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
        fp8 = [m for m, _, p in names if p == "weight" and tensors[f"{m}.{p}"].dtype == "F8_E4M3"]
        if self.claim.fp8 is None:  # another tool has forms of its own
            fp8 = [module for module in fp8 if is_known(self.source, self.written, module)]
        of_modules |= {f"{module}.{parameter}" for module in fp8 for parameter in _FP8_PARAMETERS}
        weights = sum(2 * t.size for n, t in tensors.items() if n in of_modules and t.dtype in ("U8", "I8"))
        weights += sum(tensors[f"{module}.weight"].size for module in fp8)
        weights += sum(t.size // 2 for n, t in tensors.items() if n not in of_modules)
        self.share = min(1.0, max(LEAST_SHARE, ALL_WEIGHTS / max(weights, 1)))
        self.verdict = Verdict(all_rows=self.share == 1.0)
        checks: dict[str, Callable[[], None]] = {m: partial(self._module, m, layout) for m, layout in modules.items()}
        checks |= {module: partial(self._fp8, module) for module in fp8}
        checks |= {name: partial(self._copy, name, t) for name, t in tensors.items() if name not in of_modules}
        for name, check in checks.items():
            try:
                check()
            except Fault as fault:
                self.verdict.problems[name] = str(fault)
        return self.verdict

    def _module(self, module: str, layout: str) -> None:
        self.verdict.rows[module] = 0
        is_named = self.claim.layout in (None, layout)
        expect(is_named, f"is in the layout {layout}, but the recipe's is {self.claim.layout}")
        role = self._role(module)
        is_named = self.claim.roles is None or role is None or role in self.claim.roles
        expect(is_named, f"was converted, but the recipe does not name {role}")
        weight = self.source_weight(module)
        rows, columns = weight.shape
        codes = self._tensor(f"{module}.{_PARAMETERS[layout][0]}", "U8", (rows, columns // 2))
        scales = self._tensor(f"{module}.{_PARAMETERS[layout][1]}", "F8_E4M3", (rows, columns // BLOCK))
        g = self._scalars(module, layout)
        chosen = self._rows(module, rows)
        self.verdict.rows[module] = chosen.size
        energy = error = 0.0
        for part in parts_of(chosen, columns):
            sums = self._errors(weight, part, Written(nibbles_of(codes.rows(part)), scales.rows(part), g))
            energy, error = energy + sums[0], error + sums[1]
        if self.verdict.all_rows:
            self.verdict.errors[module] = (energy, error)

    def _fp8(self, module: str) -> None:
        self.verdict.rows[module] = 0
        claimed = self.claim.fp8
        expect(claimed is None or self._role(module) in claimed, "is FP8, but the recipe leaves it in BF16")
        weight = self.source_weight(module)
        expect(claimed is None or weight.kind == "BF16", f"the source's weight is {weight.kind}")
        rows, columns = weight.shape
        codes = self._tensor(f"{module}.weight", "F8_E4M3", (rows, columns))
        stored = self.written.get(f"{module}.weight_scale")
        if claimed is not None:
            grid = (-(-rows // FP8_BLOCK), 1, -(-columns // FP8_BLOCK), 1)
            expect_scales(stored, grid if self.claim.layout == "modelopt" else (rows, 1))
        scales = read_scales(stored, rows, columns)
        energy = error = 0.0
        for part in scales.parts(self._rows(module, -(-rows // scales.rows)), rows, columns):
            self.verdict.rows[module] += part.size
            values = weight.values(part)
            written = (values, codes.rows(part), scales.of(part, columns))
            wanted = None if claimed is None else self._wanted(module, scales, values)
            sums = check_decoded(*written) if wanted is None else check_fp8(*written, wanted)
            energy, error = energy + sums[0], error + sums[1]
        if self.verdict.all_rows:
            self.verdict.errors[module] = (energy, error)

    def _wanted(self, module: str, scales: Scales, values: F64) -> F64:
        """Return the scales that some rows, or a row of blocks, should have: float64 [R, 1] or [1, K]."""
        if scales.rows == 1:
            return row_scales(values)
        stem, _, last = module.rpartition(".")
        partner = f"{stem}.{_JOINED[last]}" if last in _JOINED else module
        largest = largest_of_columns(values)
        if partner != module and self.source.find(f"{partner}.weight") is not None:
            largest = self._largest_of_both(*sorted((module, partner)))
        return np.repeat(block_scales(largest), FP8_BLOCK)[None, : values.shape[1]]

    def _role(self, module: str) -> str | None:
        attention = _ATTENTION.get(self.claim.layout or "")
        if attention is not None and attention.fullmatch(module):
            return "attention"
        match = _ROLE.fullmatch(module)
        return None if match is None else match[1] or "dense_mlp"

    def _errors(self, weight: SourceWeight, rows: Rows, written: "Written") -> tuple[float, float]:
        """Check the conditions of the rule in some rows; return energy and squared error."""
        rule = self.claim.rule
        expect(bool((written.scales < 0x7F).all()), "has block scales that are negative or NaN")
        if rule == "mse" and weight.scales is not None and weight.exponents is None:
            nibbles = nibbles_of(weight.codes.rows(rows))
            scales = weight.scales.rows(rows)
            if weight.kind == "INT4":
                return check_int4(nibbles, weight.units(scales), written)
            check_cast(nibbles, scales, written)
        values = weight.values(rows)
        if rule == "max":
            check_max(values, written)
        elif rule == "mse" and weight.kind != "MXFP4":
            check_best(values, written)
        elif rule != "mse":
            if rule == "gptq" and weight.kind != "MXFP4":
                expect_none(written.nibbles == 8, "codes are -0")
                check_scales(written, blocks_of((values != 0) | (written.nibbles != 0)).max(axis=1))
            check_errors(values, written)
        return float((values**2).sum()), float(((values - written.values()) ** 2).sum())

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.written.get(name)
        is_right = (tensor.dtype, tensor.shape) == (dtype, shape)
        if self.claim.layout is None:  # other tools write codes as I8, and scalars as [] or [1]
            is_right = tensor.dtype in (dtype, dtype.replace("U", "I")) and (tensor.shape == shape or tensor.size == 4)
        expect(is_right, f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
        return tensor

    def _scalars(self, module: str, layout: str) -> float:
        """Check global scale and input scale; return g."""
        _, _, scale, input_scale = _PARAMETERS[layout]
        is_divisor = layout in _DIVISORS
        shape = (1,) if is_divisor else ()
        stored = self._tensor(f"{module}.{scale}", "F32", shape).read().tobytes()
        (number,) = struct.unpack("<f", stored)
        expect(0 < number < math.inf, f"{scale} is {number!r}")
        g = 1 / number if is_divisor else number
        expected = self.global_scale(module)
        if expected is not None:
            wanted = struct.pack("<f", 1 / expected if is_divisor else expected)
            expect(stored == wanted, f"{scale} is {number!r}, the rule gives {struct.unpack('<f', wanted)[0]!r}")
            g = expected
        else:
            partner = _partner(module)
            other = None if partner is None else self.written.find(f"{partner}.{scale}")
            expect(other is None or other.read().tobytes() == stored, f"{scale} differs between gate and up")
        wanted = self.claim.input_scales
        if wanted is not None and not wanted:
            expect(self.written.find(f"{module}.{input_scale}") is None, f"has {input_scale}, but is W4A16")
        elif wanted is not None:
            value = wanted[module.endswith(_DOWN)]
            raw = self._tensor(f"{module}.{input_scale}", "F32", shape).read().tobytes()
            is_right = raw == struct.pack("<f", 1 / value if is_divisor else value)
            expect(is_right, f"{input_scale} is {struct.unpack('<f', raw)[0]!r}, the recipe's is {value!r}")
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
        module, _, parameter = name.rpartition(".")
        before = self.source.find(name)
        is_packed = parameter == "weight" and self.source.find(f"{module}.weight_packed") is not None
        if before is None and is_packed and self.claim.layout is None and tensor.dtype in ("BF16", "F32"):
            self._decoded(module, tensor)
            return
        before = self.source.get(name)
        is_same = (tensor.dtype, tensor.shape, tensor.size) == (before.dtype, before.shape, before.size)
        expect(is_same, f"{tensor.dtype} {list(tensor.shape)}, was {before.dtype} {list(before.shape)}")
        role = self._role(name.rpartition(".")[0])
        is_left = tensor.dtype != "I32" and self.claim.roles is not None and role in self.claim.roles
        expect(not is_left, f"was copied, but the recipe names {role}")
        is_left = name.endswith(".weight") and len(tensor.shape) == 2 and role in (self.claim.fp8 or ())
        expect(not is_left, f"was copied, but the recipe's fp8 names {role}")
        self.verdict.copies += 1
        norm = _NORM.fullmatch(name)
        exponents = self.claim.exponents.get(int(norm[1])) if norm is not None else None
        if exponents is None and (divided := self.exponents(name)) is not None:
            exponents = -divided
        if exponents is not None:
            _check_scaled(before, tensor, exponents)
            return
        page = 1 << 22 if self.share == 1.0 else 1 << 12
        for number in self._rows(name, math.ceil(tensor.size / page)).tolist():
            begin, end = number * page, min(number * page + page, tensor.size)
            is_same = np.array_equal(before.read(begin, end), tensor.read(begin, end))
            expect(is_same, "is not the source's, byte for byte")

    def _decoded(self, module: str, tensor: Tensor) -> None:
        """Check a weight in BF16 or FP32 that another tool decoded: the source's numbers, rounded to BF16 at most."""
        weight = self.source_weight(module)
        self.verdict.rows[module] = 0
        expect(tensor.shape == weight.shape, f"{tensor.dtype} {list(tensor.shape)}, was {list(weight.shape)}")
        chosen = self._rows(module, weight.shape[0])
        self.verdict.rows[module] = chosen.size
        for part in parts_of(chosen, weight.shape[1]):
            numbers = weight.values(part)
            data = tensor.rows(part)
            stored = bf16(data) if tensor.dtype == "BF16" else data.view("<f4")
            expect_none((stored != numbers) & (stored != to_bf16(numbers)), "numbers are not the source's")


def _check_scaled(before: Tensor, after: Tensor, exponents: Exponents) -> None:
    """Check that a BF16 or FP32 tensor [.., K] is the source's with column j times 2**exponents[j]."""
    is_scalable = before.dtype in ("BF16", "F32") and before.shape[-1:] == exponents.shape
    expect(is_scalable, f"is {before.dtype} {list(before.shape)}, but smoothing scales {exponents.size} columns")
    rows = np.arange(before.size // (2 if before.dtype == "BF16" else 4) // exponents.size)
    for part in parts_of(rows, exponents.size):
        old, new = (_numbers_of(tensor, part, exponents.size) for tensor in (before, after))
        scaled = np.ldexp(old, exponents.astype(np.int32))
        wrong = (scaled != new) | (np.signbit(old) != np.signbit(new))
        if wrong.any():
            column = int(np.flatnonzero(wrong.any(axis=0))[0])
            raise Fault(
                f"{np.count_nonzero(wrong):,} of {wrong.size:,} numbers are not the source's times the power of two of "
                f"their column, first in column {column} (2^{exponents[column]})"
            )


def _numbers_of(tensor: Tensor, rows: Rows, columns: int) -> NDArray[np.float64]:
    """Return adjacent rows of a BF16 or FP32 tensor, float64 [R, columns]."""
    width = columns * (2 if tensor.dtype == "BF16" else 4)
    data = tensor.read(int(rows[0]) * width, int(rows[-1] + 1) * width)
    numbers = bf16(data) if tensor.dtype == "BF16" else data.view("<f4").astype(np.float64)
    return numbers.reshape(-1, columns)


def _partner(module: str) -> str | None:
    """Return the module that shares the global scale of this one; None for a down projection."""
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_PARTNERS[last]}" if last in _PARTNERS else None
