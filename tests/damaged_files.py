"""Ways in which a file on disk can be damaged, with or without its seal."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from k2convert.checkpoint.index import open_checkpoint
from k2convert.records import fingerprint
from k2convert.records.document import seal

DAMAGES: Final = ("flipped", "empty", "truncated", "zeros", "foreign", "missing")


def flip(path: Path, position: int) -> None:
    """Flip the lowest bit of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


NAN: Final = 0x7FC0


def plant(source: Path, tensor: str, element: int, bits: int) -> None:
    """Set one BF16 of a checkpoint."""
    info = open_checkpoint(source).tensors[tensor]
    with (source / info.shard).open("r+b") as file:
        file.seek(info.begin + 2 * element)
        file.write(bits.to_bytes(2, "little"))


def damage_file(path: Path, damage: str, *, foreign: Path) -> None:
    """Damage a file in one of these ways. `foreign` is a file of something else."""
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
        return
    content[len(content) * 2 // 3] ^= 1
    damaged = {
        "flipped": lambda: content,
        "empty": lambda: b"",
        "truncated": lambda: content[: len(content) // 2],
        "zeros": lambda: bytes(len(content)),
        "foreign": lambda: foreign.read_bytes(),
    }
    path.write_bytes(damaged[damage]())


@contextmanager
def damaged_weight(source: Path, name: str) -> Iterator[None]:
    """Make a number of a BF16 tensor NaN during the block, in which the identity of the shard does not show it.

    The sample of so small a shard is all of it.
    """
    info = open_checkpoint(source).tensors[name]
    shard = source / info.shard
    before = shard.read_bytes()
    identity = fingerprint.local_identity(shard)
    read = fingerprint.local_identity
    shard.write_bytes(before[: info.begin] + b"\xc0\x7f" + before[info.begin + 2 :])
    with patch.object(fingerprint, "local_identity", lambda path: identity if path.samefile(shard) else read(path)):
        yield
    shard.write_bytes(before)


def edit_sealed(path: Path, change: Callable[[dict[str, Any]], object], *, is_sealed: bool = True) -> None:
    document = json.loads(path.read_text())
    del document["checksum"]
    change(document)
    path.write_bytes(seal(document) if is_sealed else json.dumps(document).encode())
