"""A fault that `run` and `validate` have in common is found: each line of the format documents, planted in the code.

The fault is in both while a checkpoint is converted and validated, so ledger, hashes and figures agree with it. Then
the result is validated without the fault.
"""

import itertools
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import plan_job, text_of

from k2convert.calibration.layer_files import Calibration
from k2convert.check import shards
from k2convert.check.contract import result as contract_result
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint import header
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.layouts.layout import CheckpointLayout
from k2convert.checkpoint.reader import ShardReader
from k2convert.choices import Rule
from k2convert.errors import CalibrationError
from k2convert.forward.layer_pass import PassText
from k2convert.forward.weights import WeightReader
from k2convert.job import resources, shard
from k2convert.job.run import execute
from k2convert.models import projections, source_formats
from k2convert.plan import plan
from k2convert.quantize.formats.bf16 import Bf16Weight, Magnitude, SourceWeight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.formats.mxfp4 import Mxfp4Weight
from k2convert.quantize.formats.nvfp4 import (
    E2M1_VALUES,
    Nvfp4Weight,
    decode_e4m3,
    encode_e4m3,
    pack_nibbles,
    unpack_nibbles,
)
from k2convert.quantize.kernels import cpu
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.quantizer import NativeQuantizer
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules import max as max_rule

Patch = Callable[[pytest.MonkeyPatch], None]


def setting(owner: Any, name: str, value: Any) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


def each(*patches: Patch) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for change in patches:
            change(monkeypatch)

    return patch


