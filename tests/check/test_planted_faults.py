"""A fault that `run` and `validate` have in common is found: each line of the format documents, planted in the code.

The fault is in both while a checkpoint is converted and validated, so ledger, hashes and figures agree with it. Then
the result is validated without the fault.
"""

import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import convert

from k2convert.check import shards
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint import header
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.layouts.layout import CheckpointLayout
from k2convert.checkpoint.reader import ShardReader
from k2convert.job import resources, shard
from k2convert.models import projections, source_formats
from k2convert.plan import plan
from k2convert.quantize import quantizer
from k2convert.quantize.formats.bf16 import Bf16Weight, Magnitude
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import (
    E2M1_VALUES,
    decode_e4m3,
    encode_e4m3,
    pack_nibbles,
    unpack_nibbles,
)
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.quantizer import NativeQuantizer
from k2convert.quantize.rules import max as max_rule

Patch = Callable[[pytest.MonkeyPatch], None]


def of_int4(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Codes uint8 [N, K/2] and scale bits uint16 [N, K/32] are changed when they are read."""
    right = source_formats.INT4.load

    def load(packed: Any, scale: Any, rows: int, name: str) -> Int4Weight:
        weight: Any = right(packed, scale, rows, name)
        return Int4Weight(*map(np.ascontiguousarray, change(weight.packed, weight.scale_bits)))

    return _of_format(source_formats.INT4, load)


def of_mxfp4(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Codes uint8 [N, K/2] and scale bytes uint8 [N, K/32] are changed when they are read."""
    right = source_formats.MXFP4.load

    def load(packed: Any, scale: Any, rows: int, name: str) -> Mxfp4Weight:
        weight: Any = right(packed, scale, rows, name)
        return Mxfp4Weight(*map(np.ascontiguousarray, change(weight.packed, weight.scale_bytes)))

    return _of_format(source_formats.MXFP4, load)


def _of_format(known: Any, load: Any) -> Patch:
    changed = replace(known, load=load)
    rows = tuple(changed if row is known else row for row in source_formats.SOURCE_FORMATS)

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(projections, "SOURCE_FORMATS", rows)
        monkeypatch.setattr(projections, "INT4", rows[0])

    return patch


def of_bf16(change: Callable[[Any], Any]) -> Patch:
    """The bits uint16 [N, K] of BF16 weights are changed when they are read."""
    return lambda patch: patch.setattr(
        projections, "Bf16Weight", lambda bits: Bf16Weight(np.ascontiguousarray(change(bits)))
    )


def of_result(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Codes [N, K/2] and block scales [N, K/16] are changed before they are measured and written."""
    right = NativeQuantizer.quantize

    def quantize(self: Any, source: Any, *, name: str, magnitude: Any, **options: Any) -> Any:
        result, _ = right(self, source, name=name, magnitude=magnitude, **options)
        packed, scales = change(result.packed.copy(), result.block_scales.copy())
        changed = replace(result, packed=np.ascontiguousarray(packed), block_scales=np.ascontiguousarray(scales))
        return changed, measure_quantized(source, changed, name=name, magnitude=magnitude)

    return lambda monkeypatch: monkeypatch.setattr(NativeQuantizer, "quantize", quantize)


def of_scale(change: Callable[[Any, Magnitude], float]) -> Patch:
    right = NativeQuantizer.global_scale
    return lambda monkeypatch: monkeypatch.setattr(
        NativeQuantizer, "global_scale", lambda self, magnitude: change(lambda m: right(self, m), magnitude)
    )


def of_reader(change: Callable[[Any, Any, int], Any]) -> Patch:
    """Bytes of tensors are changed whenever they are read, of source and result."""
    right = ShardReader.read

    def read(self: Any, tensor: Any, *, begin: int = 0, end: int | None = None) -> Any:
        data = right(self, tensor, begin=begin, end=end)
        is_shape = tensor.name.endswith("weight_shape")  # `run` would stop at it
        return data if tensor.name == "(all)" or is_shape else change(data.copy(), tensor, begin)

    return lambda monkeypatch: monkeypatch.setattr(ShardReader, "read", read)


def of_scalars(change: Callable[[Any, Any, float], bytes]) -> Patch:
    right = CheckpointLayout.encode_scalar
    return lambda monkeypatch: monkeypatch.setattr(
        CheckpointLayout, "encode_scalar", lambda self, value: change(right, self, value)
    )


def of_places(one: str, other: str) -> Patch:
    """The source's tensors of two modules are taken for each other."""
    find, single = plan.find_projections, shards.projection_of
    fields = ("packed", "scale", "shape")

    def renamed(module: str) -> str:
        return module.replace(one, "\0").replace(other, one).replace("\0", other)

    def found(source: Any, names: Any, roles: Any) -> Any:
        right = find(source, names, roles)
        return {m: replace(p, **{f: getattr(right[renamed(m)], f) for f in fields}) for m, p in right.items()}

    def projection(source: Any, parts: Any) -> Any:
        right = single(source, parts)
        wrong = {f: source.tensors.get(renamed(getattr(right, f).name)) for f in fields}
        return replace(right, **wrong)

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan, "find_projections", found)
        monkeypatch.setattr(shards, "projection_of", projection)

    return patch


def of_tensors(pattern: str, change: Callable[[Any], Any]) -> Patch:
    """Bytes of the tensors of some names are changed whenever they are read."""
    found = re.compile(pattern)
    return of_reader(lambda data, tensor, begin: change(data) if found.search(tensor.name) else data)


def of_dtypes(pattern: str, before: str, after: str) -> Patch:
    """Tensors of some names have another dtype of as many bytes wherever a header is read."""
    right = header._tensor_info

    def info(name: str, entry: Any, **options: Any) -> Any:
        tensor = right(name, entry, **options)
        is_wrong = re.search(pattern, name) and tensor.dtype == before
        return tensor._replace(dtype=after) if is_wrong else tensor

    return lambda patch: patch.setattr(header, "_tensor_info", info)


def of_offsets(one: str, other: str) -> Patch:
    """Two tensors of a result are at each other's offsets, where it is written and where it is read."""
    encode, parse = resources.encode_header, header.parse_header

    def encoded(tensors: Any, **options: Any) -> bytes:
        raw = encode(tensors, **options).decode("latin-1")
        names = {f'"{one}"': f'"{other}"', f'"{other}"': f'"{one}"'}
        return re.sub("|".join(map(re.escape, names)), lambda name: names[name[0]], raw).encode("latin-1")

    def parsed(raw: bytes, **options: Any) -> Any:
        found = parse(raw, **options)
        if one in found.tensors and other in found.tensors and b"weight_scale_2" in raw:
            first, second = found.tensors[one], found.tensors[other]
            found.tensors[one], found.tensors[other] = second._replace(name=one), first._replace(name=other)
        return found

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resources, "encode_header", encoded)
        monkeypatch.setattr(resources, "parse_header", parsed)
        monkeypatch.setattr(header, "parse_header", parsed)

    return patch


