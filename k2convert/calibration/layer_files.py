"""The layers that rule gptq has converted: what was decided, the quantized weights, and what a shard needs of them.

    codes-003.safetensors        its quantized weights, until every shard that needs them is recorded
        MODULE.packed            U8 [N, K/2]
        MODULE.block_scales      U8 [N, K/16]
        MODULE.global_scale      F32 [1]
    residual-004.safetensors      what the converted model lacks of the hidden states that layer 4 reads

Each is complete or absent, and its blake3 is kept by the work folder (forward/work.py), which checks it.

Smoothing multiplies channel j of the input of gate and up by 2^a_j and divides what reads it. It is exact, or an error
that names the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from k2convert.checkpoint.files import discard_file
from k2convert.checkpoint.header import TensorInfo, encode_header, read_header
from k2convert.checkpoint.names import CALIBRATION_WORK, WORK_FOLDER, WORK_SUFFIX
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.checkpoint.writer import ALIGNMENT, ShardWriter
from k2convert.choices import BLOCK_SIZE
from k2convert.errors import CalibrationError, CheckpointError, FormatError
from k2convert.forward.work import HIDDEN, WorkFolder
from k2convert.models import locate_module
from k2convert.models.names import ColumnScaling, reads_norm
from k2convert.models.projections import Projection
from k2convert.quantize.formats.bf16 import SourceWeight, scale_bits, scale_fp32
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.records.calibration import GptqLayer
from k2convert.records.document import Count, Exponent, parse, plain

RESIDUAL: Final = "residual"
CODES: Final = "codes"

_OPEN_LAYERS: Final = 4
_PACKED = "packed"
_SCALES = "block_scales"
_GLOBAL = "global_scale"
_FP32_BYTES: Final = 4
_REMEDY: Final = "Convert again in a new folder with --set smoothing=false."

Write = Callable[[str, Nvfp4Weight], None]
"""Appends one projection, by the name of its module."""


def conversion_work(destination: Path) -> WorkFolder:
    """Return the work folder of a conversion with a text, DEST/.k2convert/calibration.work."""
    folder = destination / WORK_FOLDER / f"{CALIBRATION_WORK}{WORK_SUFFIX}"
    return WorkFolder(folder, streams=(HIDDEN, RESIDUAL), others=(CODES,))


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Decisions in a layer that is done.

    `tokens` of each routed expert, without the windows that are kept out of the fit, and smoothing `exponents` a of
    each channel, -4..4, are empty if the layer has none. `dropped` windows were not finite in the layers so far.
    """

    dropped: Count
    tokens: tuple[Count, ...] = ()
    exponents: tuple[Exponent, ...] = ()
    gptq: GptqLayer | None = None

    def smoothing(self) -> NDArray[np.int8] | None:
        """Return the exponents int8 [K], None without smoothing."""
        return np.array(self.exponents, dtype=np.int8) if self.exponents else None


def write_layer(work: WorkFolder, layer: int, result: LayerResult) -> None:
    """Declare a layer done, with what was decided."""
    work.finish(layer, plain(result))


def read_layer(work: WorkFolder, layer: int) -> LayerResult:
    """Read what was decided in a layer that is done; raises CheckpointError if its file is damaged."""
    return parse(LayerResult, json.dumps(work.result(layer)), where=f"layer {layer}")


def needed_files(work: WorkFolder, quantized: Collection[int]) -> dict[int, list[Path]]:
    """Return what is needed of the layers that are done besides what was decided: `quantized` weights of some."""
    return {layer: [work.path(CODES, layer)] for layer in range(work.num_finished()) if layer in quantized}


def delete_quantized(work: WorkFolder, layer: int) -> None:
    """Remove a layer's converted experts: every shard has them."""
    discard_file(work.path(CODES, layer))


