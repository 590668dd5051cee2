"""A fault that `run` and `validate` have in common is found: each line of the format documents, planted in the code.

The fault is in both while a checkpoint is converted and validated, so ledger, hashes and figures agree with it. Then
the result is validated without the fault.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import convert

from k2convert.check import shards
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.layouts.layout import CheckpointLayout
from k2convert.checkpoint.reader import ShardReader
from k2convert.plan import plan
from k2convert.quantize.formats.bf16 import Magnitude
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.metrics.measure import measure_quantized
from k2convert.quantize.quantizer import NativeQuantizer

Patch = Callable[[pytest.MonkeyPatch], None]


def of_source(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Codes uint8 [N, K/2] and scale bits uint16 [N, K/32] are changed when they are read."""
    right = Int4Weight.load.__func__  # type: ignore[attr-defined]

    def load(cls: Any, packed: Any, scale: Any, rows: int, name: str) -> Int4Weight:
        weight = right(cls, packed, scale, rows, name)
        codes, scales = change(weight.packed, weight.scale_bits)
        return Int4Weight(np.ascontiguousarray(codes), np.ascontiguousarray(scales))

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Int4Weight, "load", classmethod(load))
        from k2convert.models import source_formats

        changed = replace(source_formats.INT4, load=Int4Weight.load)
        monkeypatch.setattr("k2convert.models.projections.SOURCE_FORMATS", (changed, source_formats.MXFP4))
        monkeypatch.setattr("k2convert.models.projections.INT4", changed)

    return patch


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


FAULTS: dict[str, tuple[str, Patch]] = {
    "source nibbles in the other order": ("cut", of_source(lambda c, s: (c >> 4 | c << 4, s))),
    "source codes a row off": ("cut", of_source(lambda c, s: (np.roll(c, 1, 0), s))),
    "source codes a byte off": ("cut", of_source(lambda c, s: (np.roll(c, 1, 1), s))),
    "source scales a row off": ("cut", of_source(lambda c, s: (c, np.roll(s, 1, 0)))),
    "source scales a group off": ("cut", of_source(lambda c, s: (c, np.roll(s, 1, 1)))),
    "source codes as two's complement": ("cut", of_source(lambda c, s: (c ^ 0x88, s))),
    "source bias 7": ("cut", of_source(lambda c, s: ((c & 15).clip(1) - 1 | ((c >> 4).clip(1) - 1) << 4, s))),
    "source scales doubled": ("cut", of_source(lambda c, s: (c, s + np.uint16(128)))),
    "source scale mantissas cut": ("cut", of_source(lambda c, s: (c, s & np.uint16(0xFFFE)))),
    "last source group of a tensor lost": ("cut", of_source(lambda c, s: (c, zero(s.copy(), (-1, -1))))),
    "last source row lost": ("cut", of_source(last_row_zero)),
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
    "gate and up do not share g": ("cut", lambda patch: patch.setattr(Magnitude, "merge", lambda self, other: self)),
    "scalars inverted": ("cut", of_scalars(lambda right, layout, value: right(layout, 1 / value))),
    "last byte of every tensor": ("cut", of_reader(last_byte)),
    "tensors two bytes off": ("cut", of_reader(lambda data, tensor, begin: np.roll(data, 2))),
    "tensors of the next expert": ("cut", of_places(".experts.0.", ".experts.1.")),
    "gate for up": ("cut", of_places("gate_proj", "up_proj")),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_conversion_and_validation_is_found(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture, patch = FAULTS[name]
    source: Path = request.getfixturevalue(fixture)
    patch(monkeypatch)
    rule = "max" if name == "gate and up do not share g" else "mse"
    out = convert(source, tmp_path / "out", rule=rule)
    for _ in ("with the fault", "without it"):
        report = validate_checkpoint(folder=out, source=open_checkpoint(source))
        assert report.weights is not None
        assert report.weights.certificate.mismatches
        assert not report.passed
        monkeypatch.undo()