def of_input_scales(change: Callable[[Any, Any], tuple[float, float]]) -> Patch:
    """`change` gets the layout's scale of gate and up, and of down, and returns those that are written."""
    right = shard.scalar_bytes

    def scalars(recipe: Any, projection: Any, global_scale: float) -> Any:
        scales = recipe.input_scale
        gate_up, down = change(scales.gate_up, scales.down)
        return right(
            recipe.model_copy(update={"input_scale": scales.model_copy(update={"gate_up": gate_up, "down": down})}),
            projection,
            global_scale,
        )

    return lambda patch: patch.setattr(shard, "scalar_bytes", scalars)


def of_ties(*, is_up: bool) -> Patch:
    """Weights halfway between two codes are all rounded away from zero, or all toward it."""
    right = NativeQuantizer.quantize

    def quantize(self: Any, source: Any, *, name: str, magnitude: Any, **options: Any) -> Any:
        result, _ = right(self, source, name=name, magnitude=magnitude, **options)
        steps = (decode_e4m3(result.block_scales) * result.global_scale).repeat(16, axis=1)
        ratio = np.abs(source.values()) / steps
        nibbles = unpack_nibbles(result.packed)
        for code, (low, high) in enumerate(itertools.pairwise(E2M1_VALUES)):
            is_tie = ratio == (low + high) / 2
            nibbles = np.where(is_tie, nibbles & 8 | np.uint8(code + is_up), nibbles)
        changed = replace(result, packed=pack_nibbles(nibbles.astype(np.uint8)))
        return changed, measure_quantized(source, changed, name=name, magnitude=magnitude)

    return lambda patch: patch.setattr(NativeQuantizer, "quantize", quantize)


