"""The statistics file: safetensors with the arrays of every decoder layer, and where they come from as metadata.

A layer's tensors are named `layers.N.` and these names. K hidden columns, E routed experts, I their width, S the width
of the shared experts:

    gate_up.mean_square       f32 [K]     of the MLP's input, over all tokens of the layer
    gate_up.amax              f32 [1]     its largest magnitude
    down.mean_square          f32 [E, I]  of each expert's inner activations times the router's weight p, over the
                                          tokens routed to it; 0 without tokens
    down.amax                 f32 [E]     the largest magnitude of the inner activations, without p
    shared_down.mean_square   f32 [S]     of the shared experts' inner activations; only if there are shared experts
    shared_down.amax          f32 [1]
    tokens                    i64 [E]     routed to each expert
    saliency                  f32 [E]     mean of p * ||f(x)|| over the routed tokens, f the expert (REAP); 0 without
    router_weight             f32 [E]     mean of p over all tokens of the layer, 0 for a token that is not routed there
    kv.amax                   f32 [2]     the largest magnitude in a KV cache: MLA's latent and rotary key, or keys and
                                          values; absent in older files, like the next three
    kv.subnormal_share        f32 [2]     of the same values: those that are not 0 but below E4M3's normal range, 2^-6
    kv.saturated_share        f32 [2]     those above E4M3's largest number, 448
    imatrix                   u8 [2]      1 if the mean squares of the input of gate and up, and of down in the routed
                                          experts, gained on tokens that were kept out (smoothing.py); 0 if they are
                                          not to be used
    smoothing_exponents       i8 [K]      a, -4..4: the norm's weight times 2^a, its consumers over 2^a

Mean squares are weighted: a token's weight is 1 / ||h||^2 of the layer's output h, with mean 1 over all tokens of the
layer. Saliency, as REAP defines it, is not. A dense MLP is one expert that gets every token with p = 1.

Metadata, all strings:

    format, version   what the file is
    about             JSON: the header (StatisticsHeader), and layer -> blake3 of the bytes of its
                      post_attention_layernorm.weight (norms)
    blake3            of everything else in the file: its header without this entry, with the other entries in the order
                      of their names, and the bytes of the tensors

The file is shareable: a conversion needs it, the source and no text, no torch and no GPU.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from k2convert.checkpoint.files import pieces, write_atomically
from k2convert.checkpoint.header import ShardHeader, TensorInfo, encode_header, read_header
from k2convert.choices import BLOCK_SIZE, IMATRIX_PARTS, ImatrixPart
from k2convert.errors import CalibrationError, MalformedFileError, SourceReadError, quoted, shortened
from k2convert.records.document import Count, Digest, LayerNumber, parse, plain

MAX_EXPONENT: Final = 4
"""Norm exponents are in -4..4."""

_KV: Final = ("kv.amax", "kv.subnormal_share", "kv.saturated_share")

TENSORS: Final[dict[str, tuple[str, type[np.generic], int]]] = {
    "tokens": ("tokens", np.int64, 1),
    "gate_up_mean_square": ("gate_up.mean_square", np.float32, 1),
    "gate_up_amax": ("gate_up.amax", np.float32, 1),
    "down_mean_square": ("down.mean_square", np.float32, 2),
    "down_amax": ("down.amax", np.float32, 1),
    "shared_down_mean_square": ("shared_down.mean_square", np.float32, 1),
    "shared_down_amax": ("shared_down.amax", np.float32, 1),
    "saliency": ("saliency", np.float32, 1),
    "router_weight": ("router_weight", np.float32, 1),
    "smoothing_exponents": ("smoothing_exponents", np.int8, 1),
    "kv_amax": ("kv.amax", np.float32, 1),
    "kv_subnormal_share": ("kv.subnormal_share", np.float32, 1),
    "kv_saturated_share": ("kv.saturated_share", np.float32, 1),
    "imatrix": ("imatrix", np.uint8, 1),
}
"""Field -> (name in the file, dtype, rank), in the order of the file."""

OPTIONAL: Final = ("shared_down.mean_square", "shared_down.amax", *_KV, "imatrix")
"""Tensors that a layer may lack."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerStatistics:
    """The statistics of one layer. CalibrationError if an array is not what the table above says.

    `norm_digest` is the blake3 of the bytes of the source's post_attention_layernorm.weight.
    """

    layer: int
    norm_digest: str
    gate_up_mean_square: NDArray[np.float32]
    gate_up_amax: NDArray[np.float32]
    down_mean_square: NDArray[np.float32]
    down_amax: NDArray[np.float32]
    tokens: NDArray[np.int64]
    saliency: NDArray[np.float32]
    router_weight: NDArray[np.float32]
    smoothing_exponents: NDArray[np.int8]
    shared_down_mean_square: NDArray[np.float32] | None = None
    shared_down_amax: NDArray[np.float32] | None = None
    kv_amax: NDArray[np.float32] | None = None
    kv_subnormal_share: NDArray[np.float32] | None = None
    kv_saturated_share: NDArray[np.float32] | None = None
    imatrix: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        if problem := _problem(self):
            raise CalibrationError(f"layer {self.layer}: {problem}")

    @property
    def num_experts(self) -> int:
        """E; 1 for a dense MLP."""
        return self.tokens.size

    @property
    def is_dense(self) -> bool:
        """Return whether the MLP is dense: one expert, no shared ones."""
        return self.num_experts == 1 and self.shared_down_mean_square is None

    @property
    def without_imatrix(self) -> tuple[ImatrixPart, ...]:
        """The projections in which the mean squares gained nothing: gate and up, or down of the routed experts."""
        gains = (1, 1) if self.imatrix is None else self.imatrix
        return tuple(part for part, gain in zip(IMATRIX_PARTS, gains, strict=True) if not gain)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by their names in the file (without the layer), in the order of the file."""
        found = {name: getattr(self, field) for field, (name, _, _) in TENSORS.items()}
        return {name: array for name, array in found.items() if array is not None}


def _problem(layer: LayerStatistics) -> str | None:
    for field, (name, dtype, rank) in TENSORS.items():
        array: NDArray[Any] | None = getattr(layer, field)
        if array is None:
            continue
        if array.dtype != dtype or array.ndim != rank:
            return f"{name} is {array.dtype} {list(array.shape)}"
        if not np.isfinite(array).all():
            return f"{name} holds NaN or infinity"
        if field != "smoothing_exponents" and (array < 0).any():
            return f"{name} holds negative numbers"
    if (np.abs(layer.smoothing_exponents.astype(np.int16)) > MAX_EXPONENT).any():
        return f"smoothing_exponents has values outside -{MAX_EXPONENT}..{MAX_EXPONENT}"
    if layer.imatrix is not None and (layer.imatrix > 1).any():
        return "imatrix has values other than 0 and 1"
    return _shape_problem(layer)


def _shape_problem(layer: LayerStatistics) -> str | None:
    arrays = layer.arrays()
    experts = layer.down_mean_square.shape[0]
    if (layer.shared_down_mean_square is None) != (layer.shared_down_amax is None):
        return "has one of shared_down.mean_square and shared_down.amax"
    columns = {name: array.shape[-1] for name, array in arrays.items() if name.endswith(".mean_square")}
    for name, size in columns.items():
        if size == 0 or size % BLOCK_SIZE:
            return f"{name} has {size} columns, which is not a multiple of {BLOCK_SIZE}"
    sizes = {
        "smoothing_exponents": layer.gate_up_mean_square.size,
        "gate_up.amax": 1,
        **dict.fromkeys(("down.amax", "tokens", "saliency", "router_weight"), experts),
        "shared_down.amax": 1,
        **dict.fromkeys((*_KV, "imatrix"), 2),
    }
    for name, expected in sizes.items():
        if name in arrays and arrays[name].size != expected:
            return f"{name} has {arrays[name].size} values, expected {expected}"
    if layer.is_dense and layer.smoothing_exponents.any():
        return "is dense, but smoothing_exponents are not zero"
    return "has no experts" if experts == 0 else None


FORMAT: Final = "k2convert statistics"
FORMAT_VERSION: Final = "4"
READ_VERSIONS: Final = ("3", FORMAT_VERSION)
"""Version 3 has no kept experts, nothing of a KV cache, and no choice of imatrix."""
REMEDY: Final = "Make it again with `k2convert calibrate`, or get the file again."

_CHECKSUM: Final = "blake3"
_ALIGNMENT: Final = 8
_CACHED_LAYERS: Final = 8  # 3.2 MB each for K2
_DTYPES: Final[dict[str, type[np.generic]]] = {"F32": np.float32, "I64": np.int64, "I8": np.int8, "U8": np.uint8}
_DTYPE_NAMES: Final = {np.dtype(kind): name for name, kind in _DTYPES.items()}
_TENSOR: Final = re.compile(r"layers\.(0|[1-9][0-9]{0,5})\.([a-z_.]+)")
_REQUIRED: Final = {name for name, _, _ in TENSORS.values()}.difference(OPTIONAL)


@dataclass(frozen=True, slots=True)
class StatisticsHeader:
    """Where statistics come from. `texts` are (name, blake3); `tokens` were used, `dropped` windows were not finite."""

    source_headers: Digest
    texts: tuple[tuple[str, Digest], ...]
    tokens: Count
    window: Count
    windows: Count
    dropped: Count
    seed: Count
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class _About:
    header: StatisticsHeader
    norms: dict[LayerNumber, Digest]


class Statistics:
    """An open statistics file. Layers are read and checked when they are asked for; any thread may ask.

    `digest` is the blake3 of the file, `layers` the numbers of its layers in order. `origin` is its address, if it came
    from the Hub. The rest is StatisticsHeader's.
    """

    def __init__(
        self,
        path: Path,
        digest: str,
        about: _About,
        shard: ShardHeader,
        identity: tuple[int, ...],
    ) -> None:
        header = about.header
        self.path = path
        self.digest = digest
        self.origin: str | None = None
        self.source_headers = header.source_headers
        self.texts = header.texts
        self.tokens = header.tokens
        self.window = header.window
        self.windows = header.windows
        self.dropped = header.dropped
        self.seed = header.seed
        self.versions = header.versions
        self.layers = tuple(sorted(about.norms))
        self._about = about
        self._shard = shard
        self._identity = identity
        self._read_once = lru_cache(_CACHED_LAYERS)(self._read)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.digest)

    def layer(self, number: int) -> LayerStatistics:
        """Return one layer; CalibrationError if the file does not have it or its values cannot be used."""
        if number not in self._about.norms:
            raise CalibrationError(
                f"{self.path}: has no layer {number}: these statistics are of a different model. "
                "Make them for this source with `k2convert calibrate`."
            )
        return self._read_once(number)

    def _read(self, number: int) -> LayerStatistics:
        stem = f"layers.{number}."
        found = {field: self._shard.tensors.get(stem + name) for field, (name, _, _) in TENSORS.items()}
        try:
            with self.path.open("rb") as file:
                if _identity(os.fstat(file.fileno())) != self._identity:
                    raise ValueError
                arrays = {field: _read_array(file, tensor) for field, tensor in found.items() if tensor}
        except OSError as error:
            raise SourceReadError(f"{self.path}: cannot be read ({error.strerror}). Check the disk.") from None
        except ValueError:
            raise CalibrationError(f"{self.path}: changed while it was used. {REMEDY}") from None
        try:
            return LayerStatistics(number, self._about.norms[number], **arrays)
        except CalibrationError as error:
            raise CalibrationError(f"{self.path}: {error}. {REMEDY}") from None


def _read_array(file: BinaryIO, tensor: TensorInfo) -> NDArray[Any]:
    """Read one tensor; ValueError if the file ends in it."""
    file.seek(tensor.begin)
    return np.frombuffer(file.read(tensor.num_bytes), dtype=_DTYPES[tensor.dtype]).reshape(tensor.shape)


def write_statistics(path: Path, layers: Sequence[LayerStatistics], header: StatisticsHeader) -> None:
    """Write a statistics file atomically; raises DiskFullError, DestinationWriteError."""
    write_atomically(path, encode_statistics(layers, header))


def encode_statistics(layers: Sequence[LayerStatistics], header: StatisticsHeader) -> bytes:
    """Return the bytes of a statistics file. The same layers and header give the same bytes."""
    arrays = {
        f"layers.{layer.layer}.{name}": np.ascontiguousarray(array)
        for layer in sorted(layers, key=lambda layer: layer.layer)
        for name, array in layer.arrays().items()
    }
    tensors = [(name, _DTYPE_NAMES[array.dtype], array.shape, array.nbytes) for name, array in arrays.items()]
    norms = {layer.layer: layer.norm_digest for layer in sorted(layers, key=lambda layer: layer.layer)}
    about = json.dumps(plain(_About(header, norms)))
    metadata = {"format": FORMAT, "version": FORMAT_VERSION, "about": about}
    data = [array.reshape(-1).view(np.uint8).data for array in arrays.values()]
    checksum = _begin_checksum(tensors, metadata)
    for piece in data:
        checksum.update(piece)
    metadata[_CHECKSUM] = checksum.hexdigest()
    return b"".join([encode_header(tensors, metadata=metadata, alignment=_ALIGNMENT), *data])


def open_statistics(path: Path) -> Statistics:
    """Open a statistics file and check everything but the values; CalibrationError, SourceReadError."""
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no such file"
        raise CalibrationError(f"{path}: {kind}. Pass a statistics file, which `k2convert calibrate` makes.")
    try:
        identity = _identity(path.stat())
        shard = read_header(path)
    except MalformedFileError as error:
        raise CalibrationError(f"{error} This is not a complete statistics file. {REMEDY}") from None
    stated = shard.metadata
    if stated.get("format") != FORMAT:
        raise CalibrationError(f"{path}: not a statistics file. Pass a file that `k2convert calibrate` made.")
    if stated.get("version") not in READ_VERSIONS:
        raise CalibrationError(
            f"{path}: its format has version {quoted(stated.get('version'))}, but this k2convert reads versions "
            f"{' and '.join(READ_VERSIONS)}. Use the k2convert that made it, or collect them again with "
            "`k2convert calibrate`."
        )
    try:
        about = parse(_About, stated.get("about", ""), where=f"{path}: its metadata")
        _check_tensors(shard, about.norms)
    except MalformedFileError as error:
        raise CalibrationError(f"{error} {REMEDY}") from None
    except ValueError as error:
        raise CalibrationError(f"{path}: {error}. {REMEDY}") from None
    digest, checksum = _read_digests(path, shard)
    if stated.get(_CHECKSUM) != checksum:
        raise CalibrationError(f"{path}: damaged: its checksum is wrong. {REMEDY}")
    return Statistics(path, digest, about, shard, identity)


def _read_digests(path: Path, shard: ShardHeader) -> tuple[str, str]:
    """Return the blake3 of a file, and that which it should state of everything else in it."""
    tensors = [(info.name, info.dtype, info.shape, info.num_bytes) for info in shard.tensors.values()]
    checksum = _begin_checksum(tensors, shard.metadata)
    digest = blake3()
    position = 0
    for piece in pieces(path):
        digest.update(piece)
        checksum.update(memoryview(piece)[max(shard.data_begin - position, 0) :])
        position += len(piece)
    return digest.hexdigest(), checksum.hexdigest()


def _begin_checksum(tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> blake3:
    """Return the checksum of a header, to which the bytes of the tensors are to be added."""
    others = {key: value for key, value in sorted(metadata.items()) if key != _CHECKSUM}
    return blake3(encode_header(tensors, metadata=others, alignment=_ALIGNMENT))


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Return what changes if a file is replaced or written to."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def _reopen(path: Path, digest: str) -> Statistics:
    found = open_statistics(path)
    if found.digest != digest:
        raise CalibrationError(f"{path}: changed while it was used. {REMEDY}")
    return found


def _check_tensors(shard: ShardHeader, norms: Mapping[int, str]) -> None:
    """Check the names and dtypes of all tensors; ValueError names what is wrong."""
    found: dict[int, set[str]] = {layer: set() for layer in norms}
    dtypes = {name: _DTYPE_NAMES[np.dtype(kind)] for name, kind, _ in TENSORS.values()}
    for tensor in shard.tensors.values():
        match = _TENSOR.fullmatch(tensor.name)
        if match is None or dtypes.get(match[2]) != tensor.dtype or int(match[1]) not in found:
            raise ValueError(
                f"has the tensor {shortened(tensor.name)} ({tensor.dtype}), which k2convert does not write"
            )
        found[int(match[1])].add(match[2])
    for layer, names in found.items():
        if missing := _REQUIRED - names:
            raise ValueError(f"layer {layer} has no {min(missing)}")
    if not found:
        raise ValueError("has no layers")
