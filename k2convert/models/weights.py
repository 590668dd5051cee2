"""Source weights as arrays: one projection at a time, checked as far as its bytes can be."""

from typing import Protocol

import numpy as np

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.reader import Bytes
from k2convert.errors import CheckpointError, FormatError
from k2convert.models.projections import Projection
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.int4 import FIRST_UNUSABLE_BITS, Int4Weight, SourceWeight, check_int4_scales


class TensorSource(Protocol):
    """Where a tensor's bytes come from: a ShardReader, or what one has read before."""

    def read(self, tensor: TensorInfo) -> Bytes:
        """All bytes of a tensor; SourceReadError where they cannot be had."""
        ...


def load_projection(reader: TensorSource, projection: Projection) -> SourceWeight:
    """Read one projection. Refuses a weight_shape that disagrees and senseless scales."""
    rows, columns = projection.num_rows, projection.num_columns
    if projection.weight is not None:
        return Bf16Weight(reader.read(projection.weight).view(np.uint16).reshape(rows, columns))
    packed, scale, shape = projection.packed, projection.scale, projection.shape
    assert packed is not None
    assert scale is not None
    assert shape is not None
    stored = np.frombuffer(reader.read(shape), dtype="<i4" if shape.dtype == "I32" else "<i8").tolist()
    if stored != [rows, columns]:
        raise CheckpointError(
            f"{shape.shard}: {shape.name}: says {stored}, but {packed.name} holds {[rows, columns]}. "
            "Download the shard again."
        )
    weight = Int4Weight(
        packed=reader.read(packed).reshape(rows, columns // 2),
        scale_bits=reader.read(scale).view(np.uint16).reshape(rows, columns // 32),
    )
    if weight.scale_bits.max(initial=0) >= FIRST_UNUSABLE_BITS:
        try:
            check_int4_scales(weight.scale_bits, name=f"{scale.shard}: {scale.name}")
        except FormatError as error:
            raise CheckpointError(f"{error} Download the shard again.") from None
    return weight