def by_definition(change: Patch) -> Patch:
    """The rule is computed by its definition in NumPy, which `change` changes."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quantizer, "has_kernel", lambda _rule: False)
        change(monkeypatch)

    return patch


def floored(values: Any) -> Any:
    codes = encode_e4m3(values)
    return codes - (decode_e4m3(codes) > values).astype(np.uint8)


def flipped(data: Any) -> Any:
    data[0] ^= 1
    return data


def swapped_bytes(data: Any) -> Any:
    return data.reshape(-1, 4)[:, ::-1].reshape(-1)


def zero(array: Any, place: Any) -> Any:
    array[place] = 0
    return array


def last_byte(data: Any, tensor: Any, begin: int) -> Any:
    if data.size and begin + data.size == tensor.num_bytes:
        data[-1] ^= 1
    return data


def last_row_zero(codes: Any, scales: Any) -> tuple[Any, Any]:
    codes = codes.copy()
    codes[-1] = 0x88
    return codes, scales


def smaller_code(codes: Any, scales: Any) -> tuple[Any, Any]:
    """One code of every row is one smaller."""
    is_large = (codes & 7) > 1
    return codes - ((np.cumsum(is_large, 1) == 1) & is_large).astype(np.uint8), scales


def last_scale(codes: Any, scales: Any) -> tuple[Any, Any]:
    scales[-1, -1] -= 1
    return codes, scales


SCALES: dict[str, Any] = {"activations": "w4a4", "input_scale": {"gate_up": 0.5, "down": 0.125}}
MLP: dict[str, Any] = {"roles": ("experts", "shared_experts", "dense_mlp")}
K3: dict[str, Any] = {"roles": ("experts",)}
FAULTS: dict[str, Any] = {
    "source nibbles in the other order": ("cut", of_int4(lambda c, s: (c >> 4 | c << 4, s))),
    "source codes a row off": ("cut", of_int4(lambda c, s: (np.roll(c, 1, 0), s))),
    "source codes a byte off": ("cut", of_int4(lambda c, s: (np.roll(c, 1, 1), s))),
    "source scales a row off": ("cut", of_int4(lambda c, s: (c, np.roll(s, 1, 0)))),
    "source scales a group off": ("cut", of_int4(lambda c, s: (c, np.roll(s, 1, 1)))),
    "source codes as two's complement": ("cut", of_int4(lambda c, s: (c ^ 0x88, s))),
    "source bias 7": ("cut", of_int4(lambda c, s: ((c & 15).clip(1) - 1 | ((c >> 4).clip(1) - 1) << 4, s))),
    "source scales doubled": ("cut", of_int4(lambda c, s: (c, s + np.uint16(128)))),
    "source scale mantissas cut": ("cut", of_int4(lambda c, s: (c, s & np.uint16(0xFFFE)))),
    "last source group of a tensor lost": ("cut", of_int4(lambda c, s: (c, zero(s.copy(), (-1, -1))))),
    "last source row lost": ("cut", of_int4(last_row_zero)),
    "result nibbles in the other order": ("cut", of_result(lambda c, s: (c >> 4 | c << 4, s))),
    "result codes a row off": ("cut", of_result(lambda c, s: (np.roll(c, 1, 0), s))),
    "result scales a row off": ("cut", of_result(lambda c, s: (c, np.roll(s, 1, 0)))),
    "result scales a block off": ("cut", of_result(lambda c, s: (c, np.roll(s, 1, 1)))),
    "result scales one step up": ("cut", of_result(lambda c, s: (c, (s + 1).clip(max=0x7E)))),
    "result signs lost": ("cut", of_result(lambda c, s: (c & 0x77, s))),
    "minus zero": ("cut", of_result(lambda c, s: (c | 8 * ((c & 7) == 0).astype(np.uint8), s))),
    "saturation at 4": ("cut", of_result(lambda c, s: (c - ((c & 7) == 7).astype(np.uint8), s))),
    "saturation at 240": ("cut", of_result(lambda c, s: (c, s.clip(max=0x77)))),
    "one code a row smaller": ("cut", of_result(smaller_code)),
    "last row of a result zero": ("cut", of_result(lambda c, s: (zero(c, -1), s))),
    "last block scale of a tensor": ("cut", of_result(last_scale)),
    "g doubled": ("cut", of_scale(lambda right, m: 2 * right(m))),
    "g of the formula for BF16": ("zeros", of_scale(lambda right, m: right(replace(m, is_int4=False)))),
    "g a power of two less": ("cut", of_scale(lambda right, m: right(m) / 2)),
    "gate and up do not share g": (
        "cut",
        lambda patch: patch.setattr(Magnitude, "merge", lambda self, other: self),
        {"rule": "max"},
    ),
    "scalars inverted": ("cut", of_scalars(lambda right, layout, value: right(layout, 1 / value))),
    "last byte of every tensor": ("cut", of_reader(last_byte)),
    "tensors two bytes off": ("cut", of_reader(lambda data, tensor, begin: np.roll(data, 2))),
    "tensors of the next expert": ("cut", of_places(".experts.0.", ".experts.1.")),
    "gate for up": ("cut", of_places("gate_proj", "up_proj")),
    "ties away from zero": ("cut", of_ties(is_up=True)),
    "ties toward zero": ("cut", of_ties(is_up=False)),
    "max: amax over 7": ("cut", by_definition(lambda patch: patch.setattr(max_rule, "E2M1_MAX", 7.0)), {"rule": "max"}),
    "max: block scales rounded down": (
        "cut",
        by_definition(lambda patch: patch.setattr(max_rule, "encode_e4m3", floored)),
        {"rule": "max"},
    ),
    "max: block scales clipped at 240": (
        "cut",
        by_definition(lambda patch: patch.setattr(max_rule, "E4M3_MAX", 240.0)),
        {"rule": "max"},
    ),
    "max: weights cut to BF16": (
        "cut",
        by_definition(
            lambda patch: patch.setattr(
                Int4Weight, "bits", property(lambda self: (self.values().view(np.uint32) >> 16).astype(np.uint16))
            )
        ),
        {"rule": "max"},
    ),
    "max: g of the mse rule": ("cut", of_scale(lambda right, m: 2.0 ** round(np.log2(right(m)))), {"rule": "max"}),
    "max: g for 240": ("cut", of_scale(lambda right, m: float(np.float32(right(m) * 448 / 240))), {"rule": "max"}),
    "a bit of a norm": ("cut", of_tensors(r"norm\.weight$", flipped)),
    "rows of the router": ("cut", of_tensors(r"mlp\.gate\.weight$", lambda data: np.roll(data, 128))),
    "bytes of the router's bias": ("cut", of_tensors(r"correction_bias$", swapped_bytes)),
    "dtype of a copy": ("cut", of_dtypes(r"layernorm\.weight$", "BF16", "F16")),
    "input scales inverted": ("cut", of_input_scales(lambda gate, down: (1 / gate, 1 / down)), SCALES),
    "input scale of down for gate": ("cut", of_input_scales(lambda gate, down: (down, gate)), SCALES),
    "input scale of gate for down": (
        "cut",
        of_input_scales(lambda gate, down: (gate, gate)),
        SCALES | {"layout": "compressed-tensors"},
    ),
    "g for 1/g": (
        "cut",
        of_scalars(lambda right, layout, value: right(layout, 1 / value)),
        {"layout": "compressed-tensors"},
    ),
    "tensors of the next layer": ("short", of_places(".layers.1.", ".layers.2.")),
    "down of the next expert": ("cut", of_places(".experts.0.down_proj", ".experts.1.down_proj")),
    "tensors at each other's offsets": (
        "cut",
        of_offsets("model.layers.1.mlp.experts.0.down_proj.weight", "model.layers.1.mlp.experts.1.down_proj.weight"),
    ),
    "MXFP4 exponents with bias 126": ("k3_tiny", of_mxfp4(lambda c, s: (c, s + np.uint8(1))), K3),
    "MXFP4 exponents with bias 128": ("k3_tiny", of_mxfp4(lambda c, s: (c, s - np.uint8(1))), K3),
    "MXFP4 nibbles in the other order": ("k3_tiny", of_mxfp4(lambda c, s: (c >> 4 | c << 4, s)), K3),
    "MXFP4 codes a row off": ("k3_tiny", of_mxfp4(lambda c, s: (np.roll(c, 1, 0), s)), K3),
    "MXFP4 scales a group off": ("k3_tiny", of_mxfp4(lambda c, s: (c, np.roll(s, 1, 1))), K3),
    "MXFP4 scales a row off": ("k3_edges", of_mxfp4(lambda c, s: (c, np.roll(s, 1, 0))), K3),
    "MXFP4 codes negated": ("k3_tiny", of_mxfp4(lambda c, s: (c ^ 0x88, s)), K3),
    "MXFP4 signs lost": ("k3_tiny", of_mxfp4(lambda c, s: (c & 0x77, s)), K3),
    "MXFP4 window a power short": (
        "k3_edges",
        lambda patch: patch.setattr(sys.modules["k2convert.quantize.rules.cast"], "SMALLEST_STEP", -8),
        K3,
    ),
    "MXFP4 g a power more": ("k3_tiny", of_scale(lambda right, m: 2 * right(m)), K3),
    "MXFP4 g a power less": ("k3_tiny", of_scale(lambda right, m: right(m) / 2), K3),
    "MXFP4 by max, exponents with bias 126": (
        "k3_tiny",
        of_mxfp4(lambda c, s: (c, s + np.uint8(1))),
        K3 | {"rule": "max"},
    ),
    "BF16 transposed": ("cut", of_bf16(lambda w: w.reshape(w.shape[::-1]).T), MLP),
    "BF16 a row off": ("cut", of_bf16(lambda w: np.roll(w, 1, 0)), MLP),
    "BF16 a column off": ("cut", of_bf16(lambda w: np.roll(w, 1, 1)), MLP),
    "BF16 low bytes cut": ("cut", of_bf16(lambda w: w & 0xFF80), MLP),
    "BF16 signs lost": ("cut", of_bf16(lambda w: w & 0x7FFF), MLP),
    "BF16 g doubled": ("cut", of_scale(lambda right, m: right(m) * (1 if m.is_int4 else 2)), MLP),
    "BF16 by max a row off": ("cut", of_bf16(lambda w: np.roll(w, 1, 0)), MLP | {"rule": "max"}),
}

QUICK = (
    "source scales a group off", "one code a row smaller", "g doubled", "ties away from zero", "max: amax over 7",
    "rows of the router", "MXFP4 exponents with bias 126", "BF16 transposed",
)  # fmt: skip


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", [*QUICK, *(name for name in FAULTS if name not in QUICK)])
def test_a_fault_of_conversion_and_validation_is_found(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture, patch, *recipe = FAULTS[name]
    source: Path = request.getfixturevalue(fixture)
    patch(monkeypatch)
    out = convert(source, tmp_path / "out", **({"rule": "mse"} | (recipe[0] if recipe else {})))
    for _ in ("with the fault", "without it"):
        report = validate_checkpoint(folder=out, source=open_checkpoint(source))
        assert report.weights is not None
        assert report.weights.certificate.mismatches
        assert not report.passed
        monkeypatch.undo()
