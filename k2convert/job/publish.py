"""Publish a result on the Hub: validate it, write its card and report, and put everything on main in one commit.

A job with a Hub destination ends here with shards that are on the work branch already. A finished local folder is
validated, uploaded to a work branch and committed in the same way.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, Final

from k2convert.check.results import ValidationReport
from k2convert.check.validate import validate_checkpoint, validate_sent
from k2convert.checkpoint.files import TEMPORARY_SUFFIX, read_text_file, walk_folder
from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import (
    Checkpoint,
    engine_links_out,
    links_out,
    list_sidecars,
    open_checkpoint,
    refuse_links_out,
)
from k2convert.checkpoint.names import (
    CARD_NAME,
    CONFIG_NAME,
    EVALUATION_NAME,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    LEDGER_NAME,
)
from k2convert.checkpoint.reader import Bytes, leave_cache
from k2convert.errors import CheckpointError, HubError, UnservableError, remedy
from k2convert.hub.branch import Branch, Upload, branch_name
from k2convert.hub.client import MAIN, Hub, RepoRef, check_endpoint, ignore
from k2convert.hub.download import file_sha256
from k2convert.hub.own_card import card_to_commit, card_words, check_card, find_card, published_card
from k2convert.hub.preflight import Target, check_target
from k2convert.hub.source import RemoteRepo, find_commit, matches, read_file, resolve_source
from k2convert.hub.source_card import SourceCard, accepted_card, read_source_card
from k2convert.job.assemble import gone_files
from k2convert.job.locations import LOG_SUFFIXES
from k2convert.job.pipeline import Pipeline, Stages
from k2convert.job.prepare import Job
from k2convert.job.published import is_published
from k2convert.job.resources import Item, output_headers
from k2convert.job.results import OpenResult
from k2convert.job.transfers import Uploads
from k2convert.machine import BUFFERS
from k2convert.records.command import shell_line
from k2convert.records.events import SILENT, Events
from k2convert.records.journal import Journal, Published, record_published
from k2convert.records.ledger import Ledger, read_ledger

_NOT_PUBLISHED: Final = (TEMPORARY_SUFFIX, *LOG_SUFFIXES)


def publish_result(job: Job, target: Target, uploads: Uploads, names: Sequence[str]) -> tuple[str, ValidationReport]:
    """Validate a job's result and commit it to main; returns the commit and the findings; raises UnservableError."""
    from k2convert.report import card_files

    folder = job.destination.folder
    source = job.source.checkpoint
    if job.source.remote is None:
        source = _as_it_is(source)
    else:
        copies = source.folder
        own = [Path(name) for name in (CONFIG_NAME, INDEX_NAME) if (copies / name).exists()]
        for relative in [*own, *list_sidecars(copies)]:
            file = job.source.remote.files.get(relative.as_posix())
            if file is None or not matches(copies / relative, file):
                raise HubError(
                    f"{copies / relative}: differs from the file of {job.source.remote.repo}, so main was not changed. "
                    "Run the same command again: the file is fetched again."
                )
    records = uploads.records.values()
    validation = validate_sent(
        folder, headers=output_headers(job.plan, source=source.tensors), source=source, records=records
    )
    if not validation.passed:
        failed = ", ".join(map(str, validation.contract.failed))
        reason = "decoded weights differ from the records"
        if failed:
            reason = f"rules {failed}"
        raise UnservableError(
            f"{target.repo}: the result does not validate ({reason}), so {target.revision} was not "
            f"changed. The shards are on the branch {uploads.branch.name}.",
            validation,
        )
    carried = [EVALUATION_NAME] if (folder / EVALUATION_NAME).exists() else []
    files: dict[str, Path | bytes] = {name: folder / name for name in (*names, *carried)}
    files |= card_files(
        folder,
        repo=target.repo,
        revision=target.version,
        base_model=job.source.repo,
        source=job.card or SourceCard(),
        validation=validation,
        tensors=(output for shard in job.plan.jobs for output in shard.outputs),
    )
    _complete_card(files, job.hub, here=None, there=published_card(job.hub, target))
    gone = gone_files(job.description, names) | {name for name in target.files if name.endswith(".py")}
    config = target.files.get(CONFIG_NAME)
    if not carried and config is not None and not matches(folder / CONFIG_NAME, config):
        gone.add(EVALUATION_NAME)  # one that is there would measure a different config.json
    commit = uploads.commit_to_main(files=files, gone=gone, message=f"Add {target.repo.partition('/')[2]}")
    record_published(folder, Published(target.name, commit))
    return commit, validation