def of_int4(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Codes uint8 [N, K/2] and scale bits uint16 [N, K/32] are changed when they are read."""
    return _of_format(source_formats.INT4, lambda w: Int4Weight(*_contiguous(change(w.packed, w.scale_bits))))


def of_mxfp4(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Codes uint8 [N, K/2] and scale bytes uint8 [N, K/32] are changed when they are read."""
    return _of_format(source_formats.MXFP4, lambda w: Mxfp4Weight(*_contiguous(change(w.packed, w.scale_bytes))))


def _contiguous(arrays: tuple[Any, Any]) -> Any:
    return map(np.ascontiguousarray, arrays)


def _of_format(known: Any, change: Callable[[Any], Any]) -> Patch:
    changed = replace(known, load=lambda *parts: change(known.load(*parts)))
    rows = tuple(changed if row is known else row for row in source_formats.SOURCE_FORMATS)
    return each(setting(projections, "SOURCE_FORMATS", rows), setting(projections, "INT4", rows[0]))


def of_bf16(change: Callable[[Any], Any]) -> Patch:
    """The bits uint16 [N, K] of BF16 weights are changed when they are read."""
    return setting(projections, "Bf16Weight", lambda bits: Bf16Weight(np.ascontiguousarray(change(bits))))


def of_result(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Codes [N, K/2] and block scales [N, K/16] are changed before they are measured and written."""
    return _of_quantized(lambda source, result: change(result.packed.copy(), result.block_scales.copy()))


def _of_quantized(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    right = NativeQuantizer.quantize

    def quantize(self: Any, source: Any, *, name: str, magnitude: Any, **options: Any) -> Any:
        result, _ = right(self, source, name=name, magnitude=magnitude, **options)
        packed, scales = _contiguous(change(source, result))
        changed = replace(result, packed=packed, block_scales=scales)
        return changed, measure_quantized(source, changed, name=name, magnitude=magnitude)

    return setting(NativeQuantizer, "quantize", quantize)


def of_scale(change: Callable[[Any, Magnitude], float]) -> Patch:
    right = NativeQuantizer.global_scale
    return setting(NativeQuantizer, "global_scale", lambda self, m: change(lambda known: right(self, known), m))


def of_reader(change: Callable[[Any, Any, int], Any]) -> Patch:
    """Bytes of tensors are changed whenever they are read, of source and result."""
    right = ShardReader.read

    def read(self: Any, tensor: Any, *, begin: int = 0, end: int | None = None) -> Any:
        data = right(self, tensor, begin=begin, end=end)
        is_shape = tensor.name.endswith("weight_shape")  # `run` would stop at it
        return data if tensor.name == "(all)" or is_shape else change(data.copy(), tensor, begin)

    return setting(ShardReader, "read", read)


def of_scalars(change: Callable[[Any, Any, float], bytes]) -> Patch:
    right = CheckpointLayout.encode_scalar
    return setting(CheckpointLayout, "encode_scalar", lambda self, value: change(right, self, value))


def of_places(first: str, second: str) -> Patch:
    """The source's tensors of two modules are taken for each other."""
    return of_names(lambda name: name.replace(first, "\0").replace(second, first).replace("\0", second))


def next_expert(name: str) -> str:
    """Return the name of the next of four experts."""
    return re.sub(r"\.experts\.([0-3])\.", lambda match: f".experts.{(int(match[1]) + 1) % 4}.", name)


def of_names(renamed: Callable[[str], str]) -> Patch:
    """The source's tensors of other modules are read."""
    find, single = plan.find_projections, shards.projection_of
    fields = ("packed", "scale", "shape")

    def projections(source: Any, names: Any, roles: Any) -> Any:
        right = find(source, names, roles)
        return {m: replace(p, **{f: getattr(right[renamed(m)], f) for f in fields}) for m, p in right.items()}

    def projection(source: Any, parts: Any) -> Any:
        right = single(source, parts)
        own = {f: tensor for f in fields if (tensor := getattr(right, f)) is not None}
        wrong = {f: source.tensors[renamed(tensor.name)] for f, tensor in own.items()}
        return replace(right, **wrong)

    return each(setting(plan, "find_projections", projections), setting(shards, "projection_of", projection))


def of_tensors(pattern: str, change: Callable[[Any], Any]) -> Patch:
    """Bytes of the tensors of some names are changed whenever they are read."""
    regex = re.compile(pattern)
    return of_reader(lambda data, tensor, begin: change(data) if regex.search(tensor.name) else data)


def of_dtypes(pattern: str, before: str, after: str) -> Patch:
    """Tensors of some names have another dtype of as many bytes wherever a header is read."""
    right = header._tensor_info

    def info(name: str, entry: Any, **options: Any) -> Any:
        tensor = right(name, entry, **options)
        is_wrong = re.search(pattern, name) and tensor.dtype == before
        return tensor._replace(dtype=after) if is_wrong else tensor

    return setting(header, "_tensor_info", info)


def of_shapes(pattern: str) -> Patch:
    """Copies of some names get one more dimension, which is left out wherever a header is read."""
    outputs, right = plan.CopyStep.outputs, header._tensor_info

    def written(step: plan.CopyStep) -> tuple[plan.OutputTensor, ...]:
        (tensor,) = outputs.__get__(step)
        return (tensor._replace(shape=(1, *tensor.shape)) if re.search(pattern, tensor.name) else tensor,)

    def info(name: str, entry: Any, **options: Any) -> Any:
        tensor = right(name, entry, **options)
        is_wrong = re.search(pattern, name) and tensor.shape[0] == 1
        return tensor._replace(shape=tensor.shape[1:]) if is_wrong else tensor

    return each(setting(plan.CopyStep, "outputs", property(written)), setting(header, "_tensor_info", info))


def of_offsets(name: str, other: str) -> Patch:
    """Two tensors of a result are at each other's offsets, where it is written and where it is read."""
    encode, parse = resources.encode_header, header.parse_header

    def encoded(tensors: Any, **options: Any) -> bytes:
        raw = encode(tensors, **options).decode("latin-1")
        names = {f'"{name}"': f'"{other}"', f'"{other}"': f'"{name}"'}
        return re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], raw).encode("latin-1")

    def parsed(raw: bytes, **options: Any) -> Any:
        shard = parse(raw, **options)
        if name in shard.tensors and other in shard.tensors and b"weight_scale_2" in raw:
            first, second = shard.tensors[name], shard.tensors[other]
            shard.tensors[name], shard.tensors[other] = second._replace(name=name), first._replace(name=other)
        return shard

    read = each(setting(resources, "parse_header", parsed), setting(header, "parse_header", parsed))
    return each(setting(resources, "encode_header", encoded), read)


