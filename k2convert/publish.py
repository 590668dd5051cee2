"""Publish a finished local checkpoint: validated, uploaded to a work branch, one commit on main."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from k2convert.checkpoint.index import read_json_file
from k2convert.checkpoint.sidecars import LEDGER_NAME
from k2convert.errors import CheckpointError
from k2convert.hub.publish import Publication, Upload
from k2convert.shipping import hash_file
from k2convert.transfer import published_files


def read_ledger_document(folder: Path) -> dict[str, Any]:
    """k2convert.json of a finished folder; raises CheckpointError where the folder is not one of ours."""
    if not (folder / LEDGER_NAME).is_file():
        raise CheckpointError(f"{folder}: has no {LEDGER_NAME}, so it is no finished conversion. Finish `run` first.")
    return read_json_file(folder / LEDGER_NAME)


def publish_folder(
    *,
    folder: Path,
    publication: Publication,
    extra: Mapping[str, bytes],
    progress: Callable[[str, int], None],
) -> str:
    """Upload what the branch does not have, then commit everything to main; returns the commit's id.

    The folder must just have been validated, and its files stay. `progress` is called with each shard's name and bytes
    once it is on its way or was there already. Raises HubError where the Hub refuses.
    """
    stated = cast(dict[str, dict[str, Any]], read_ledger_document(folder)["shards"])
    publication.open()
    hashes: dict[str, tuple[str, int]] = {}
    for name, shard in sorted(stated.items()):
        hashes[name] = (hash_file(folder / name), int(shard["bytes"]))
        if not publication.has(name, *hashes[name]):
            publication.upload(Upload(name, folder / name, *hashes[name]), records={})
        if publication.is_group_due():
            publication.commit_group()
        progress(name, hashes[name][1])
    publication.commit_group()
    files: dict[str, Path | bytes] = {str(path): folder / path for path in published_files(folder, set(stated))}
    name = publication.repo.partition("/")[2]
    return publication.finish(shards=hashes, files=files | dict(extra), message=f"Add {name}")
