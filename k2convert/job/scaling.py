"""What the statistics change in one tensor: the importance of its columns, smoothing, and codes of a walk.

Smoothing is exact, or an error that names the tensor.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from k2convert.checkpoint.header import DTYPE_BYTES, TensorInfo
from k2convert.checkpoint.reader import Bytes
from k2convert.errors import CalibrationError, FormatError
from k2convert.models import locate_module
from k2convert.models.names import ColumnScaling, ModulePlace, reads_norm
from k2convert.models.projections import Projection
from k2convert.quantize.formats.channels import divide_columns, scale_bits, scale_fp32
from k2convert.quantize.formats.int4 import SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight

if TYPE_CHECKING:
    from k2convert.calibrate.channels import Calibration

_REMEDY: Final = "Make the statistics again with `k2convert calibrate`, or convert with --set smoothing=false."


def projection_importance(projection: Projection, calibration: "Calibration | None") -> NDArray[np.uint8] | None:
    """Return the importance uint8 [K] of a projection's columns, None if the rule does not weigh them."""
    return None if calibration is None else calibration.importance(_place(projection))


def projection_exponents(projection: Projection, calibration: "Calibration | None") -> NDArray[np.int8] | None:
    """Return the exponents int8 [K] by which smoothing divides a projection's columns, None if it does not."""
    if calibration is None:
        return None
    place = _place(projection)
    assert place.layer is not None
    return calibration.exponents(place.layer) if reads_norm(place) else None


def _place(projection: Projection) -> ModulePlace:
    place = locate_module(projection.module)
    assert place is not None
    return place


def projection_codes(
    projection: Projection, calibration: "Calibration | None", *, shape: tuple[int, int], global_scale: float
) -> Nvfp4Weight | None:
    """Return what the walk through the layers made of a projection [N, K], None for those that no walk converts.

    Raises CalibrationError if it is not of this weight: `global_scale` is what the rule gives.
    """
    codes = None if calibration is None else calibration.converted(projection.module)
    if codes is not None and (codes.shape, codes.global_scale) != (shape, global_scale):
        raise CalibrationError(
            f"{projection.where}: the walk's codes are {list(codes.shape)} with global scale {codes.global_scale!r}, "
            f"but the source needs {list(shape)} with {global_scale!r}. The source changed: start again in a different "
            "folder."
        )
    return codes


def divided_weight(weight: SourceWeight, projection: Projection, exponents: NDArray[np.int8]) -> SourceWeight:
    """Return a projection's weight [N, K] with its columns divided by 2^a, int8 [K]; raises CalibrationError."""
    with _exactly():
        return divide_columns(weight, exponents, name=projection.where)


def scaled_copy(data: Bytes, tensor: TensorInfo, scaling: ColumnScaling, exponents: NDArray[np.int8]) -> Bytes:
    """Return whole rows of a BF16 or FP32 tensor [.., K] with scaled columns; raises CalibrationError."""
    steps, name = -exponents if scaling.is_divided else exponents, f"{tensor.shard}: {tensor.name}"
    with _exactly():
        if tensor.dtype == "BF16":
            bits = data.view(np.uint16).reshape(-1, exponents.size)
            return scale_bits(bits, steps, name=name).reshape(-1).view(np.uint8)
        values = data.view(np.float32).reshape(-1, exponents.size)
        return scale_fp32(values, steps, name=name).reshape(-1).view(np.uint8)


def row_bytes(tensor: TensorInfo) -> int:
    """Return the bytes of one row of a tensor, so that it can be scaled in parts."""
    return tensor.shape[-1] * DTYPE_BYTES[tensor.dtype]


@contextmanager
def _exactly() -> Generator[None]:
    try:
        yield
    except FormatError as error:
        raise CalibrationError(f"{error} {_REMEDY}") from None
