"""Damaged shards are refused from their headers, before anything is made."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.fixture_maker.damage import edit_entry, edit_header, split_shard, write_raw

SHARD = "model-00002-of-000005.safetensors"
NORM = "model.layers.1.input_layernorm.weight"

Damage = Callable[[Path], object]
Refuse = Callable[..., str]


def relink(source: Path, target: str) -> None:
    (source / SHARD).rename(source.parent / "elsewhere.safetensors")
    (source / SHARD).symlink_to(target)


def cut(source: Path, size: int) -> None:
    os.truncate(source / SHARD, size)


def claim_huge_header(source: Path, *, file_bytes: int) -> None:
    path = source / SHARD
    write_raw(path, b"", claim=150_000_000)
    os.truncate(path, file_bytes)


def shift(source: Path, tensor: str, by: int) -> None:
    begin, end = split_shard(source / SHARD)[0][tensor]["data_offsets"]
    edit_entry(source / SHARD, tensor, data_offsets=[begin + by, end + by])


def repeat_tensor(source: Path) -> None:
    header, data = split_shard(source / SHARD)
    text = json.dumps(header)[:-1] + f', "{NORM}": {json.dumps(header[NORM])}}}'
    write_raw(source / SHARD, text.encode(), data)


def append(source: Path, extra: bytes) -> None:
    with (source / SHARD).open("ab") as file:
        file.write(extra)


def raw_header(text: bytes) -> Damage:
    return lambda source: write_raw(source / SHARD, text, bytes(64))


def entry(**fields: object) -> Damage:
    return lambda source: edit_entry(source / SHARD, NORM, **fields)


DAMAGED_SHARDS: dict[str, tuple[Damage, list[str]]] = {
    "data cut short": (lambda s: cut(s, 500_000), ["truncated", "ownload"]),
    "header cut short": (lambda s: cut(s, 1000), ["truncated", "ownload"]),
    "length cut short": (lambda s: cut(s, 5), ["too short", "ownload"]),
    "empty file": (lambda s: cut(s, 0), ["too short", "ownload"]),
    "header longer than the file": (lambda s: claim_huge_header(s, file_bytes=90_000_000), ["150,000,000", "ownload"]),
    "header over 100 MB": (lambda s: claim_huge_header(s, file_bytes=200_000_000), ["limit", "ownload"]),
    "header of 2^63 bytes": (lambda s: write_raw(s / SHARD, b"{}", claim=1 << 63), ["limit", "ownload"]),
    "overlap": (lambda s: shift(s, NORM, -2), ["overlap", "ownload"]),
    "gap": (lambda s: shift(s, NORM, 2), [NORM, "gap", "ownload"]),
    "trailing bytes": (lambda s: append(s, bytes(8)), ["longer", "ownload"]),
    "duplicate tensor name": (repeat_tensor, [NORM, "duplicate key", "ownload"]),
    "not JSON": (raw_header(b"{{{{"), ["JSON", "ownload"]),
    "not UTF-8": (raw_header(b'{"\xff": 1}'), ["JSON", "ownload"]),
    "not an object": (raw_header(b"[1, 2]"), ["object", "ownload"]),
    "nested too deep": (raw_header(b"[" * 200_000), ["JSON", "ownload"]),
    "a number of 5,000 digits": (raw_header(b'{"a": ' + b"9" * 5000 + b"}"), ["ownload"]),
    "metadata not strings": (lambda s: edit_header(s / SHARD, lambda h: h.update(__metadata__={"a": 1})), ["metadata"]),
    "unknown dtype": (entry(dtype="Q4"), [NORM, "Q4"]),
    "dtype not a string": (entry(dtype=["BF16"]), [NORM, "dtype"]),
    "shape larger than its bytes": (entry(shape=[257]), [NORM, "512", "514"]),
    "shape smaller than its bytes": (entry(shape=[128]), [NORM, "512", "256"]),
    "shape negative": (entry(shape=[-256]), [NORM, "-256"]),
    "shape not integers": (entry(shape=[256.0]), [NORM, "256.0"]),
    "shape not a list": (entry(shape=256), [NORM, "shape"]),
    "offsets reversed": (entry(data_offsets=[512, 0]), [NORM]),
    "offsets not a pair": (entry(data_offsets=[0]), [NORM, "data_offsets"]),
    "entry without dtype": (lambda s: edit_header(s / SHARD, lambda h: h[NORM].pop("dtype")), [NORM, "dtype"]),
    "link to a folder": (lambda s: relink(s, ".."), ["is a link to '..'", "a folder", "ownload"]),
    "link to nothing": (lambda s: relink(s, "nowhere"), ["is a link to 'nowhere'", "leads to no file", "ownload"]),
    "pipe in place of a shard": (lambda s: ((s / SHARD).unlink(), os.mkfifo(s / SHARD)), ["device", "ownload"]),
    "control characters in a name": (
        lambda s: edit_header(s / SHARD, lambda h: h.update({"a\x1b[2J\nb": h.pop(NORM)})),
        ["\\x1b[2J\\nb", "control characters", "ownload"],
    ),
    "missing shard": (lambda s: (s / SHARD).unlink(), ["missing", "ownload"]),
    "folder in place of a shard": (lambda s: ((s / SHARD).unlink(), (s / SHARD).mkdir()), ["folder"]),
}


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", DAMAGED_SHARDS)
def test_damaged_shard_is_refused_before_anything_is_made(name: str, refuse_at_once: Refuse) -> None:
    assert SHARD in refuse_at_once(*DAMAGED_SHARDS[name])
