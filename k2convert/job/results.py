"""From a path or an address to a result that can be checked, alone or against its source.

A result is compared only with the weights that it was converted from. Upstream may have changed them since: then the
comparison is refused, and says nothing about the result.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile

from k2convert.check.remote import Shards, folder_bytes
from k2convert.check.results import LayersRequest, ValidationReport
from k2convert.check.validate import is_nvfp4, validate_checkpoint
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import JOB_NAME, SHARD_SUFFIX, WORK_FOLDER
from k2convert.errors import CheckpointError, HubError
from k2convert.hub.client import Hub, RepoRef
from k2convert.hub.ranges import RemoteShards
from k2convert.hub.request_errors import HubRequestError
from k2convert.hub.source import fetch_small_files, find_commit, mark_other_files, read_headers, resolve_source
from k2convert.job.locations import commit_of, folder_of, named, open_checkpoint_at, read_destination, repo_at
from k2convert.records.command import shell_line
from k2convert.records.events import SILENT, Events
from k2convert.records.fingerprint import Source, changed_shards, copied_files
from k2convert.records.journal import Journal
from k2convert.records.ledger import MAX_NAMED, Ledger, find_ledger


@dataclass(frozen=True, slots=True)
class OpenResult:
    """A result and, if it is given, its source: their folders, and where shards that are not in them come from.

    `source_name` is the source as the user named it. `warning` says why it may differ from what was converted, if that
    is unknown. `is_gone` if the Hub no longer has the commit that was converted.
    """

    name: str
    folder: Path
    source: Checkpoint | None
    shards: Shards
    source_name: str | None
    warning: str
    is_gone: bool

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
def open_result_at(address: str, *, source: str | None, hub: Hub) -> Generator[OpenResult]:
    """Open a result and, if given, its source; either may be on the Hub. Raises any K2ConvertError.

    Of a repository there are the small files, and an empty file for every shard.
    """
    with ExitStack() as stack:
        folder = Path(address)
        shards = Shards()
        checkpoint = None
        warning = ""
        is_gone = False
        if (repo := repo_at(address)) is not None:
            remote = resolve_source(hub, repo)
            if not any(path.endswith(SHARD_SUFFIX) for path in remote.files):
                raise HubError(f"{address}: has no shards, so it holds no result. Check the name and the revision.")
            folder = stack.enter_context(folder_of(repo, shown_as=address))
            fetch_small_files(hub, remote, folder=folder)
            mark_other_files(remote, folder=folder)
            shards = Shards(result=RemoteShards(hub, remote, folder, read_headers(hub, remote, folder=folder)))
            _fetch_job(address, folder)
        if source is not None:
            ledger = None
            with suppress(CheckpointError):  # the validation names a damaged one
                ledger = find_ledger(folder)
            recipe = None if ledger is None else ledger.recipe
            pinned = commit_of(ledger, source)
            try:
                opened = stack.enter_context(open_checkpoint_at(source, hub=hub, pinned=pinned, recipe=recipe))
            except HubRequestError as error:
                if error.status != 404:
                    raise
                alone = shell_line(("k2convert", "validate", address))
                raise HubError(f"{error} `{alone}` checks the result alone.") from None
            checkpoint = opened.checkpoint
            if opened.remote is not None:
                shards = replace(shards, source=RemoteShards(hub, opened.remote, checkpoint.folder))
            warning = f"If {source} has changed since the conversion, what differs may be its own."
            if ledger is not None:
                is_known, is_gone = _check_weights(address, folder, ledger, source, opened, hub)
                if (job := Journal(folder).job_of(ledger)) is not None:
                    now = replace(job, config=checkpoint.parse_config(), copies=copied_files(checkpoint))
                    if changes := job.changes(now, folder):
                        hub.warn(f"{source} is not as at the conversion: {'; '.join(changes[:MAX_NAMED])}")
                now = "" if opened.revision is None else f" from {opened.revision[:7]}"
                if is_gone:
                    gone = str(ledger.source.revision)[:7]
                    warning = (
                        f"{ledger.source.repo} does not have the commit {gone}, which was converted: what differs{now} "
                        "may have changed since."
                    )
                elif is_known:
                    warning = ""
        yield OpenResult(address, folder, checkpoint, shards, source, warning, is_gone)


def _fetch_job(address: str, folder: Path) -> None:
    """Copy the description of the job of a repository from its work folder, if that is here: it knows the source."""
    with suppress(HubError, OSError):
        job = read_destination(address).folder / WORK_FOLDER / JOB_NAME
        if job.is_file():
            (folder / WORK_FOLDER).mkdir(exist_ok=True)
            copyfile(job, folder / WORK_FOLDER / JOB_NAME)


def _check_weights(
    address: str, folder: Path, ledger: Ledger, name: str, source: Source, hub: Hub
) -> tuple[bool, bool]:
    """Refuse a source with other weights than those that were converted (CheckpointError).

    Known of these are the headers, by the ledger; the bytes, by the job's own description, or by the hashes that the
    Hub has at the ledger's commit. Returns whether the bytes are known, and whether they are not as the commit is gone.
    """
    stated = ledger.source
    if not stated.headers or ledger.pruning is not None or is_nvfp4(source.checkpoint.tensors):
        return False, False  # nothing to compare, or the validation names the fault of such a source
    then = None
    is_of_repo = source.repo is not None and source.repo == stated.repo
    if is_of_repo and source.revision != stated.revision:
        then = find_commit(hub, str(stated.repo), stated.revision)
    headers = {shard: header.digest for shard, header in source.checkpoint.headers.items()}
    changed = changed_shards(stated.headers, headers) + sorted(stated.headers.keys() - headers.keys())
    known: dict[str, str] = {}
    job = Journal(folder).job_of(ledger)
    if job is not None and (job.source_revision is None) == (source.remote is None):
        known = job.source
    elif then is not None:
        known = {shard: str(then.files[shard].sha256) for shard in headers if shard in then.files}
    if known and not changed:
        changed = changed_shards(known, source.identities())
    is_gone = is_of_repo and source.revision != stated.revision and then is None
    if changed:
        raise _other_weights(address, ledger, name, source, named(changed), is_gone=is_gone)
    is_known = bool(known) or (is_of_repo and source.revision == stated.revision)
    return is_known, is_gone and not is_known


def _other_weights(
    address: str, ledger: Ledger, name: str, source: Source, shards: str, *, is_gone: bool
) -> CheckpointError:
    """Return the error for a source that has other `shards` than those that were converted."""
    stated = ledger.source
    origin = "the source that it was converted from"
    now = name
    advice = "Restore them, or pass the folder that was converted with --source."
    if stated.repo is not None:
        origin = f"{stated.repo} at commit {str(stated.revision)[:7]}, which it was converted from"
        advice = f"Pass {RepoRef(stated.repo, stated.revision)} with --source."
    if source.remote is not None:
        now = f"{source.remote.repo} at commit {source.remote.commit[:7]}"
        if is_gone:
            advice = f"The repository does not have the commit {str(stated.revision)[:7]} any more: leave out --source."
    new_job = shell_line(("k2convert", "run", name, "NEW"))
    return CheckpointError(
        f"{address}: {now} has other weights than {origin}: {shards}. So the two are not compared. {advice} "
        f"`{new_job}` converts what is there now."
    )
