"""Faults for the modules that conversion and validation have in common, and for the conversion's own."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from k2convert.calibration.layer_files import Calibration
from k2convert.check import shards
from k2convert.check.contract import result as contract_result
from k2convert.checkpoint import header
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
    Nvfp4Weight,
    decode_e4m3,
    encode_e4m3,
    pack_nibbles,
    unpack_nibbles,
)
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.quantizer import NativeQuantizer

Patch = Callable[[pytest.MonkeyPatch], None]


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
    return _of_quantized(lambda source, result: change(result.packed.copy(), result.block_scales.copy()))


def _of_quantized(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    right = NativeQuantizer.quantize

    def quantize(self: Any, source: Any, *, name: str, magnitude: Any, **options: Any) -> Any:
        result, _ = right(self, source, name=name, magnitude=magnitude, **options)
        packed, scales = _contiguous(change(source, result))
        changed = replace(result, packed=packed, block_scales=scales)
        return changed, measure_quantized(source, changed, name=name, magnitude=magnitude)

    return lambda patch: patch.setattr(NativeQuantizer, "quantize", quantize)


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
    return of_names(lambda name: name.replace(one, "\0").replace(other, one).replace("\0", other))


def next_expert(name: str) -> str:
    """Return the name of the next of four experts."""
    return re.sub(r"\.experts\.([0-3])\.", lambda found: f".experts.{(int(found[1]) + 1) % 4}.", name)


def of_names(renamed: Callable[[str], str]) -> Patch:
    """The source's tensors of other modules are read."""
    find, single = plan.find_projections, shards.projection_of
    fields = ("packed", "scale", "shape")

    def found(source: Any, names: Any, roles: Any) -> Any:
        right = find(source, names, roles)
        return {m: replace(p, **{f: getattr(right[renamed(m)], f) for f in fields}) for m, p in right.items()}

    def projection(source: Any, parts: Any) -> Any:
        right = single(source, parts)
        own = {f: tensor for f in fields if (tensor := getattr(right, f)) is not None}
        wrong = {f: source.tensors[renamed(tensor.name)] for f, tensor in own.items()}
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

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan.CopyStep, "outputs", property(written))
        monkeypatch.setattr(header, "_tensor_info", info)

    return patch


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


def with_input_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights have input scales, with activations of 4 and of 16 bits."""
    tensors, scalars, opened = plan._projection_tensors, shard.scalar_bytes, contract_result.Result
    monkeypatch.setattr(plan, "_projection_tensors", lambda t, layout, _, *shape: tensors(t, layout, "w4a4", *shape))
    monkeypatch.setattr(
        shard, "scalar_bytes", lambda recipe, *of: scalars(recipe.model_copy(update={"activations": "w4a4"}), *of)
    )
    monkeypatch.setattr(contract_result, "Result", lambda **fields: opened(**(fields | {"has_input_scale": True})))


def of_gptq(change: Callable[[Any, Any], tuple[Any, Any]], renamed: Callable[[str], str] = str) -> Patch:
    """Codes and block scales of rule gptq are changed between its layers and the shards."""

    def quantized(self: Calibration, projection: Any, *, shape: tuple[int, int], global_scale: float) -> Nvfp4Weight:
        weight = self.converted(renamed(projection.module))
        packed, scales = map(np.ascontiguousarray, change(weight.packed.copy(), weight.block_scales.copy()))
        return Nvfp4Weight(packed, scales, global_scale)

    return lambda patch: patch.setattr(Calibration, "quantized_weight", quantized)


def of_layer_pass(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """As `of_int4`, where rule gptq reads the source."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        from k2convert.forward.weights import WeightReader

        right = WeightReader.read_source

        def read(self: WeightReader, module: str) -> Any:
            weight = right(self, module)
            if not isinstance(weight, Int4Weight):
                return weight
            return Int4Weight(*map(np.ascontiguousarray, change(weight.packed, weight.scale_bits)))

        monkeypatch.setattr(WeightReader, "read_source", read)

    return patch


def each(*patches: Patch) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for change in patches:
            change(monkeypatch)

    return patch


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
