"""The index of a result, read without a second copy of a million names."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from k2convert.checkpoint.files import (
    MAX_SMALL_FILE_BYTES,
    check_plain_file,
    parse_json_object,
    read_json_file,
    reading,
)
from k2convert.checkpoint.header import ShardHeader

_INDEX_ENTRY: Final = re.compile(rb' *"([ !#-[\]-~]+)": "([ !#-[\]-~]+)"(,?)\r?\n')
"""A line of an index: a name and a shard in plain characters."""


def read_index(path: Path, headers: Mapping[str, ShardHeader]) -> dict[str, Any]:
    """Read the index. Names and shards are the strings of the headers: K2's own would take 60 MB.

    Every library writes an entry a line. Such an index is read by lines, since the text of K3's and what a parser makes
    of it would take 430 MB.
    """
    check_plain_file(path)
    frame: list[bytes] = []
    mapped: dict[str, str] = {}
    begin = 0
    comma = b","
    with reading(path, missing="missing."), path.open("rb") as file:
        is_usual = os.fstat(file.fileno()).st_size <= MAX_SMALL_FILE_BYTES
        for line in file if is_usual else ():
            entry = _INDEX_ENTRY.fullmatch(line)
            if entry is None:
                frame.append(line)
                continue
            begin = begin or len(frame)
            name, shard = entry[1].decode(), sys.intern(entry[2].decode())
            header = headers.get(shard)
            tensor = None if header is None else header.tensors.get(name)
            is_usual = is_usual and bool(comma) and len(frame) == begin and name not in mapped
            mapped[name if tensor is None else tensor.name] = shard
            comma = entry[3]
    is_usual = is_usual and not comma and frame[begin - 1].strip() == b'"weight_map": {'
    if not is_usual:
        return read_json_file(path)
    document = parse_json_object(b"".join(frame).decode("utf-8", "replace"), where=str(path))
    if document.get("weight_map") != {}:
        return read_json_file(path)
    held = ShardsByName(headers)
    is_right = len(mapped) == len(held) and all(
        shard in headers and name in headers[shard].tensors for name, shard in mapped.items()
    )
    return document | {"weight_map": held if is_right else mapped}


@dataclass(frozen=True, slots=True, eq=False)
class ShardsByName(Mapping[str, str]):
    """The shard of each tensor, as an index states it: a dict of its own would take 40 MB for K3."""

    headers: Mapping[str, ShardHeader]

    def __getitem__(self, name: str) -> str:
        for shard, header in self.headers.items():
            if name in header.tensors:
                return shard
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for header in self.headers.values() for name in header.tensors)

    def __len__(self) -> int:
        return sum(len(header.tensors) for header in self.headers.values())