@contextmanager
def writing_quantized_layers(
    path: Path, shapes: Mapping[str, tuple[int, int]], *, record: Callable[[Path, str], None]
) -> Generator[Write]:
    """Yield a function that appends the projections [N, K] of `shapes`, which must come in this order.

    The file appears at the end of the block. `record` gets its blake3 before that.
    Raises DiskFullError, DestinationWriteError.
    """
    tensors: list[tuple[str, str, tuple[int, ...], int]] = []
    for module, (rows, columns) in shapes.items():
        packed = (rows, columns // 2)
        scales = (rows, columns // BLOCK_SIZE)
        tensors.append((f"{module}.{_PACKED}", "U8", packed, rows * packed[1]))
        tensors.append((f"{module}.{_SCALES}", "U8", scales, rows * scales[1]))
        tensors.append((f"{module}.{_GLOBAL}", "F32", (1,), _FP32_BYTES))
    header = encode_header(tensors, metadata={}, alignment=ALIGNMENT)
    waiting = iter(shapes.items())
    with ShardWriter(path, len(header) + sum(num_bytes for *_, num_bytes in tensors)) as writer:
        writer.write(header)

        def write(module: str, weight: Nvfp4Weight) -> None:
            expected = next(waiting)
            if expected != (module, weight.shape):
                raise ValueError(f"{path}: {module} {weight.shape} is not {expected[0]} {expected[1]}")
            for array in (weight.packed, weight.block_scales, np.array([weight.global_scale], dtype=np.float32)):
                writer.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

        yield write
        writer.commit(accept=partial(record, path))


class Calibration:
    """The layers that are converted so far. Thread-safe; a context manager, which closes files."""

    def __init__(self, work: WorkFolder) -> None:
        self._work = work
        self._decided = lru_cache(_OPEN_LAYERS)(partial(read_layer, work))
        self._open: dict[int, tuple[Mapping[str, TensorInfo], ShardReader]] = {}
        self._lock = Lock()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are done."""
        return tuple(range(self._work.num_finished()))

    def exponents(self, layer: int) -> NDArray[np.int8] | None:
        """Return the smoothing exponents int8 [K] of a layer that is done, None without; raises CheckpointError."""
        return self._decided(layer).smoothing()

    def converted(self, module: str) -> Nvfp4Weight:
        """Return the quantized weight of a module; raises CheckpointError if its layer is not there or damaged."""
        module_place = locate_module(module)
        assert module_place is not None
        assert module_place.layer is not None
        path = self._work.path(CODES, module_place.layer)
        with self._lock:
            if module_place.layer not in self._open:
                self._work.check(path)
                self._open[module_place.layer] = (read_header(path).tensors, ShardReader(lambda _: path))
            tensors, reader = self._open[module_place.layer]
        packed, scales, scalar = (tensors.get(f"{module}.{name}") for name in (_PACKED, _SCALES, _GLOBAL))
        if packed is None or scales is None or scalar is None:
            raise CheckpointError(f"{path}: has no codes of {module}. Delete the file and repeat the command.")
        return Nvfp4Weight(
            reader.read(packed).reshape(packed.shape),
            reader.read(scales).reshape(scales.shape),
            float(reader.read(scalar).view(np.float32)[0]),
        )

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
        module_place = locate_module(projection.module)
        assert module_place is not None
        assert module_place.layer is not None
        exponents = self.exponents(module_place.layer) if reads_norm(module_place) else None
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

    def delete(self, layer: int) -> None:
        """Close and remove a layer's quantized weights. No shard may need them any more."""
        with self._lock:
            if layer in self._open:
                self._open.pop(layer)[1].close()
        delete_quantized(self._work, layer)

    def __enter__(self) -> Calibration:
        return self

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            for _tensors, reader in self._open.values():
                reader.close()
            self._open.clear()


@contextmanager
def _exactly() -> Generator[None]:
    try:
        yield
    except FormatError as error:
        raise CalibrationError(f"{error} {_REMEDY}") from None


def digest_of_exponents(exponents: Mapping[int, NDArray[np.int8]]) -> str | None:
    """Return the blake3 of the smoothing exponents int8 [K] by layer, in order, without layers of zeros, or None."""
    digest = blake3()
    is_scaled = False
    for layer, values in sorted(exponents.items()):
        if values.any():
            digest.update(f"{layer}\0".encode() + values.astype(np.int8).tobytes())
            is_scaled = True
    return digest.hexdigest() if is_scaled else None
