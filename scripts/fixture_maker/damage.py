"""Damages a checkpoint folder, one precise fault at a time, for tests of how the fault is refused.

Every function changes the given folder in place, so pass a copy.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scripts.fixture_maker.folder import SmallCheckpoint, read_small, write_small
from scripts.fixture_maker.shards import INDEX_NAME

Header = dict[str, Any]


def split_shard(path: Path) -> tuple[Header, bytes]:
    """Return the header of a safetensors file as JSON, and its data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(path: Path, header: bytes, data: bytes = b"", *, claim: int | None = None) -> None:
    """Write a shard with exactly these header bytes; `claim` replaces the true header length in its prefix."""
    length = len(header) if claim is None else claim
    path.write_bytes(length.to_bytes(8, "little") + header + data)


def edit_header(path: Path, change: Callable[[Header], object]) -> None:
    """Change a shard's header and keep its data."""
    header, data = split_shard(path)
    change(header)
    write_raw(path, json.dumps(header).encode(), data)


def edit_entry(path: Path, tensor: str, **fields: object) -> None:
    """Replace fields of one tensor's header entry."""
    edit_header(path, lambda header: header[tensor].update(fields))


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=2))


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Change the index's weight_map."""
    edit_json(folder / INDEX_NAME, lambda index: change(index["weight_map"]))


def edit_config(folder: Path, **fields: object) -> None:
    """Replace fields of config.json."""
    edit_json(folder / "config.json", lambda config: config.update(fields))


def edit_checkpoint(folder: Path, change: Callable[[SmallCheckpoint], object]) -> None:
    """Change tensors or config as Python values, then write shards and index again, consistently."""
    checkpoint = read_small(folder)
    change(checkpoint)
    for path in (*folder.glob("*.safetensors"), folder / INDEX_NAME, folder / "config.json"):
        path.unlink()
    fresh = write_small(checkpoint, folder / "rewritten")
    for path in fresh.iterdir():
        path.replace(folder / path.name)
    fresh.rmdir()


def edit_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace one tensor by what `change` returns; None removes it, also from the index."""

    def apply(checkpoint: SmallCheckpoint) -> None:
        shard = checkpoint.shard_of(name)
        changed = change(checkpoint.shards[shard][name].clone())
        if changed is None:
            del checkpoint.shards[shard][name]
        else:
            checkpoint.replace(name, changed)

    edit_checkpoint(folder, apply)
