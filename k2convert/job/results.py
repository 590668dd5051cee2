"""From a path or an address to a result that can be checked, alone or against its source."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from k2convert.check.remote import Shards, folder_bytes
from k2convert.check.results import LayersRequest, ValidationReport
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import SHARD_SUFFIX
from k2convert.errors import CheckpointError, HubError
from k2convert.hub.client import Hub
from k2convert.hub.ranges import RemoteShards
from k2convert.hub.source import fetch_small_files, mark_other_files, read_headers, resolve_source
from k2convert.job.locations import commit_of, folder_of, open_checkpoint_at, repo_at
from k2convert.records.events import SILENT, Events
from k2convert.records.ledger import find_ledger


@dataclass(frozen=True, slots=True)
class OpenResult:
    """A result and, if it is given, its source: their folders, and where shards that are not in them come from."""

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

    def validate(self, *, layers: LayersRequest | None = None, events: Events = SILENT) -> ValidationReport:
        """Validate the result; the report names it as the user did, not by its temporary folder."""
        report = validate_checkpoint(
            folder=self.folder, source=self.source, layers=layers, events=events, shards=self.shards
        )
        return replace(report, folder=self.name, contract=replace(report.contract, folder=self.name))


@contextmanager
def open_result_at(place: str, *, source: str | None, hub: Hub) -> Generator[OpenResult]:
    """Open a result and, if given, its source; either may be on the Hub. Raises any K2ConvertError.

    Of a repository there are the small files, and an empty file for every shard.
    """
    with ExitStack() as stack:
        folder = Path(place)
        shards = Shards()
        checkpoint = None
        if (repo := repo_at(place)) is not None:
            remote = resolve_source(hub, repo)
            if not any(path.endswith(SHARD_SUFFIX) for path in remote.files):
                raise HubError(f"{place}: has no shards, so it holds no result. Check the name and the revision.")
            folder = stack.enter_context(folder_of(repo, shown_as=place))
            fetch_small_files(hub, remote, folder=folder)
            mark_other_files(remote, folder=folder)
            shards = Shards(result=RemoteShards(hub, remote, folder, read_headers(hub, remote, folder=folder)))
        if source is not None:
            ledger = None
            with suppress(CheckpointError):  # the validation names a damaged one
                ledger = find_ledger(folder)
            opened = stack.enter_context(open_checkpoint_at(source, hub=hub, pinned=commit_of(ledger, source)))
            checkpoint = opened.checkpoint
            if opened.remote is not None:
                shards = replace(shards, source=RemoteShards(hub, opened.remote, checkpoint.folder))
        yield OpenResult(place, folder, checkpoint, shards)