def of_input_scales(change: Callable[[Any, Any], tuple[float, float]]) -> Patch:
    """`change` gets the layout's scale of gate and up, and of down, and returns those that are written."""
    right = shard.scalar_bytes

    def scalars(recipe: Any, projection: Any, global_scale: float) -> Any:
        scales = recipe.input_scale
        gate_up, down = change(scales.gate_up, scales.down)
        changed = scales.model_copy(update={"gate_up": gate_up, "down": down})
        return right(recipe.model_copy(update={"input_scale": changed}), projection, global_scale)

    return setting(shard, "scalar_bytes", scalars)


def with_input_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have input scales, with activations of 4 and of 16 bits."""
    tensors, scalars, opened = plan.projection_tensors, shard.scalar_bytes, contract_result.Result
    monkeypatch.setattr(plan, "projection_tensors", lambda t, layout, _, *shape: tensors(t, layout, "w4a4", *shape))
    monkeypatch.setattr(
        shard, "scalar_bytes", lambda recipe, *of: scalars(recipe.model_copy(update={"activations": "w4a4"}), *of)
    )
    monkeypatch.setattr(contract_result, "Result", lambda **fields: opened(**(fields | {"has_input_scale": True})))


def of_gptq(change: Callable[[Any, Any], tuple[Any, Any]], renamed: Callable[[str], str] = str) -> Patch:
    """Codes and block scales of rule gptq are changed between its layers and the shards."""

    def quantized(self: Calibration, projection: Any, *, shape: tuple[int, int], global_scale: float) -> Nvfp4Weight:
        weight = self.converted(renamed(projection.module))
        packed, scales = _contiguous(change(weight.packed.copy(), weight.block_scales.copy()))
        return Nvfp4Weight(packed, scales, global_scale)

    return setting(Calibration, "quantized_weight", quantized)


def of_layer_pass(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """As `of_int4`, where rule gptq reads the source."""
    right = WeightReader.read_source

    def read(self: WeightReader, module: str) -> Any:
        weight = right(self, module)
        if not isinstance(weight, Int4Weight):
            return weight
        return Int4Weight(*_contiguous(change(weight.packed, weight.scale_bits)))

    return setting(WeightReader, "read_source", read)


def of_ties(*, is_up: bool) -> Patch:
    """Weights halfway between two codes are all rounded away from zero, or all toward it."""

    def change(source: Any, result: Any) -> tuple[Any, Any]:
        steps = (decode_e4m3(result.block_scales) * result.global_scale).repeat(16, axis=1)
        ratio = np.abs(source.values()) / steps
        nibbles = unpack_nibbles(result.packed)
        for code, (low, high) in enumerate(itertools.pairwise(E2M1_VALUES)):
            is_tie = ratio == (low + high) / 2
            nibbles = np.where(is_tie, nibbles & 8 | np.uint8(code + is_up), nibbles)
        return pack_nibbles(nibbles.astype(np.uint8)), result.block_scales

    return _of_quantized(change)


def by_definition(change: Patch) -> Patch:
    """The rule is computed by its definition in NumPy, which `change` changes."""

    def defined(weight: SourceWeight, *, rule: Rule, global_scale: float) -> cpu.Converted:
        return cpu.Converted(RULES[rule].quantize(weight, global_scale))

    return each(setting(cpu, "convert", defined), change)


def floored(values: Any) -> Any:
    codes = encode_e4m3(values)
    return codes - (decode_e4m3(codes) > values).astype(np.uint8)


def cut_bits(weight: Int4Weight) -> Any:
    return (weight.values().view(np.uint32) >> 16).astype(np.uint16)


def flipped(data: Any) -> Any:
    data[0] ^= 1
    return data


def swapped_bytes(data: Any) -> Any:
    return data.reshape(-1, 4)[:, ::-1].reshape(-1)


def zero(array: Any, index: Any) -> Any:
    array[index] = 0
    return array


def last_byte(data: Any, tensor: Any, begin: int) -> Any:
    if data.size and begin + data.size == tensor.num_bytes:
        data[-1] ^= 1
    return data


def last_row_zero(codes: Any, scales: Any) -> tuple[Any, Any]:
    codes = codes.copy()
    codes[-1] = 0x88
    return codes, scales


def negated_row(codes: Any) -> Any:
    codes[5] ^= 0x88
    return codes


def smaller_code(codes: Any, scales: Any) -> tuple[Any, Any]:
    """One code of every row is one smaller."""
    is_large = (codes & 7) > 1
    return codes - ((np.cumsum(is_large, 1) == 1) & is_large).astype(np.uint8), scales


def last_scale(codes: Any, scales: Any) -> tuple[Any, Any]:
    scales[-1, -1] -= 1
    return codes, scales


def minus_zero(codes: Any, scales: Any) -> tuple[Any, Any]:
    nibbles = unpack_nibbles(codes)
    return pack_nibbles(np.where(nibbles == 0, np.uint8(8), nibbles)), scales


def other_code(wrong: int, code: int) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a change that writes one code in place of another one, whatever the sign."""

    def change(codes: Any, scales: Any) -> tuple[Any, Any]:
        nibbles = unpack_nibbles(codes)
        return pack_nibbles(np.where(nibbles & 7 == wrong, nibbles & 8 | np.uint8(code), nibbles)), scales

    return change


