"""What smoothing needs to know of the tensors it changes, read from the source in bounded memory.

    rows of gate and up   neighboring rows of every routed expert: the mean squares of columns, and a few whole rows
    exponents             of every BF16 or FP32 number, INT4 scales included: where a power of two would not be exact

At K2's size a layer has 768 such projections of 2048 x 7168: 21 rows of each are read, and all scales.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.calibrate.layer_statistics import MAX_EXPONENT
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.reader import ShardReader
from k2convert.choices import GROUP_SIZE
from k2convert.models import detect_family, parse_tensor_name
from k2convert.models.names import WEIGHT, Role, reads_norm
from k2convert.models.projections import Projection, projection_of
from k2convert.quantize.formats.int4 import (
    FIRST_UNUSABLE_BITS,
    Bf16Weight,
    Int4Weight,
    SourceWeight,
    bf16_values,
    unpack_int4,
)

READ_ROWS: Final = 16384
"""Rows of gate and up that are read, of all experts together: column norms then err by about 1 %."""
SAMPLED_ROWS: Final = 96
"""Of them, rows that are quantized again and again during the search."""

_FIRST_UNUSABLE_FIELD: Final = FIRST_UNUSABLE_BITS >> 7


@dataclass(frozen=True, slots=True)
class ScaledTensors:
    """The tensors of a MoE layer that smoothing changes: projections are gate and up, shared ones apart."""

    norm: TensorInfo
    routers: tuple[TensorInfo, ...]
    experts: tuple[Projection, ...]
    shared: tuple[Projection, ...]


def find_scaled_tensors(source: Checkpoint, layer: int) -> ScaledTensors:
    """Find the tensors of a layer by their names; raises PlanError for what is not part of the family."""
    family = detect_family(source)
    stem = f"{family.layer.format(layer=layer)}."
    routers: list[TensorInfo] = []
    projections: dict[str, Projection] = {}
    for name, tensor in source.tensors.items():
        if not name.startswith(stem):
            continue
        parts = parse_tensor_name(name, family=family)
        if not reads_norm(parts):
            continue
        if parts.role is Role.ROUTER:
            routers += [tensor] if parts.parameter == WEIGHT else []
        elif parts.module not in projections:
            projections[parts.module] = projection_of(source, parts)
    return ScaledTensors(
        norm=source.tensors[f"{family.mlp_norm.format(layer=layer)}.{WEIGHT}"],
        routers=tuple(routers),
        experts=tuple(p for p in projections.values() if p.role is Role.EXPERTS),
        shared=tuple(p for p in projections.values() if p.role is not Role.EXPERTS),
    )


@dataclass(frozen=True, slots=True, eq=False)
class GateUpRows:
    """Of the routed experts' gate and up: mean squares of the columns f64 [K], and sampled rows [n, K] of each kind."""

    mean_square: NDArray[np.float64]
    rows: tuple[SourceWeight, ...]


