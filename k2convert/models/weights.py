"""One projection of a source as arrays, with the checks that need its bytes."""

from typing import Protocol

import numpy as np

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.reader import Bytes
from k2convert.choices import GROUP_SIZE
from k2convert.errors import FormatError, MalformedFileError
from k2convert.models.projections import Projection
from k2convert.quantize.formats.bf16 import Bf16Weight
from k2convert.quantize.formats.int4 import FIRST_UNUSABLE_BITS, Int4Weight, SourceWeight, check_int4_scales


class TensorSource(Protocol):
    """The source of a tensor's bytes: a ShardReader, or bytes that were read before."""

    def read(self, tensor: TensorInfo) -> Bytes:
        """Return all bytes of a tensor; raises SourceReadError if reading fails."""
        ...


def load_projection(reader: TensorSource, projection: Projection) -> SourceWeight:
    """Read one projection; raises MalformedFileError for a wrong weight_shape and for invalid scales."""
    rows, columns = projection.num_rows, projection.num_columns
    if projection.weight is not None:
        return Bf16Weight(reader.read(projection.weight).view(np.uint16).reshape(rows, columns))
    packed, scale, shape = projection.packed, projection.scale, projection.shape
    assert packed is not None
    assert scale is not None
    assert shape is not None
    stored = np.frombuffer(reader.read(shape), dtype="<i4" if shape.dtype == "I32" else "<i8").tolist()
    if stored != [rows, columns]:
        raise MalformedFileError(
            f"{shape.shard}: {shape.name} is {stored}, but {packed.name} has the shape {[rows, columns]}."
        )
    weight = Int4Weight(
        packed=reader.read(packed).reshape(rows, columns // 2),
        scale_bits=reader.read(scale).view(np.uint16).reshape(rows, columns // GROUP_SIZE),
    )
    if weight.scale_bits.max(initial=0) >= FIRST_UNUSABLE_BITS:
        try:
            check_int4_scales(weight.scale_bits, name=f"{scale.shard}: {scale.name}")
        except FormatError as error:
            raise MalformedFileError(str(error)) from None
    return weight
