"""Which source files a job was begun with: a resumed job must not mix the data of two sources.

The fingerprint has the headers. The data is too much to hash, so the job's description also has, for each source shard,

    of a folder     its size, its time of modification and its inode
    of the Hub      its sha256, as the Hub lists it

Another size, time or sha256 is another file, which is refused once a finished shard was made from it. Another inode
alone is a file that was moved with its time (`cp -a` to another disk) or replaced: what was made from it is made again,
and must come out the same.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from k2convert.errors import SourceReadError

Identity = dict[str, int | str]
Identities = dict[str, Identity]


def local_identity(path: Path) -> Identity:
    """Return the identity of a shard in a folder; raises SourceReadError."""
    try:
        found = path.stat()
    except OSError as error:
        raise SourceReadError(f"{path}: cannot be read ({error.strerror}). Check permissions and disk.") from None
    return {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}


def hub_identity(sha256: str | None) -> Identity:
    """Return the identity of a shard on the Hub."""
    return {"sha256": str(sha256)}


def changed_shards(before: Mapping[str, Identity], now: Mapping[str, Identity]) -> list[str]:
    """Return the source shards whose size, time or sha256 differ."""
    return _different(before, now, ("bytes", "mtime_ns", "sha256"))


def moved_shards(before: Mapping[str, Identity], now: Mapping[str, Identity]) -> list[str]:
    """Return the source shards whose inode differs."""
    return _different(before, now, ("inode",))


def _different(before: Mapping[str, Identity], now: Mapping[str, Identity], keys: Iterable[str]) -> list[str]:
    both = sorted(before.keys() & now.keys())
    return [name for name in both if any(before[name].get(key) != now[name].get(key) for key in keys)]
