"""The files of a walk's layers: statistics, and with a conversion what was decided and the converted experts.

    layer-003.safetensors        the statistics of layer 3: the claim that it is done
    gptq-003.json            what was decided in layer 3 (records/calibration.py), if it has experts
    codes-003.safetensors        its converted experts, until every shard that needs them is recorded
        MODULE.packed            U8 [N, K/2]
        MODULE.block_scales      U8 [N, K/16]
        MODULE.global_scale      F32 [1]
    missing-004.safetensors      what the converted model lacks of the hidden states that layer 4 reads

Each is complete or absent, and its blake3 is kept by the work folder (forward/work.py), which checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np

from k2convert.calibration.statistics import (
    LayerStatistics,
    Statistics,
    StatisticsHeader,
    encode_statistics,
    open_statistics,
    write_statistics,
)
from k2convert.checkpoint.header import TensorInfo, encode_header, read_header
from k2convert.checkpoint.names import WALK_NAME, WORK_FOLDER, WORK_SUFFIX
from k2convert.checkpoint.reader import ShardReader
from k2convert.checkpoint.writer import ALIGNMENT, ShardWriter
from k2convert.choices import BLOCK_SIZE
from k2convert.errors import CheckpointError
from k2convert.forward.work import CLAIM, HIDDEN, WorkFolder
from k2convert.models import locate_module
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.records.calibration import GptqLayer
from k2convert.records.document import read_document

MISSING: Final = "missing"
CODES: Final = "codes"
GPTQ: Final = "gptq.json"

_OPEN_LAYERS: Final = 4
_PACKED = "packed"
_SCALES = "block_scales"
_GLOBAL = "global_scale"
_FP32_BYTES: Final = 4

Write = Callable[[str, Nvfp4Weight], None]
"""Appends one projection, by the name of its module."""


def statistics_work(statistics: Path) -> WorkFolder:
    """Return the work folder of a statistics file, NAME.work next to the file NAME."""
    return WorkFolder(statistics.with_name(statistics.name + WORK_SUFFIX))


def conversion_work(destination: Path) -> WorkFolder:
    """Return the work folder of a conversion with a text, DEST/.k2convert/calibration.work."""
    folder = destination / WORK_FOLDER / f"{WALK_NAME}{WORK_SUFFIX}"
    return WorkFolder(folder, streams=(HIDDEN, MISSING), others=(GPTQ, CODES))


def write_layer(work: WorkFolder, layer: LayerStatistics, header: StatisticsHeader) -> None:
    """Declare a layer done, by writing its statistics."""
    work.write(work.path(CLAIM, layer.layer), encode_statistics([layer], header))


def read_layer(work: WorkFolder, layer: int) -> Statistics:
    """Open the statistics of a layer that is done; raises CheckpointError if they are damaged."""
    path = work.path(CLAIM, layer)
    work.check(path)
    return open_statistics(path)


def gather_statistics(work: WorkFolder, path: Path, header: StatisticsHeader, *, num_layers: int) -> StatisticsHeader:
    """Write the statistics file from those of the layers; returns its header.

    `header` has no dropped windows yet. Raises CheckpointError if the file of a layer is damaged.
    """
    found = [read_layer(work, layer) for layer in range(num_layers)]
    header = replace(header, dropped=found[-1].dropped if found else 0)
    write_statistics(path, [statistics.layer(number) for number, statistics in enumerate(found)], header)
    return header


def needed_files(work: WorkFolder, codes: Collection[int]) -> dict[int, list[Path]]:
    """Return what is needed of each layer besides its statistics: what was decided, and `codes` of some layers."""
    job = work.job()
    written = {} if job is None else job.files
    paths: dict[int, list[Path]] = {}
    for layer in range(work.num_finished()):
        decided = work.path(GPTQ, layer)
        paths[layer] = [decided] if decided.name in written else []
        if layer in codes:
            paths[layer].append(work.path(CODES, layer))
    return paths


def read_gptq(work: WorkFolder, layer: int) -> GptqLayer:
    """Return what was decided in a layer that has experts; raises CheckpointError if it is damaged."""
    path = work.path(GPTQ, layer)
    work.check(path)
    return read_document(GptqLayer, path)


def drop_quantized(work: WorkFolder, layer: int) -> None:
    """Remove a layer's converted experts: every shard has them."""
    work.remove_file(work.path(CODES, layer))


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


class LayerFiles:
    """Statistics of the layers that are done so far, as calibration.channels.Calibration reads them. Thread-safe."""

    def __init__(self, work: WorkFolder) -> None:
        self._work = work
        self._open = lru_cache(_OPEN_LAYERS)(partial(read_layer, work))

    @property
    def path(self) -> Path:
        """Where the files are, for messages."""
        return self._work.folder

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are done."""
        return tuple(range(self._work.num_finished()))

    @property
    def tokens(self) -> int:
        """The tokens of all windows."""
        return self._open(0).tokens

    def layer(self, number: int) -> LayerStatistics:
        """Return the statistics of a layer that is done; raises CheckpointError."""
        return self._open(number).layer(number)


class QuantizedLayers:
    """The converted experts of the layers that are done so far. Thread-safe; a context manager, which closes files."""

    def __init__(self, work: WorkFolder) -> None:
        self._work = work
        self._open: dict[int, tuple[Mapping[str, TensorInfo], ShardReader]] = {}
        self._lock = Lock()

    def read(self, module: str) -> Nvfp4Weight:
        """Return a converted projection; raises CheckpointError if its layer is not there or damaged."""
        place = locate_module(module)
        assert place is not None
        assert place.layer is not None
        path = self._work.path(CODES, place.layer)
        with self._lock:
            if place.layer not in self._open:
                self._work.check(path)
                self._open[place.layer] = (read_header(path).tensors, ShardReader(lambda _: path))
            tensors, reader = self._open[place.layer]
        packed, scales, scalar = (tensors.get(f"{module}.{name}") for name in (_PACKED, _SCALES, _GLOBAL))
        if packed is None or scales is None or scalar is None:
            raise CheckpointError(f"{path}: has no codes of {module}. Delete the file and repeat the command.")
        return Nvfp4Weight(
            reader.read(packed).reshape(packed.shape),
            reader.read(scales).reshape(scales.shape),
            float(reader.read(scalar).view(np.float32)[0]),
        )

    def drop(self, layer: int) -> None:
        """Close and remove a layer's codes. No shard may need them any more."""
        with self._lock:
            if layer in self._open:
                self._open.pop(layer)[1].close()
        drop_quantized(self._work, layer)

    def __enter__(self) -> QuantizedLayers:
        return self

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            for _tensors, reader in self._open.values():
                reader.close()
            self._open.clear()
