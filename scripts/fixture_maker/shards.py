"""Checkpoint folders on disk: streamed and sparse safetensors files, and their index.

The file format is safetensors': 8 bytes little-endian header length, a JSON header padded with spaces to a multiple
of 8, then the tensors without gaps in the header's order of offsets. The library's own order is by descending dtype,
then by name; it is kept here, so that packed words and their scales lie as far apart as in a real shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from scripts.fixture_maker.config import write_json
from scripts.fixture_maker.inventory import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
_DTYPE_ORDER = {"I64": 0, "F32": 1, "I32": 2, "BF16": 3}

Buffers = Iterable[bytes | memoryview]


def shard_name(number: int, total: int) -> str:
    """Return the released checkpoints' form of a shard's name: five digits of six."""
    return f"model-{number:05d}-of-{total:06d}.safetensors"


def fresh_folder(out: Path) -> Path:
    """Create `out`, refusing a folder that already holds something."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise SystemExit(f"{out} is not empty; name a new folder")
    return out


def library_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Sort tensors as safetensors' own writer does."""
    return sorted(specs, key=lambda spec: (_DTYPE_ORDER[spec.dtype], spec.name))


def header_bytes(specs: Iterable[TensorSpec]) -> bytes:
    """Return length prefix and header for tensors laid out in the given order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        end = begin + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_streamed(path: Path, specs: Iterable[TensorSpec], data: Callable[[TensorSpec], Buffers]) -> None:
    """Write a shard whose tensors are asked for one at a time, as pieces that are written and forgotten."""
    ordered = library_order(specs)
    with path.open("wb") as file:
        file.write(header_bytes(ordered))
        for spec in ordered:
            written = sum(file.write(piece) for piece in data(spec))
            if written != spec.num_bytes:
                raise ValueError(f"{spec.name}: {written} bytes given, {spec.num_bytes} declared")


def write_sparse(path: Path, specs: Iterable[TensorSpec], values: dict[str, bytes]) -> None:
    """Write a shard of true size in which only the header and the tensors in `values` take room on disk.

    Those tensors come first in the file, so that they share a few blocks; everything else reads as zeros.
    """
    ordered = library_order(specs)
    ordered.sort(key=lambda spec: spec.name not in values)
    head = header_bytes(ordered)
    with path.open("wb") as file:
        file.write(head)
        for spec in ordered:
            if spec.name in values:
                file.write(values[spec.name])
        file.truncate(len(head) + sum(spec.num_bytes for spec in ordered))


def write_index(folder: Path, shards: dict[str, Iterable[TensorSpec]]) -> None:
    """Write the index for shards given as file name -> tensors; total_size is exact."""
    specs = [(spec, shard) for shard, members in shards.items() for spec in members]
    weight_map = {spec.name: shard for spec, shard in sorted(specs, key=lambda pair: pair[0].name)}
    total = sum(spec.num_bytes for spec, _ in specs)
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
