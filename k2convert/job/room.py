"""How much disk the shards of a job need at a time, decided before it starts.

A shard's sources are fetched, it is converted, its sources are removed, it is uploaded, it is removed. A job gets the
room for a whole shard (sources and result) before the first byte is fetched, so the oldest shard can always finish and
nothing can deadlock.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Item:
    """One output shard: the source shards that it needs, and its size."""

    name: str
    sources: tuple[str, ...]
    output_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that shards may take on a disk. `source_bytes` are the sizes of source shards: none for local ones."""

    num_bytes: int
    source_bytes: Mapping[str, int]


def least_room(items: Sequence[Item], *, source_bytes: Mapping[str, int], outputs_leave: bool) -> int:
    """Return the least room in which all items can be converted, one after the other.

    `source_bytes` is empty for local sources, which take no room. `outputs_leave`: results are uploaded and removed.
    """
    uses = Counter(source for item in items for source in item.sources)
    held: dict[str, int] = {}
    kept = needed = 0
    for item in items:
        held |= {source: source_bytes.get(source, 0) for source in item.sources}
        needed = max(needed, kept + sum(held.values()) + item.output_bytes)
        for source in item.sources:
            uses[source] -= 1
            if not uses[source]:
                del held[source]
        kept += 0 if outputs_leave else item.output_bytes
    return needed


def used_bytes(folder: Path) -> int:
    """Return the disk blocks that a folder's files take."""
    if not folder.is_dir():
        return 0
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def existing_parent(path: Path) -> Path:
    """Return the path itself or its first parent that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
