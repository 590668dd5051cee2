"""One file of a repository, by its address: hf://[datasets/]owner/name[@revision][/path], as huggingface_hub writes it.

The revision is resolved to a commit once. The bytes are compared with the hash that the Hub lists. Nothing is executed.
"""

from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

from k2convert.errors import HubError
from k2convert.hub.client import SCHEME, Hub, parse_repo
from k2convert.hub.download import download_shard
from k2convert.hub.source import DATASET, MODEL, RemoteRepo, fetch_file, resolve_source

_DATASETS: Final = "datasets/"


@dataclass(frozen=True, slots=True)
class FileAddress:
    """The address of a file; `path` is None for the only file of its kind in the repository."""

    repo: str
    kind: str = MODEL
    revision: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        folder = _DATASETS if self.kind == DATASET else ""
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{SCHEME}{folder}{self.repo}{revision}" + ("" if self.path is None else f"/{self.path}")


def parse_file_address(text: str) -> FileAddress:
    """Read an address; raises HubError. Does not use the network."""
    rest = text.removeprefix(SCHEME)
    kind = DATASET if rest.startswith(_DATASETS) else MODEL
    owner, _, rest = rest.removeprefix(_DATASETS).partition("/")
    name, _, path = rest.partition("/")
    ref = parse_repo(f"{SCHEME}{owner}/{name}")
    assert ref is not None  # with the scheme it is a repository or an error
    return FileAddress(ref.repo, kind, ref.revision, path or None)


def fetch_named_file(hub: Hub, text: str, *, suffix: str, folder: Path) -> tuple[Path, str]:
    """Fetch a file into `folder`; returns its path there, and its address with the commit.

    Without a path in the address it is the only file whose name ends in `suffix`. Raises HubError, DiskFullError.
    """
    address = parse_file_address(text)
    remote = resolve_source(hub, address, kind=address.kind)
    name = address.path or _only_name(remote, text, suffix)
    if name not in remote.files:
        raise HubError(f"{text}: is not there at commit {remote.commit[:12]}. Check the name and the revision.")
    target = folder / Path(name).name
    if remote.files[name].sha256 is None:
        target.write_bytes(fetch_file(hub, remote, remote.files[name]))
    else:
        download_shard(hub, remote, name, target=target, stop=Event())
    return target, str(FileAddress(address.repo, address.kind, remote.commit, name))


def _only_name(remote: RemoteRepo, text: str, suffix: str) -> str:
    found = sorted(path for path in remote.files if path.endswith(suffix))
    if len(found) != 1:
        raise HubError(f"{text}: has {len(found)} files named *{suffix}. Name the file: {text}/FILE.")
    return found[0]
