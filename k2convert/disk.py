"""How much disk a streamed job needs at once, decided before it starts.

A shard's way: its sources are fetched, it is converted, its sources go, it is uploaded, it goes. A job is granted the
room for a whole shard (sources and result) before its first byte is fetched, so the oldest shard can always end and
nothing can lock up. Where even one shard and its result do not fit together, the result grows while the source shrinks:
converted ranges of the source are given back to the filesystem (hole punching), so the pair takes the room of one.
"""

import ctypes
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from k2convert.errors import DiskFullError, PlanError

SHRINK_SLACK_BYTES = 256 << 10  # ranges read but not yet merged to whole blocks
_BLOCK = 4096
_KEEP_SIZE_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, linux/falloc.h


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


def parse_size(text: str) -> int:
    """Bytes from `200GB`, `1.5TB`, `64GiB` or a plain number; raises PlanError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kMGT]?)(i?)B?", text.strip(), flags=re.IGNORECASE)
    if match is None:
        raise PlanError(f"{text!r}: not a size. Write for example 200GB.")
    power = " kmgt".index(match[2].lower() or " ")
    try:
        return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    except OverflowError:
        raise PlanError(f"{text[:12]}...: larger than any disk. Write for example 200GB.") from None


def shrinking_need(item: Item, source_bytes: Mapping[str, int]) -> int:
    """Room for an item whose source shrinks as its result grows."""
    sources = sum(source_bytes.get(s, 0) for s in item.sources)
    return max(sources, item.output_bytes) + SHRINK_SLACK_BYTES


def punch_hole(path: Path, begin: int, end: int) -> bool:
    """Give the whole blocks within bytes [begin, end) of a file back to the filesystem; False if it cannot."""
    begin, end = -(-begin // _BLOCK) * _BLOCK, end // _BLOCK * _BLOCK
    if end <= begin:
        return True
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _punch(descriptor, begin, end)
    finally:
        os.close(descriptor)


def _punch(descriptor: int, begin: int, end: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (descriptor, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(end - begin))
    return libc.fallocate64(*arguments) == 0


def can_punch_holes(folder: Path) -> bool:
    """Whether the filesystem of a folder takes parts of files back; tried on a small file without a name."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\1" * (4 * _BLOCK))
            probe.flush()
            is_punched = _punch(probe.fileno(), _BLOCK, 3 * _BLOCK)
            return is_punched and os.fstat(probe.fileno()).st_blocks * 512 < 4 * _BLOCK
    except OSError:  # a folder that cannot be written to
        return False


class ShrinkingFile:
    """A source file that is given back while it is read; `consume` may be called from several threads, in any order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spans: list[tuple[int, int]] = []
        self._lock = Lock()

    def consume(self, begin: int, end: int) -> None:
        """Note that [begin, end) has been read for the last time, and free every whole block that is used up."""
        with self._lock:
            spans: list[tuple[int, int]] = []
            for span in self._spans:
                if span[1] < begin or span[0] > end:
                    spans.append(span)
                else:
                    begin, end = min(begin, span[0]), max(end, span[1])
            self._spans = sorted([*spans, (begin, end)])
            punch_hole(self._path, begin, end)
