"""Does the branch that a result goes to hold it already? Then nothing is converted or sent."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from k2convert.checkpoint.names import SHARD_SUFFIX
from k2convert.errors import CheckpointError
from k2convert.hub.client import Hub
from k2convert.hub.preflight import Target, other_weights_error
from k2convert.hub.source import changed_files, find_commit, matches
from k2convert.job.locations import fetch_ledger, named
from k2convert.records.document import JsonObject
from k2convert.records.fingerprint import JobDescription, Source
from k2convert.records.journal import Journal
from k2convert.records.ledger import Ledger


def is_published(
    hub: Hub, target: Target, fingerprint: JsonObject, files: Mapping[str, Path], *, is_same: Callable[[Ledger], bool]
) -> bool:
    """Return whether the target's branch has the result with this fingerprint, and these `files` by their names there.

    `is_same` tells whether the shards of another ledger are the same: then the rest is to be published again. Raises
    HubError if the branch has any other weights.
    """
    there = target.files
    if target.head is None or not target.has_weights:
        return False
    ledger = None
    with suppress(CheckpointError):
        ledger = fetch_ledger(hub, target.repo, target.head, there)
    if ledger is None or not (ledger.fingerprint == fingerprint or is_same(ledger)):
        raise other_weights_error(target)
    if ledger.fingerprint != fingerprint or not ledger.shards:
        return False
    has_shards = all(name in there and there[name].num_bytes == s.num_bytes for name, s in ledger.shards.items())
    return has_shards and all(name in there and matches(path, there[name]) for name, path in files.items())


def has_shards(ledger: Ledger, description: JobDescription, source: Source, folder: Path, hub: Hub) -> bool:
    """Return whether a published result has the shards of this job: by its records, or because the source's are."""
    if not description.describes(ledger.fingerprint):
        return False
    records, _ = Journal(folder).find_records(description.digest)
    if {name: record.blake3 for name, record in records.items()} == {n: s.blake3 for n, s in ledger.shards.items()}:
        return True
    if source.remote is None or source.repo != ledger.source.repo:
        return False
    then = find_commit(hub, source.remote.repo, ledger.source.revision)
    commit = str(ledger.source.revision)[:7]
    if then is None:
        hub.warn(f"{source.repo} does not have the commit {commit} that was published, so nobody knows its weights")
        return False
    if changed := [path for path in changed_files(then, source.remote) if path.endswith(SHARD_SUFFIX)]:
        hub.warn(f"the source has other weights than at commit {commit}, which was published: {named(changed)}")
        return False
    hub.warn(f"{folder} is not the folder that converted what is published: every shard is converted again")
    return True
