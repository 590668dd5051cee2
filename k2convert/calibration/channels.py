"""What a shard needs of the layers that rule gptq has converted: quantized weights, and the exponents of smoothing.

Smoothing multiplies channel j of the input of gate and up by 2^a_j and divides what reads it. It is exact, or an error
that names the tensor.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.reader import Bytes
from k2convert.errors import CalibrationError, FormatError
from k2convert.models import locate_module
from k2convert.models.names import ColumnScaling, reads_norm
from k2convert.models.projections import Projection
from k2convert.quantize.formats.bf16 import SourceWeight, scale_bits, scale_fp32
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight

if TYPE_CHECKING:
    from k2convert.calibration.layer_files import LayerFiles, QuantizedLayers

_REMEDY: Final = "Convert again in a new folder with --set smoothing=false."


@dataclass(frozen=True, slots=True)
class Calibration:
    """The layers that are done so far. Threads may share it."""

    files: LayerFiles
    quantized: QuantizedLayers

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are done."""
        return self.files.layers

    def converted(self, module: str) -> Nvfp4Weight:
        """Return the quantized weight of a module."""
        return self.quantized.read(module)

    def exponents(self, layer: int) -> NDArray[np.int8] | None:
        """Return the smoothing exponents int8 [K] of a layer, None if it is not scaled."""
        return self.files.exponents(layer)

    def quantized_weight(self, projection: Projection, *, shape: tuple[int, int], global_scale: float) -> Nvfp4Weight:
        """Return the quantized weight of a projection [N, K].

        Raises CalibrationError if it is not of this weight: `global_scale` is what the rule gives.
        """
        weight = self.converted(projection.module)
        if (weight.shape, weight.global_scale) != (shape, global_scale):
            raise CalibrationError(
                f"{projection.where}: the quantized weight is {list(weight.shape)} with global scale "
                f"{weight.global_scale!r}, but the source needs {list(shape)} with {global_scale!r}. The source "
                "changed: start again in a different folder."
            )
        return weight

    def scaled_weight(self, weight: SourceWeight, projection: Projection) -> SourceWeight:
        """Return a projection's weight [N, K] with the columns that smoothing divides; raises CalibrationError."""
        place = locate_module(projection.module)
        assert place is not None
        assert place.layer is not None
        exponents = self.exponents(place.layer) if reads_norm(place) else None
        if exponents is None:
            return weight
        with _exactly():
            return weight.divide_columns(exponents, name=projection.where)

    def scaled_copy(self, data: Bytes, tensor: TensorInfo, scaling: ColumnScaling) -> Bytes:
        """Return whole rows of a BF16 or FP32 tensor [.., K] with scaled columns; raises CalibrationError."""
        exponents = self.exponents(scaling.layer)
        if exponents is None:
            return data
        steps = -exponents if scaling.is_divided else exponents
        name = f"{tensor.shard}: {tensor.name}"
        with _exactly():
            if tensor.dtype == "BF16":
                bits = data.view(np.uint16).reshape(-1, exponents.size)
                return scale_bits(bits, steps, name=name).reshape(-1).view(np.uint8)
            values = data.view(np.float32).reshape(-1, exponents.size)
            return scale_fp32(values, steps, name=name).reshape(-1).view(np.uint8)


def digest_of_exponents(exponents: Mapping[int, NDArray[np.int8]]) -> str | None:
    """Return the blake3 of the smoothing exponents int8 [K] by layer, in order, without layers of zeros, or None."""
    digest = blake3()
    is_scaled = False
    for layer, values in sorted(exponents.items()):
        if values.any():
            digest.update(f"{layer}\0".encode() + values.astype(np.int8).tobytes())
            is_scaled = True
    return digest.hexdigest() if is_scaled else None


@contextmanager
def _exactly() -> Generator[None]:
    try:
        yield
    except FormatError as error:
        raise CalibrationError(f"{error} {_REMEDY}") from None
