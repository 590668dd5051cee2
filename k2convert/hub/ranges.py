"""Byte ranges of shards of a repository, fetched into a folder and freed again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Final

from k2convert.checkpoint.files import writing
from k2convert.checkpoint.header import ShardHeader, TensorInfo
from k2convert.errors import MalformedFileError
from k2convert.hub.client import Hub, ignore
from k2convert.hub.download import Arrived, download_ranges, download_shard
from k2convert.hub.source import RemoteRepo

WHOLE_SHARE: Final = 0.9  # A shard is fetched whole, and its sha256 checked, if at least this share of it is needed

Ranges = dict[str, set[tuple[int, int]]]  # byte ranges [begin, end) by shard


def ranges_of(tensors: Iterable[TensorInfo]) -> Ranges:
    ranges: Ranges = {}
    for tensor in tensors:
        ranges.setdefault(tensor.shard, set()).add((tensor.begin, tensor.end))
    return ranges


@dataclass(frozen=True, slots=True)
class RemoteShards:
    """The shards of a repository, which come into `folder`. `headers` are those read by ranges; see hub.source."""

    hub: Hub
    repo: RemoteRepo
    folder: Path
    headers: Mapping[str, ShardHeader | MalformedFileError] = field(default_factory=dict[str, ShardHeader])

    def header(self, path: Path) -> ShardHeader:
        """Return a shard's header; raises MalformedFileError as read_header does for a file in `folder`."""
        header = self.headers.get(path.name)
        if header is None:
            raise MalformedFileError(f"{path}: missing, but the index names it.")
        if isinstance(header, MalformedFileError):
            raise header
        return header

    def present(self, ranges: Ranges) -> Ranges:
        """Return the ranges of those shards that the repository has."""
        return {shard: shard_ranges for shard, shard_ranges in ranges.items() if shard in self.repo.files}

    def bytes_needed(self, ranges: Ranges) -> int:
        """Return the bytes of disk that `fetch` needs for these ranges."""
        return sum(self._needed(shard, shard_ranges) for shard, shard_ranges in ranges.items())

    def _needed(self, shard: str, ranges: Iterable[tuple[int, int]]) -> int:
        needed = sum(end - begin for begin, end in ranges)
        num_bytes = self.repo.shard(shard).num_bytes
        if needed >= WHOLE_SHARE * num_bytes:
            return num_bytes
        return needed

    def fetch(self, ranges: Ranges, *, stop: Event | None = None, arrived: Arrived = ignore) -> None:
        """Fetch what is needed of each shard; raises HubError, DiskFullError. Parts arrive as a whole."""
        for shard, shard_ranges in ranges.items():
            target = self.folder / shard
            needed = self._needed(shard, shard_ranges)
            if needed == self.repo.shard(shard).num_bytes:
                download_shard(self.hub, self.repo, shard, target=target, stop=stop or Event(), arrived=arrived)
            else:
                download_ranges(self.hub, self.repo, shard, target=target, ranges=shard_ranges)
                arrived(needed, True)

    def free(self, shards: Iterable[str]) -> None:
        """Free the disk of shards. Their names stay in the folder, as a checkpoint's files."""
        for shard in shards:
            with writing(self.folder / shard):
                (self.folder / shard).write_bytes(b"")