def _as_it_is(source: Checkpoint) -> Checkpoint:
    """Return a source with the headers and the config that its folder has now; those of K2 take 100 MB."""
    if any(read_header(source.path(shard)).digest != header.digest for shard, header in source.headers.items()):
        return open_checkpoint(source.folder)
    return replace(source, config_text=read_text_file(source.folder / CONFIG_NAME))


def _complete_card(files: dict[str, Path | bytes], hub: Hub, *, here: str | None, there: str | None) -> None:
    """Replace the card among the files by the one to commit, which may be the owner's; none if that is there."""
    new = files.pop(CARD_NAME)
    assert isinstance(new, bytes)
    card = card_to_commit(hub, new, here=here, there=there)
    if card is not None:
        files[CARD_NAME] = card


def clean_up_published(job: Job, target: Target) -> str:
    """Clean up after a job whose result the target's branch already holds; returns the commit."""
    Branch(job.hub, target, branch_name(job.digest)).delete()  # a run killed after its last commit leaves it
    record_published(job.destination.folder, Published(target.name, str(target.head)))
    return str(target.head)


@dataclass(frozen=True, slots=True)
class Publication:
    """A finished local folder and its repository, checked. `others` are files next to the shards, with their sha256."""

    folder: Path
    ledger: Ledger
    hub: Hub
    target: Target
    base_model: str | None
    card: SourceCard
    others: Mapping[Path, str]
    gone: Collection[str]  # what the job once copied from the source, and no longer does
    generated: Sequence[str]
    own_card: str | None
    their_card: str | None
    is_published: bool

    @property
    def files(self) -> list[str]:
        """Files that are published beside the shards, as they are shown."""
        names = {*map(str, self.others), *self.generated}
        words = card_words(self.own_card, self.their_card, self.target.repo)
        if words:
            return [*sorted(names - {CARD_NAME}), words]
        return sorted(names)


def prepare_publication(
    folder: Path, *, repo: str, revision: str, private: bool, base_model: str | None, hub: Hub
) -> Publication:
    """Check a folder's ledger, the token and the repository; raises CheckpointError or HubError. Uploads nothing."""
    from k2convert.report import REPORT_NAMES, current_report, report_names

    check_endpoint()
    ledger = read_ledger(folder)
    refuse_links_out(folder, (CONFIG_NAME, INDEX_NAME, LEDGER_NAME, HF_QUANT_CONFIG_NAME, *engine_links_out(folder)))
    base = base_model or ledger.source.repo
    source = _published_source(hub, ledger) if base_model is None else resolve_source(hub, RepoRef(base_model))
    card = SourceCard()
    if source is not None and CARD_NAME in source.files:
        data = read_file(hub, source.repo, source.commit, source.files[CARD_NAME])
        card = read_source_card(data.decode(errors="replace"))
    file_bytes = {name: shard.num_bytes for name, shard in ledger.shards.items()}
    target = check_target(
        hub, repo=repo, private=private, file_bytes=file_bytes, licence=card.licence, source=source, revision=revision
    )
    own_card = None if Path(CARD_NAME) in links_out(folder) else find_card(folder)
    check_card(hub, own_card, where=folder / CARD_NAME)
    others = published_files(folder, set(file_bytes))
    job = Journal(folder).job_of(ledger)
    return Publication(
        folder=folder,
        ledger=ledger,
        hub=hub,
        target=target,
        base_model=base,
        card=accepted_card(hub, card),
        others={path: file_sha256(folder / path) for path in others},
        gone=set() if job is None else gone_files(job, map(str, others)),
        generated=[CARD_NAME, *([] if current_report(folder) else report_names(folder))],
        own_card=own_card,
        their_card=published_card(hub, target),
        is_published=is_published(
            hub,
            target,
            ledger.fingerprint,
            {str(path): folder / path for path in others if str(path) not in (CARD_NAME, *REPORT_NAMES)},
            is_same=lambda theirs: theirs.weights == ledger.weights,
        ),
    )


def _published_source(hub: Hub, ledger: Ledger) -> RemoteRepo | None:
    """Return the repository that the ledger names, at its commit, or at main if that is gone; None if there is none."""
    stated = ledger.source
    if stated.repo is None:
        return None
    if (source := find_commit(hub, stated.repo, stated.revision)) is not None:
        return source
    source = find_commit(hub, stated.repo, None)
    note = f"the card's facts are those of {MAIN}"
    if source is None:
        note = "the card states no license of it. If it has a new name, pass that as --base-model"
    hub.warn(f"note: {stated.repo} does not have the commit {str(stated.revision)[:7]}: {note}")
    return source