def next_scale(codes: Any, scales: Any) -> tuple[Any, Any]:
    return codes, (scales + 1).clip(max=0x7E)


def larger(scales: Any) -> Any:
    """Make one block scale four times as large, or less if it is clipped."""
    scales[5, 1] = min(int(scales[5, 1]) + 16, 0x7E)
    return scales


SCALES: dict[str, Any] = {"activations": "w4a4", "input_scale": {"gate_up": 0.5, "down": 0.125}}
MLP: dict[str, Any] = {"roles": ("experts", "shared_experts", "dense_mlp")}
GPTQ: dict[str, Any] = {"rule": "gptq", "activations": "w4a16"}
K3: dict[str, Any] = {"roles": ("experts",)}
MAX: dict[str, Any] = {"rule": "max"}
W4A16: dict[str, Any] = {"activations": "w4a16"}
DIVISOR: dict[str, Any] = {"layout": "compressed-tensors"}
CAST = sys.modules["k2convert.quantize.rules.cast"]
BANK = "model.layers.1.mlp.experts"
CHANGES: dict[str, Any] = {
    "nibbles in the other order": lambda c, s: (c >> 4 | c << 4, s),
    "codes a row off": lambda c, s: (np.roll(c, 1, 0), s),
    "scales a row off": lambda c, s: (c, np.roll(s, 1, 0)),
    "scales one column off": lambda c, s: (c, np.roll(s, 1, 1)),
}

ROW_OFF = CHANGES["codes a row off"]


