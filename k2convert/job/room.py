"""How much disk a job needs at one time, decided before it starts.

A shard's sources are fetched, it is converted, its sources are removed, it is uploaded, it is removed. A job gets the
room for a whole shard (sources and result) before the first byte is fetched, so the oldest shard can always finish and
nothing can deadlock. If a source shard and its result do not fit at the same time, the result grows while the source
shrinks: converted ranges of the source are freed (hole punching), so the pair takes the room of one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SHRINK_SLACK_BYTES: Final = 256 << 10  # ranges that are read but not yet merged to whole blocks


@dataclass(frozen=True, slots=True)
class Item:
    """One output shard: the source shards that it needs, and its size."""

    name: str
    sources: tuple[str, ...]
    output_bytes: int


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """The items that must shrink their source while they grow, and the least room for all shards."""

    shrinking: frozenset[str]
    needed_bytes: int


def plan_disk(
    items: Sequence[Item], *, source_bytes: Mapping[str, int], room: int, outputs_leave: bool, can_shrink: bool
) -> DiskPlan:
    """Go through the items one at a time, shrinking sources if an item does not fit into `room` otherwise.

    `source_bytes` is empty for local sources, which take no room. `outputs_leave`: results are uploaded and removed.
    The plan may need more than `room`: the caller decides what to say.
    """
    uses = Counter(source for item in items for source in item.sources)
    held: dict[str, int] = {}
    kept, needed, shrinking = 0, 0, set[str]()
    for item in items:
        fresh = {s: source_bytes.get(s, 0) for s in item.sources if s not in held}
        whole = kept + sum(held.values()) + sum(fresh.values()) + item.output_bytes
        is_exclusive = fresh.keys() == set(item.sources) and all(uses[s] == 1 for s in item.sources)
        if whole > room and can_shrink and is_exclusive:
            shrinking.add(item.name)
            whole += shrinking_need(item, source_bytes) - sum(fresh.values()) - item.output_bytes
        needed = max(needed, whole)
        held |= fresh
        for source in item.sources:
            uses[source] -= 1
            if not uses[source]:
                held.pop(source, None)
        kept += 0 if outputs_leave else item.output_bytes
    return DiskPlan(frozenset(shrinking), needed)


def shrinking_need(item: Item, source_bytes: Mapping[str, int]) -> int:
    """Return the room for an item whose source shrinks while its result grows."""
    sources = sum(source_bytes.get(s, 0) for s in item.sources)
    return max(sources, item.output_bytes) + SHRINK_SLACK_BYTES


def used_bytes(folder: Path) -> int:
    """Return the disk blocks that a folder's files take."""
    if not folder.is_dir():
        return 0
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def existing_parent(path: Path) -> Path:
    """Return the path itself or its first parent that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
