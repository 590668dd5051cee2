"""A result and its source, open for a validation: folders, or repositories of the Hub."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from k2convert.check.remote import Shards, folder_bytes, layer_bytes
from k2convert.check.results import ValidationReport
from k2convert.checkpoint.index import Checkpoint
from k2convert.hub.client import Hub
from k2convert.hub.ranges import RemoteShards
from k2convert.hub.source import read_headers
from k2convert.job.locations import open_result, open_source
from k2convert.models import detect_family


@dataclass(frozen=True, slots=True)
class Opened:
    """A result and its source, open: folders, and where shards that are not in them come from."""

    name: str
    folder: Path
    source: Checkpoint | None
    shards: Shards

    @property
    def num_bytes(self) -> int:
        """The tensor bytes of the result's shards."""
        if self.shards.result is not None:
            return self.shards.result_bytes()
        return folder_bytes(self.folder)

    def bytes_to_read(self, layers: tuple[int, ...] | None) -> int:
        """The bytes of the result that a validation reads; of `layers`, about as many as the source's."""
        if not layers or self.source is None or not self.shards.is_remote:
            return self.num_bytes
        return layer_bytes(self.source, layers, family=detect_family(self.source))

    def named(self, found: ValidationReport) -> ValidationReport:
        """Name what was validated as the user did, not by its temporary folder."""
        return replace(found, folder=self.name, contract=replace(found.contract, folder=self.name))


@contextmanager
def open_ends(result: str, source: str | None, *, hub: Hub) -> Generator[Opened]:
    """Open a result and, if given, its source; either may be on the Hub. Raises any K2ConvertError."""
    with (
        open_result(result, hub=hub) as (folder, remote),
        open_origin(source, hub=hub) as (origin, shards),
    ):
        if remote is not None:
            headers = read_headers(hub, remote, folder=folder)
            shards = replace(shards, result=RemoteShards(hub, remote, folder, headers))
        yield Opened(result, folder, origin, shards)


@contextmanager
def open_origin(text: str | None, *, hub: Hub) -> Generator[tuple[Checkpoint | None, Shards]]:
    """Open the source, and say where its shards are. A name without hf:// is a folder, never looked up on the Hub."""
    if text is None:
        yield None, Shards()
        return
    with open_source(text, hub=hub) as source:
        found = source.checkpoint
        remote = source.remote
        yield found, Shards(source=None if remote is None else RemoteShards(hub, remote, found.folder))
