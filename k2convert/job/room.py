"""How much disk a streamed job needs at once, decided before it starts.

A shard's way: its sources are fetched, it is converted, its sources go, it is uploaded, it goes. A job is granted the
room for a whole shard (sources and result) before its first byte is fetched, so the oldest shard can always end and
nothing can lock up. Where even one shard and its result do not fit together, the result grows while the source shrinks:
converted ranges of the source are given back to the filesystem (hole punching), so the pair takes the room of one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k2convert.errors import DiskFullError

SHRINK_SLACK_BYTES = 256 << 10  # ranges read but not yet merged to whole blocks


@dataclass(frozen=True, slots=True)
class Item:
    """One output shard: the source shards it is made from, and its size."""

    name: str
    sources: tuple[str, ...]
    output_bytes: int


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Which items must shrink their source while they grow, and the least room the job can be done in."""

    shrinking: frozenset[str]
    needed_bytes: int


def plan_disk(
    items: Sequence[Item], *, source_bytes: Mapping[str, int], room: int, outputs_leave: bool, can_shrink: bool
) -> DiskPlan:
    """Go through the items one at a time and see whether each fits into `room`; raises DiskFullError if not.

    `source_bytes` is empty for local sources, which take no room. `outputs_leave` says that results are uploaded and
    deleted rather than kept.
    """
    uses = Counter(source for item in items for source in item.sources)
    held: dict[str, int] = {}
    kept, needed, shrinking = 0, 0, set[str]()
    for item in items:
        fresh = {s: source_bytes.get(s, 0) for s in item.sources if s not in held}
        whole = kept + sum(held.values()) + sum(fresh.values()) + item.output_bytes
        exclusive = can_shrink and fresh.keys() == set(item.sources) and all(uses[s] == 1 for s in item.sources)
        if whole > room and exclusive:
            shrinking.add(item.name)
            whole += shrinking_need(item, source_bytes) - sum(fresh.values()) - item.output_bytes
        needed = max(needed, whole)
        held |= fresh
        for source in item.sources:
            uses[source] -= 1
            if not uses[source]:
                held.pop(source, None)
        kept += 0 if outputs_leave else item.output_bytes
    if needed > room:
        raise DiskFullError(
            f"--max-disk leaves {_room_words(room)} for shards, but {needed:,} bytes are needed at the least "
            f"({'one shard on its way' if outputs_leave else 'the result and one source shard'}). Give it more room"
            + (
                "."
                if outputs_leave
                else ", or publish to the Hub (hf://owner/name), which needs only a few shards' room."
            )
        )
    return DiskPlan(frozenset(shrinking), needed)


def _room_words(room: int) -> str:
    return f"{room:,} bytes" if room > 0 else "nothing (small files and records alone take more)"


def shrinking_need(item: Item, source_bytes: Mapping[str, int]) -> int:
    """Room for an item whose source shrinks as its result grows."""
    sources = sum(source_bytes.get(s, 0) for s in item.sources)
    return max(sources, item.output_bytes) + SHRINK_SLACK_BYTES
