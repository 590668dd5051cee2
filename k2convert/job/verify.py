"""Do the finished shards of an earlier run still have their recorded bytes?

Size and time of modification are always compared with the record. A shard is hashed if its time differs (it was copied,
or changed), or if the user asks for it. A shard that does not have its recorded hash loses its record, so that it is
converted again.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from k2convert.records.events import SILENT, Events
from k2convert.records.journal import FoundRecords, Journal
from k2convert.records.shard_record import ShardRecord

_PIECE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Verification:
    """The sound records by shard, how many shards and bytes were hashed for it, and which shards are made again."""

    records: dict[str, ShardRecord]
    num_hashed: int
    hashed_bytes: int
    again: tuple[str, ...]


def shards_to_hash(journal: Journal, found: FoundRecords, *, everything: bool) -> dict[str, ShardRecord]:
    """Return the records of those finished shards that size and time do not vouch for; all of them on request."""
    return {
        name: record
        for name, record in found.records.items()
        if journal.has_file(record) and (everything or not journal.has_recorded_time(record))
    }


def verify_shards(
    journal: Journal, found: FoundRecords, *, doubtful: Mapping[str, ShardRecord], events: Events = SILENT
) -> Verification:
    """Hash the doubtful shards; forget the records of wrong ones and damaged records. Hold the lock for this."""
    again = [path.name.removesuffix(".json") for path in found.damaged]
    for name, record in doubtful.items():
        if _blake3(journal.destination / name, events) == record.blake3:
            journal.record(record)
        else:
            again.append(name)
    for name in again:
        journal.forget(name)
    sound = {n: record for n, record in found.records.items() if n not in again and journal.has_file(record)}
    hashed_bytes = sum(record.file_bytes for record in doubtful.values())
    return Verification(sound, len(doubtful), hashed_bytes, tuple(sorted(again)))


def _blake3(path: Path, events: Events) -> str | None:
    """Return the hash of a shard as hex, or None if it cannot be read: then it is made again."""
    digest = blake3(max_threads=blake3.AUTO)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                events.progress(bytes_in=len(piece))
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return None
    return digest.hexdigest()
