"""Finished shards of an earlier run: they must have their recorded bytes.

Size and time of modification are always compared with the record. A shard is hashed if its time differs (it was copied,
or changed), or if the user asks for it. A shard that does not have its recorded hash loses its record, so that it is
converted again.
"""

import os
from pathlib import Path
from typing import Final

from blake3 import blake3

from k2convert.records.events import Events, Extent
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord

_PIECE_BYTES: Final = 16 << 20
_NOT_HASHED: Final = "finished shards have their recorded size and time (--verify hashes them too)"


def verify_shards(journal: Journal, digest: str, *, everything: bool, events: Events) -> dict[str, ShardRecord]:
    """Return the records of the job's shards that are sound; forget those of wrong shards and damaged ones.

    Hashes the shards whose time differs from the record's, or `everything`. Hold the lock for this.
    """
    found = journal.find_records(digest)
    here = {name: record for name, record in found.records.items() if journal.has_file(record)}
    doubtful = {n: record for n, record in here.items() if everything or not journal.has_recorded_time(record)}
    again = [path.name.removesuffix(".json") for path in found.damaged]
    num_bytes = sum(record.file_bytes for record in doubtful.values())
    if doubtful:
        events.begun(Extent({"check": (num_bytes, 0)}))
    for name, record in doubtful.items():
        if _blake3(journal.destination / name, events) == record.blake3:
            journal.record(record)
        else:
            again.append(name)
    for name in again:
        journal.forget(name)
    if here or again:
        looked = f"finished shards hashed: {len(doubtful)} ({num_bytes:,} bytes)" if doubtful else _NOT_HASHED
        damaged = f"; damaged, to be converted again: {', '.join(sorted(again))}" if again else ""
        events.note(f"verified: {looked}{damaged}")
    return {name: record for name, record in here.items() if name not in again}


def _blake3(path: Path, events: Events) -> str | None:
    """Return the hash of a shard as hex, or None if it cannot be read."""
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