def published_files(folder: Path, shards: set[str]) -> list[Path]:
    """Return the relative paths of everything in a finished folder except shards, logs, hidden and temporary files, and
    links out of it.
    """
    everything = {p.relative_to(folder) for p in walk_folder(folder) if p.is_file()} - links_out(folder).keys()
    return [
        p
        for p in sorted(everything)
        if not p.parts[0].startswith(".") and str(p) not in shards and p.suffix not in _NOT_PUBLISHED
    ]


def validate_publication(
    publication: Publication, opened: OpenResult, *, events: Events = SILENT
) -> tuple[ValidationReport, dict[str, str]]:
    """Validate the folder and hash its shards in the same pass (sha256); raises UnservableError, CalibrationError."""
    folder = publication.folder
    digests = defaultdict[str, Any](hashlib.sha256)

    def hash_bytes(shard: str, data: Bytes) -> None:
        digests[shard].update(data.data)

    with remedy("Run the conversion again: it replaces what is damaged."):
        validation = validate_checkpoint(
            folder=folder, source=opened.source, events=events, visitor=hash_bytes, shards=opened.shards
        )
    if not validation.passed:
        words = () if opened.source_name is None else ("--source", opened.source_name)
        command = shell_line(("k2convert", "validate", str(folder), *words))
        raise UnservableError(f"{folder}: does not validate, so it is not published. `{command}` says why.", validation)
    BUFFERS.clear()
    return validation, {shard: digest.hexdigest() for shard, digest in digests.items()}


def publish_folder(
    publication: Publication, validation: ValidationReport, hashes: Mapping[str, str], *, events: Events = SILENT
) -> str:
    """Upload what the branch lacks, then commit all to main; returns the commit. Raises CheckpointError, HubError."""
    from k2convert.report import card_files, current_report

    folder = publication.folder
    ledger = publication.ledger
    target = publication.target
    branch = Branch(publication.hub, target, branch_name(ledger.digest))
    branch.open()
    uploads = {
        name: Upload(name, folder / name, hashes[name], shard.num_bytes)
        for name, shard in sorted(ledger.shards.items())
    }
    missing: list[Item] = []
    for upload in uploads.values():
        if branch.has(upload.name, upload.sha256, upload.num_bytes):
            events.transferred(uploaded=upload.num_bytes, is_new=False)
        else:
            missing.append(Item(upload.name, (), upload.num_bytes))
    sending = _FolderUploads(branch, uploads, events)
    stages = Stages(fetch=None, convert=ignore, drop_source=ignore, drop_output=ignore, uploads=sending, num_workers=0)
    Pipeline([], stages=stages, room=0, source_bytes={}, stop=Event(), to_upload=missing).run()
    for path, sha256 in publication.others.items():
        if file_sha256(folder / path) != sha256:
            raise CheckpointError(f"{folder / path}: changed after it was validated. Run the same command again.")
    files: dict[str, Path | bytes] = {str(path): folder / path for path in publication.others}
    files |= card_files(
        folder,
        repo=target.repo,
        revision=target.version,
        base_model=publication.base_model,
        source=publication.card,
        validation=validation,
        tensors=open_checkpoint(folder).tensors.values(),
        retained=current_report(folder),
    )
    _complete_card(files, publication.hub, here=publication.own_card, there=publication.their_card)
    shards = {name: (upload.sha256, upload.num_bytes) for name, upload in uploads.items()}
    message = f"Add {target.repo.partition('/')[2]}"
    return branch.commit_to_main(shards=shards, files=files, gone=publication.gone, message=message)


@dataclass(frozen=True, slots=True)
class _FolderUploads:
    """The pipeline's UploadStage for files that stay where they are."""

    branch: Branch
    uploads: Mapping[str, Upload]
    events: Events

    @property
    def num_pending(self) -> int:
        return self.branch.num_pending

    def upload(self, name: str) -> None:
        upload = self.uploads[name]
        operation = self.branch.send(upload, sent=lambda sent: self.events.transferred(uploaded=sent))
        self.branch.add(upload, operation, records={})
        leave_cache(upload.path)

    def is_group_due(self) -> bool:
        return self.branch.is_group_due()

    def commit(self) -> list[str]:
        return [upload.name for upload in self.branch.commit_group()]
