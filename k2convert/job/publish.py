"""Publish a finished local checkpoint: validated, uploaded to a work branch, one commit on main."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, cast

from k2convert.checkpoint.page_cache import leave_cache
from k2convert.hub.branch import Branch, Upload
from k2convert.job.pipeline import Pipeline, Stages
from k2convert.job.room import DiskPlan, Item
from k2convert.records.ledger import read_ledger_document

Sent = Callable[[int], None]
"""Called with the bytes of a shard that is on its way or was there already; from several threads."""


def published_files(folder: Path, shards: set[str]) -> list[Path]:
    """Everything of a finished folder but shards and work files, relative to it."""
    everything = (p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file())
    return [p for p in everything if not p.parts[0].startswith(".") and str(p) not in shards and p.suffix != ".tmp"]


@dataclass(frozen=True, slots=True)
class _FolderPublisher:
    """The pipeline's Publisher for files that stay where they are."""

    branch: Branch
    uploads: Mapping[str, Upload]
    sent: Sent

    @property
    def num_pending(self) -> int:
        return self.branch.num_pending

    def upload(self, name: str) -> None:
        self.branch.upload(self.uploads[name], records={})
        leave_cache(self.uploads[name].path)
        self.sent(self.uploads[name].num_bytes)

    def is_group_due(self) -> bool:
        return self.branch.is_group_due()

    def commit(self) -> list[str]:
        return [upload.name for upload in self.branch.commit_group()]


def publish_folder(
    *,
    folder: Path,
    branch: Branch,
    sha256: Callable[[str], str],
    extra: Mapping[str, bytes],
    sent: Sent,
) -> str:
    """Upload what the branch does not have, then commit everything to main; returns the commit's id.

    The folder must just have been validated, and its files stay. `sha256` tells the hash of a shard's bytes as they
    were then. Raises HubError where the Hub refuses.
    """
    stated = cast(dict[str, dict[str, Any]], read_ledger_document(folder)["shards"])
    branch.open()
    uploads = {name: Upload(name, folder / name, sha256(name), int(stated[name]["bytes"])) for name in sorted(stated)}
    waiting: list[Item] = []
    for upload in uploads.values():
        if branch.has(upload.name, upload.sha256, upload.num_bytes):
            sent(upload.num_bytes)
        else:
            waiting.append(Item(upload.name, (), upload.num_bytes))
    _send(waiting, _FolderPublisher(branch, uploads, sent))
    files: dict[str, Path | bytes] = {str(path): folder / path for path in published_files(folder, set(stated))}
    shards = {name: (upload.sha256, upload.num_bytes) for name, upload in uploads.items()}
    name = branch.repo.partition("/")[2]
    return branch.commit_to_main(shards=shards, files=files | dict(extra), message=f"Add {name}")


def _send(waiting: list[Item], publisher: _FolderPublisher) -> None:
    """The last stage of a streamed job alone: nothing to fetch, to convert or to drop."""

    def nothing(*_: object) -> None:
        pass

    stages = Stages(fetch=nothing, convert=nothing, drop_source=nothing, drop_output=nothing, publisher=publisher)
    plan = DiskPlan(frozenset(), 0)
    Pipeline([], disk=plan, source_bytes={}, room=0, stages=stages, num_workers=0, stop=Event(), waiting=waiting).run()