def changed(subject: str, fixture: str, patch_of: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the changes that any weight may have, planted where it is read or written."""
    return {f"{subject} {name}": (fixture, patch_of(change), recipe) for name, change in CHANGES.items()}


FAULTS: dict[str, Any] = {
    **changed("source", "cut", of_int4, {}),
    **changed("result", "cut", of_result, {}),
    **changed("gptq", "passed", of_gptq, GPTQ),
    "source codes a byte off": ("cut", of_int4(lambda c, s: (np.roll(c, 1, 1), s))),
    "source codes as two's complement": ("cut", of_int4(lambda c, s: (c ^ 0x88, s))),
    "source bias 7": ("cut", of_int4(lambda c, s: ((c & 15).clip(1) - 1 | ((c >> 4).clip(1) - 1) << 4, s))),
    "source scales doubled": ("cut", of_int4(lambda c, s: (c, s + np.uint16(128)))),
    "source scale mantissas cut": ("cut", of_int4(lambda c, s: (c, s & np.uint16(0xFFFE)))),
    "last source group of a tensor lost": ("cut", of_int4(lambda c, s: (c, zero(s.copy(), (-1, -1))))),
    "last source row lost": ("cut", of_int4(last_row_zero)),
    "result scales one step up": ("cut", of_result(next_scale)),
    "result scales one step down": ("cut", of_result(lambda c, s: (c, (s - 1).clip(min=8)))),
    "result signs lost": ("cut", of_result(lambda c, s: (c & 0x77, s))),
    "minus zero": ("cut", of_result(minus_zero)),
    "saturation at 4": ("cut", of_result(other_code(7, 6))),
    "saturation at 240": ("cut", of_result(lambda c, s: (c, s.clip(max=0x77)))),
    "one code a row smaller": ("cut", of_result(smaller_code)),
    "last row of a result zero": ("cut", of_result(lambda c, s: (zero(c, -1), s))),
    "last block scale of a tensor": ("cut", of_result(last_scale)),
    "g doubled": ("cut", of_scale(lambda right, m: 2 * right(m))),
    "g a power of two less": ("cut", of_scale(lambda right, m: right(m) / 2)),
    "scalars inverted": ("cut", of_scalars(lambda right, layout, value: right(layout, 1 / value))),
    "last byte of every tensor": ("cut", of_reader(last_byte)),
    "tensors two bytes off": ("cut", of_reader(lambda data, tensor, begin: np.roll(data, 2))),
    "tensors of the next expert": ("cut", of_places(".experts.0.", ".experts.1.")),
    "gate for up": ("cut", of_places("gate_proj", "up_proj")),
    "ties away from zero": ("cut", of_ties(is_up=True)),
    "ties toward zero": ("cut", of_ties(is_up=False)),
    "a bit of a norm": ("cut", of_tensors(r"norm\.weight$", flipped)),
    "rows of the router": ("cut", of_tensors(r"mlp\.gate\.weight$", lambda data: np.roll(data, 128))),
    "bytes of the router's bias": ("cut", of_tensors(r"correction_bias$", swapped_bytes)),
    "dtype of a copy": ("cut", of_dtypes(r"layernorm\.weight$", "BF16", "F16")),
    "down of the next expert": ("cut", of_places(".experts.0.down_proj", ".experts.1.down_proj")),
    "tensors at each other's offsets": ("cut", of_offsets(*(f"{BANK}.{e}.down_proj.weight" for e in (0, 1)))),
    "shape of a copy": ("cut", of_shapes(r"layernorm\.weight$")),
    "one expert twice": ("cut", of_names(lambda name: name.replace(".experts.0.", ".experts.1."))),
    "g of the formula for BF16": ("zeros", of_scale(lambda right, m: right(replace(m, is_int4=False)))),
    "gate and up do not share g": ("cut", setting(Magnitude, "merge", lambda self, other: self), MAX),
    "max: amax over 7": ("cut", by_definition(setting(max_rule, "E2M1_MAX", 7.0)), MAX),
    "max: block scales rounded down": ("cut", by_definition(setting(max_rule, "encode_e4m3", floored)), MAX),
    "max: block scales clipped at 240": ("cut", by_definition(setting(max_rule, "E4M3_MAX", 240.0)), MAX),
    "max: weights cut to BF16": ("cut", by_definition(setting(Int4Weight, "bits", property(cut_bits))), MAX),
    "max: g of the mse rule": ("cut", of_scale(lambda right, m: 2.0 ** round(np.log2(right(m)))), MAX),
    "max: g for 240": ("cut", of_scale(lambda right, m: float(np.float32(right(m) * 448 / 240))), MAX),
    "max: g of partners apart": ("split", of_scale(lambda right, m: float(np.float32(right(m) * 1.5))), MAX | DIVISOR),
    "input scales inverted": ("cut", of_input_scales(lambda gate, down: (1 / gate, 1 / down)), SCALES),
    "input scale of down for gate": ("cut", of_input_scales(lambda gate, down: (down, gate)), SCALES),
    "input scale of gate for down": ("cut", of_input_scales(lambda gate, down: (gate, gate)), SCALES | DIVISOR),
    "g for 1/g": ("cut", of_scalars(lambda right, layout, value: right(layout, 1 / value)), DIVISOR),
    "tensors of the next layer": ("short", of_places(".layers.1.", ".layers.2.")),
    "MXFP4 exponents with bias 126": ("k3_tiny", of_mxfp4(lambda c, s: (c, s + np.uint8(1))), K3),
    "MXFP4 exponents with bias 128": ("k3_tiny", of_mxfp4(lambda c, s: (c, s - np.uint8(1))), K3),
    "MXFP4 nibbles in the other order": ("k3_tiny", of_mxfp4(lambda c, s: (c >> 4 | c << 4, s)), K3),
    "MXFP4 codes a row off": ("k3_tiny", of_mxfp4(lambda c, s: (np.roll(c, 1, 0), s)), K3),
    "MXFP4 scales a group off": ("k3_tiny", of_mxfp4(lambda c, s: (c, np.roll(s, 1, 1))), K3),
    "MXFP4 codes negated": ("k3_tiny", of_mxfp4(lambda c, s: (c ^ 0x88, s)), K3),
    "MXFP4 signs lost": ("k3_tiny", of_mxfp4(lambda c, s: (c & 0x77, s)), K3),
    "MXFP4 g a power more": ("k3_tiny", of_scale(lambda right, m: 2 * right(m)), K3),
    "MXFP4 g a power less": ("k3_tiny", of_scale(lambda right, m: right(m) / 2), K3),
    "MXFP4 tensors of the next expert": ("k3_tiny", of_names(next_expert), K3),
    "MXFP4 scales a row off": ("k3_edges", of_mxfp4(lambda c, s: (c, np.roll(s, 1, 0))), K3),
    "MXFP4 window a power short": ("k3_edges", setting(CAST, "SMALLEST_STEP", -8), K3),
    "MXFP4 by max, exponents with bias 126": ("k3_tiny", of_mxfp4(lambda c, s: (c, s + np.uint8(1))), K3 | MAX),
    "BF16 transposed": ("cut", of_bf16(lambda w: w.reshape(w.shape[::-1]).T), MLP),
    "BF16 a row off": ("cut", of_bf16(lambda w: np.roll(w, 1, 0)), MLP),
    "BF16 a column off": ("cut", of_bf16(lambda w: np.roll(w, 1, 1)), MLP),
    "BF16 low bytes cut": ("cut", of_bf16(lambda w: w & 0xFF80), MLP),
    "BF16 signs lost": ("cut", of_bf16(lambda w: w & 0x7FFF), MLP),
    "BF16 g doubled": ("cut", of_scale(lambda right, m: right(m) * (1 if m.is_int4 else 2)), MLP),
    "BF16 bytes swapped": ("cut", of_bf16(lambda w: w.byteswap() & 0xBFFF), MLP),
    "BF16 by max a row off": ("cut", of_bf16(lambda w: np.roll(w, 1, 0)), MLP | MAX),
    "gptq: weight of the next expert": ("passed", of_gptq(lambda c, s: (c, s), next_expert), GPTQ),
    "gptq: block scales a group off": ("passed", of_gptq(lambda c, s: (c, np.roll(s, 2, 1))), GPTQ),
    "gptq: g doubled": ("passed", each(of_gptq(lambda c, s: (c, s)), of_scale(lambda right, m: 2 * right(m))), GPTQ),
    "gptq: one row zero": ("passed", of_gptq(lambda c, s: (zero(c, 5), s)), GPTQ),
    "gptq: signs of one row": ("passed", of_gptq(lambda c, s: (negated_row(c), s)), GPTQ),
    "gptq: block scales one step up": ("passed", of_gptq(next_scale), GPTQ),
    "gptq: block scales one step down": ("passed", of_gptq(lambda c, s: (c, (s - 1).clip(min=8))), GPTQ),
    "gptq: saturation at 4": ("passed", of_gptq(other_code(7, 6)), GPTQ),
    "gptq: 0.5 is 0": ("passed", of_gptq(other_code(1, 0)), GPTQ),
    "gptq: 1.5 is 2": ("passed", of_gptq(other_code(3, 4)), GPTQ),
    "gptq: minus zero": ("passed", of_gptq(minus_zero), GPTQ),
    "gptq: one code a row smaller": ("passed", of_gptq(smaller_code), GPTQ),
    "gptq: last column lost": ("passed", of_gptq(lambda c, s: (zero(c, (slice(None), -1)), s)), GPTQ),
    "gptq: exponent of one block scale": ("passed", of_gptq(lambda c, s: (c, larger(s))), GPTQ),
    "gptq: source codes a row off": ("cut", each(of_int4(ROW_OFF), of_layer_pass(ROW_OFF)), GPTQ),
    "input scales in W4A16": ("cut", with_input_scales, W4A16),
    "K2.5: tensors of the next expert": ("k25", of_names(next_expert)),
}

QUICK = (
    "source scales one column off", "one code a row smaller", "g doubled", "ties away from zero", "max: amax over 7",
    "rows of the router", "input scales in W4A16", "gptq: block scales one step up", "MXFP4 exponents with bias 126",
    "BF16 transposed",
)  # fmt: skip


@pytest.fixture(scope="module")
def windows(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> PassText:
    """320 random tokens."""
    path = tmp_path_factory.mktemp("tokens") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 2048, size=(5, 64)))
    return text_of(cut, [path])


@pytest.fixture(scope="module")
def passed(cut: Path, windows: PassText, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of rule gptq that stopped after the layer pass, before the first shard with experts."""
    folder = tmp_path_factory.mktemp("passed") / "out"
    job = plan_job(cut, folder, text=windows, **GPTQ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "quantized_weight", stopped)
        with pytest.raises(CalibrationError, match="stopped"):
            execute(job)
    return folder


def stopped(*_: Any, **__: Any) -> None:
    raise CalibrationError("stopped")


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", [*QUICK, *(name for name in FAULTS if name not in QUICK)])
def test_a_fault_of_conversion_and_validation_is_found(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture, patch, *recipe = FAULTS[name]
    source: Path = request.getfixturevalue("cut" if fixture == "passed" else fixture)
    keys = {"rule": "mse"} | (recipe[0] if recipe else {})
    text = request.getfixturevalue("windows") if keys["rule"] == "gptq" else None
    out = tmp_path / "out"
    if fixture == "passed":
        shutil.copytree(request.getfixturevalue("passed"), out)
    patch(monkeypatch)
    execute(plan_job(source, out, text=text, **keys))
    for _ in ("with the fault", "without it"):
        report = validate_checkpoint(folder=out, source=open_checkpoint(source))
        assert report.weights is not None
        assert report.weights.certificate.mismatches
        assert not report.passed
        monkeypatch.undo()


@pytest.mark.slow
def test_a_conversion_that_goes_on_after_the_layer_pass_has_no_fault(
    cut: Path, passed: Path, windows: PassText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(passed, tmp_path / "out")
    of_gptq(lambda c, s: (c, s))(monkeypatch)
    execute(plan_job(cut, out, text=windows, **GPTQ))
    report = validate_checkpoint(folder=out, source=open_checkpoint(cut))
    assert report.weights is not None
    assert report.weights.certificate.tensors == 12
    assert report.passed
