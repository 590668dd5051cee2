"""Where a checkpoint comes from and where it goes: a folder, or a repository on the Hub.

A repository is opened without downloading a shard. A destination on the Hub needs a folder to work in: what is not
uploaded yet, and the journal. It stays after the end, some megabytes in all, so that `status` and a second run can tell
what was done.
"""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.checkpoint.names import CARD_NAME, WORK_FOLDER
from k2convert.errors import DestinationError, HubError
from k2convert.hub.client import SCHEME, Hub, RepoRef, parse_repo
from k2convert.hub.request_errors import HubRequestError
from k2convert.hub.source import RemoteRepo, open_remote, resolve_source
from k2convert.hub.source_card import SourceCard, read_source_card_file

WORK_ROOT = Path("k2convert-work")


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """A source ready to be planned from; `remote` is None for a folder."""

    checkpoint: Checkpoint
    remote: RemoteRepo | None

    @property
    def card(self) -> SourceCard:
        """What the source's card says; to be read while the source is open."""
        return read_source_card_file(self.checkpoint.folder / CARD_NAME)

    @property
    def repo(self) -> str | None:
        return self.remote.repo if self.remote is not None else None

    @property
    def revision(self) -> str | None:
        return self.remote.commit if self.remote is not None else None


@contextmanager
def open_source(text: str, *, hub: Hub, pinned: str | None = None) -> Generator[OpenedSource]:
    """Open a folder, or a repository's headers and small files in a temporary folder that lasts for the block.

    `pinned` is the commit that an unfinished job began with: it goes on there, even if main has moved since.
    """
    ref = parse_repo(text)
    if ref is None:
        yield OpenedSource(open_checkpoint(Path(text)), None)
        return
    with tempfile.TemporaryDirectory(prefix="k2convert-") as temporary:
        folder = Path(temporary) / ref.repo
        folder.mkdir(parents=True)
        try:
            remote = _resolve(hub, ref, pinned)
        except HubError as error:
            if text.startswith(SCHEME):
                raise
            raise HubError(f"{text}: there is no such folder, and as a repository of the Hub: {error}") from error
        yield OpenedSource(open_remote(hub, remote, folder=folder), remote)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a result goes: a folder, and the repository if it is the Hub's."""

    folder: Path
    repo: str | None


def _resolve(hub: Hub, ref: RepoRef, pinned: str | None) -> RemoteRepo:
    if ref.revision is not None or pinned is None:
        return resolve_source(hub, ref)
    try:
        return resolve_source(hub, RepoRef(ref.repo, pinned))
    except HubRequestError as error:
        if error.status != 404:
            raise
        return resolve_source(hub, ref)  # another repository than the job's: the journal will say so


def read_destination(text: str, *, work_folder: Path | None) -> Destination:
    """A path, or hf://owner/name with the folder to work in; raises HubError for a revision."""
    ref = parse_repo(text) if text.startswith(SCHEME) else None
    if ref is None:
        return Destination(Path(text), None)
    return Destination(work_folder or WORK_ROOT / ref.repo.replace("/", "--"), repo_without_revision(ref))


def repo_without_revision(ref: RepoRef) -> str:
    """The repository that results go to; raises HubError for a revision of it."""
    if ref.revision is not None:
        raise HubError(f"{ref}: results go to main in one commit; leave out @{ref.revision}.")
    return ref.repo


def check_destination(destination: Path, *, source: Path | None) -> None:
    """Refuse a destination that is the source, lies inside it (or it inside), or holds something that is not ours."""
    target = destination.resolve()
    if source is not None:
        origin = source.resolve()
        if target == origin:
            raise DestinationError(
                f"{destination}: is the source itself. The source is never written to: name another."
            )
        if target.is_relative_to(origin):
            raise DestinationError(f"{destination}: lies inside the source {source}. Name a folder outside it.")
        if origin.is_relative_to(target):
            raise DestinationError(f"{destination}: contains the source {source}. Name a folder beside it.")
    if destination.is_symlink() and not destination.exists():
        raise DestinationError(f"{destination}: is a link to nothing. Name a folder, or remove the link.")
    for path in (destination, *destination.absolute().parents):
        if path.exists() and not path.is_dir():
            raise DestinationError(f"{destination}: {path} is a file. Name a folder.")
    if destination.is_dir() and not (destination / WORK_FOLDER).is_dir() and any(destination.iterdir()):
        raise DestinationError(
            f"{destination}: is not empty and holds no conversion begun by k2convert. Name a new or empty folder."
        )
