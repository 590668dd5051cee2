"""The files and the tensors of a result."""

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

from k2convert.checkpoint.header import read_header


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a result but the lock, whose content is the last owner's business, and what has times of files."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in ("lock", "command.json"))
    files = (p for p in files if not p.name.endswith(".json.k2convert"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def read_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def files_of(folder: Path, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file() and path.name not in without}


def raw_tensors(folder: Path) -> dict[str, bytes]:
    tensors: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        tensors |= {name: data[t.begin : t.end] for name, t in read_header(path).tensors.items()}
    return tensors


def digest_of_shards(folder: Path) -> str:
    shards = sorted(folder.glob("*.safetensors"))
    return blake3(b"".join(shard.read_bytes() for shard in shards)).hexdigest()[:32]