def read_gate_up(reader: ShardReader, tensors: ScaledTensors, *, seed: int) -> GateUpRows:
    """Read READ_ROWS rows of the experts' gate and up, as many of each, at places drawn by `seed`."""
    projections = tensors.experts
    generator = np.random.RandomState(zlib.crc32(f"rows/{seed}/{tensors.norm.name}".encode()))
    count = min(projections[0].num_rows, max(1, READ_ROWS // len(projections)))
    kept = set(generator.permutation(count * len(projections))[:SAMPLED_ROWS].tolist())
    squares = np.zeros(projections[0].num_columns)
    found: list[SourceWeight] = []
    for number, projection in enumerate(projections):
        weight = _read_rows(reader, projection, int(generator.randint(projection.num_rows - count + 1)), count)
        # NumPy adds rows in order, the same on every machine.
        squares += np.square(weight_values(weight).astype(np.float64)).sum(axis=0)
        found += [_rows(weight, row, row + 1) for row in range(count) if number * count + row in kept]
    return GateUpRows(squares / (count * len(projections)), _stacked(found))


def _read_rows(reader: ShardReader, projection: Projection, start: int, count: int) -> SourceWeight:
    def read(tensor: TensorInfo) -> NDArray[np.uint8]:
        width = tensor.num_bytes // projection.num_rows
        return reader.read(tensor, begin=start * width, end=(start + count) * width)

    if projection.weight is not None:
        return Bf16Weight(read(projection.weight).view(np.uint16).reshape(count, -1))
    assert projection.packed is not None
    assert projection.scale is not None
    return Int4Weight(
        packed=read(projection.packed).reshape(count, -1),
        scale_bits=read(projection.scale).view(np.uint16).reshape(count, -1),
    )


def _rows(weight: SourceWeight, start: int, stop: int) -> SourceWeight:
    if isinstance(weight, Bf16Weight):
        return Bf16Weight(weight.bits[start:stop])
    return weight.rows(start, stop)


def _stacked(rows: list[SourceWeight]) -> tuple[SourceWeight, ...]:
    int4 = [row for row in rows if isinstance(row, Int4Weight)]
    bf16 = [row for row in rows if isinstance(row, Bf16Weight)]
    stacked: list[SourceWeight] = []
    if int4:
        packed, bits = (np.concatenate(parts) for parts in zip(*((r.packed, r.scale_bits) for r in int4), strict=True))
        stacked.append(Int4Weight(packed=packed, scale_bits=bits))
    if bf16:
        stacked.append(Bf16Weight(np.concatenate([row.bits for row in bf16])))
    return tuple(stacked)


def weight_values(weight: SourceWeight) -> NDArray[np.float32]:
    """Return the values float32 [N, K] of a weight, exact."""
    if isinstance(weight, Bf16Weight):
        return bf16_values(weight.bits)
    return unpack_int4(weight.packed) * weight.scales.repeat(GROUP_SIZE, axis=1)


def exactly_scalable(reader: ShardReader, tensors: ScaledTensors) -> NDArray[np.bool_]:
    """Return bool [K]: the channels of which every number may be multiplied by 2^-4 .. 2^4 without losing a bit.

    A channel whose norm weight is zero is not scaled either, so that the exponents show in the norm's weight.
    """
    columns = tensors.norm.shape[-1]
    usable = _are_in_range(reader, tensors.norm, columns, zeros=False)
    for router in tensors.routers:
        usable &= _are_in_range(reader, router, columns)
    for projection in (*tensors.experts, *tensors.shared):
        if projection.weight is not None:
            usable &= _are_in_range(reader, projection.weight, columns)
        else:
            assert projection.scale is not None
            groups = _are_in_range(reader, projection.scale, columns // GROUP_SIZE, end=_FIRST_UNUSABLE_FIELD)
            usable &= groups.repeat(GROUP_SIZE)
    return usable


def _are_in_range(
    reader: ShardReader, tensor: TensorInfo, columns: int, *, end: int = 255, zeros: bool = True
) -> NDArray[np.bool_]:
    """Return bool [columns]: whether the 8-bit exponents of a column's numbers stay within 1 .. end - 1 when scaled.

    A column of zeros is in range if `zeros`. A dtype other than BF16 and FP32 never is.
    """
    if tensor.dtype not in ("BF16", "F32"):
        return np.zeros(columns, dtype=np.bool_)
    kind, mantissa = (np.uint16, 7) if tensor.dtype == "BF16" else (np.uint32, 23)
    bits: NDArray[Any] = reader.read(tensor).view(kind).reshape(-1, columns)
    magnitudes = bits & kind(np.iinfo(kind).max >> 1)
    largest = magnitudes.max(axis=0)
    # The smallest that is not zero: minus one, zero is the largest number; back again, a column of zeros is zero.
    smallest = (magnitudes - kind(1)).min(axis=0) + kind(1)
    below, above = (smallest >> mantissa).astype(np.int64), (largest >> mantissa).astype(np.int64)
    is_zero = largest == 0
    return np.where(is_zero, zeros, (below - MAX_EXPONENT >= 1) & (above + MAX_EXPONENT < end))
