"""Checkpoint folders on disk: streamed and sparse safetensors files, and their index.

The files are safetensors: 8 bytes of little-endian header length, a JSON header padded with spaces to a multiple of 8,
then the tensors without gaps, in the order of their offsets. The order is the library's, by descending dtype and then
by name, so packed words and their scales are as far apart as in a real shard.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scripts.fixture_maker.config import write_json, write_sidecars
from scripts.fixture_maker.inventory import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
_DTYPE_ORDER = {"I64": 0, "F32": 1, "I32": 2, "BF16": 3, "F8_E4M3": 4, "U8": 5}

Buffers = Iterable[bytes | memoryview]


def shard_name(number: int, total: int) -> str:
    """Return a shard's name in the released form: a number of five digits, a total of six."""
    return f"model-{number:05d}-of-{total:06d}.safetensors"


def fresh_folder(out: Path) -> None:
    """Create `out`; raise SystemExit if it already holds something."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise SystemExit(f"{out} is not empty. Name a new folder.")


def library_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Sort tensors in the order of safetensors' writer."""
    return sorted(specs, key=lambda spec: (_DTYPE_ORDER[spec.dtype], spec.name))


def header_bytes(specs: Iterable[TensorSpec]) -> bytes:
    """Return the length prefix and the header for tensors in the given order."""
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
    """Write a shard piece by piece; `data` yields the pieces of one tensor at a time, or none for zeros."""
    ordered = library_order(specs)
    with path.open("wb") as file:
        file.write(header_bytes(ordered))
        for spec in ordered:
            written = sum(file.write(piece) for piece in data(spec))
            if written == 0:
                file.seek(spec.num_bytes, os.SEEK_CUR)
            elif written != spec.num_bytes:
                raise ValueError(f"{spec.name}: {written} bytes given, {spec.num_bytes} declared")
        file.truncate()


def write_sparse(path: Path, specs: Iterable[TensorSpec], values: dict[str, bytes]) -> None:
    """Write a shard of the real size in which only the header and the tensors in `values` use disk space.

    Those tensors come first in the file and so share a few blocks. Everything else reads as zeros.
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


def write_checkpoint(
    out: Path,
    parts: list[list[TensorSpec]],
    write_shard: Callable[[Path, list[TensorSpec]], None],
    *,
    config: dict[str, Any],
    sidecars: dict[str, str],
) -> Path:
    """Write a new folder: the shards, an index with the exact total_size, config.json and small text files."""
    fresh_folder(out)
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(parts, start=1):
        shard = shard_name(number, len(parts))
        write_shard(out / shard, specs)
        weight_map |= {spec.name: shard for spec in specs}
    total = sum(spec.num_bytes for specs in parts for spec in specs)
    write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    write_json(out / "config.json", config)
    write_sidecars(out, sidecars)
    return out
