"""What `run` and `publish` do on the command line where the Hub is involved: show, ask, report."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from k2convert.buffers import BUFFERS
from k2convert.checkpoint.names import CARD_NAME, LEDGER_NAME
from k2convert.cli import console
from k2convert.cli import progress as progress_views
from k2convert.cli.options import parse_size
from k2convert.cli.validation_view import show_validation
from k2convert.cli.views import plan_document, run_document, show_plan, show_run
from k2convert.errors import HubError, InvalidCheckpointError
from k2convert.hub.branch import Branch, branch_name
from k2convert.hub.client import SCHEME, Hub, RepoRef, check_endpoint, parse_repo
from k2convert.hub.preflight import check_target, is_published
from k2convert.hub.source import RemoteRepo, read_file, resolve_source
from k2convert.hub.source_card import SourceCard, accepted_card, read_source_card
from k2convert.hub.xet import bound_memory
from k2convert.job.card_files import card_files, check_job_target, confirm
from k2convert.job.execute import Arrival, Assembled, TransferJob, execute_transfer, output_headers, prepare_transfer
from k2convert.job.places import Destination, OpenedSource, repo_without_revision
from k2convert.job.prepare import LocalJob
from k2convert.job.publish import publish_folder, published_files
from k2convert.job.shard import Progress
from k2convert.job.uploads import ShardHashes, UploadRecord
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.ledger import read_ledger_document, summarize
from k2convert.validate.contract.findings import Verdict
from k2convert.validate.contract.streamed import check_streamed
from k2convert.validate.results import ValidationReport
from k2convert.validate.validation import validate_checkpoint


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """What the user said: the source as written, `--max-disk`, and the switches."""

    source: str
    max_disk: str | None
    private: bool
    yes: bool
    dry_run: bool
    as_json: bool


def run_transfer(
    local: LocalJob, opened: OpenedSource, destination: Destination, *, hub: Hub, options: TransferOptions
) -> None:
    """Plan, show or do a job with the Hub as source, destination or both."""
    target, card = None, SourceCard()
    if destination.repo is not None:
        target = check_job_target(local, opened, repo=destination.repo, private=options.private, hub=hub)
        for notice in target.notices:
            console.print_note(f"note: {notice}")
        card = accepted_card(hub, opened.card)
    room = None if options.max_disk is None else parse_size(options.max_disk)
    job = prepare_transfer(local=local, hub=hub, remote=opened.remote, target=target, max_disk=room)
    if options.dry_run:
        _show_plan(job, options, destination)
        return
    if target is not None and job.is_published:
        Branch(hub, target, job.branch).delete()  # killed between the commit and this, it may be there
        console.print_note(f"{target.repo}: main holds this result already")
        if options.as_json:
            console.print_json({"repo": target.repo, "commit": target.head, "published_before": True})
        return
    if target is not None:
        confirm(target, total_bytes=local.plan.data_bytes, yes=options.yes, ask=typer.confirm)
    start = time.monotonic()
    with _display(local, quiet=options.as_json) as display:
        made = _assembler(job, opened, card, show=not options.as_json)
        arrival = execute_transfer(job, report=_reporter(display), assembled=made)
    _show_arrival(job, arrival, destination, seconds=time.monotonic() - start, as_json=options.as_json)


def _assembler(job: TransferJob, opened: OpenedSource, card: SourceCard, *, show: bool) -> Assembled:
    def assembled(folder: Path, uploads: dict[str, UploadRecord]) -> dict[str, bytes]:
        if job.target is None:
            return {}
        contract = check_streamed(
            folder, headers=output_headers(job.local), scans=[upload.scan for upload in uploads.values()]
        )
        validation = ValidationReport(str(folder), contract, weights=None, layers=None, comparison=None)
        if not validation.passed:
            if show:
                show_validation(validation)
            failed = ", ".join(str(rule.number) for rule in contract.rules if rule.verdict == Verdict.FAIL)
            raise InvalidCheckpointError(
                f"{job.target.repo}: the result does not validate (rules {failed}), so main was left alone. The shards "
                f"are on its branch {job.branch}."
            )
        return card_files(folder, repo=job.target.repo, base_model=opened.repo, source=card, validation=validation)

    return assembled


def _display(local: LocalJob, *, quiet: bool) -> progress_views.RunDisplay:
    return progress_views.RunDisplay(
        what="transfer",
        num_shards=len(local.plan.jobs),
        finished=len(local.finished),
        total_bytes=sum(shard.bytes_in for shard in local.plan.jobs),
        done_bytes=sum(shard.bytes_in for shard in local.plan.jobs if shard.name in local.finished),
        quiet=quiet,
    )


def _reporter(display: progress_views.RunDisplay) -> Any:
    def report(progress: Progress) -> None:
        display.advance(
            bytes_in=progress.bytes_in,
            bytes_out=progress.bytes_out,
            tensors=progress.tensors,
            shard_finished=progress.finished is not None,
        )

    return report


def _show_plan(job: TransferJob, options: TransferOptions, destination: Destination) -> None:
    needed = job.disk.needed_bytes + job.base_bytes
    document = plan_document(job.local) | {
        "source": options.source,
        "destination": _name(destination),
        "work_folder": str(destination.folder),
        "source_commit": job.remote.commit if job.remote is not None else None,
        "max_disk": job.max_disk,
        "disk_needed": needed,
        "branch": job.branch if job.target is not None else None,
        "private": job.target.private if job.target is not None else None,
        "notices": list(job.target.notices) if job.target is not None else [],
    }
    if options.as_json:
        console.print_json(document)
        return
    show_plan(job.local, source=options.source, destination=_name(destination))
    if job.remote is not None:
        console.print_line(f"source: {job.remote.repo} at commit {job.remote.commit}")
    if job.target is not None:
        kind = "private" if job.target.private else "public"
        console.print_line(f"publishes to {job.target.repo} ({kind}) by way of its branch {job.branch}")
    console.print_line(
        f"at most {console.format_bytes(job.max_disk)} of disk at once; {console.format_bytes(needed)} would do"
    )
    console.print_next(console.own_command(without="--dry-run"))


def _name(destination: Destination) -> str:
    return f"hf://{destination.repo}" if destination.repo is not None else str(destination.folder)


def _show_arrival(
    job: TransferJob, arrival: Arrival, destination: Destination, *, seconds: float, as_json: bool
) -> None:
    totals = summarize(arrival.records)
    if as_json:
        more = {"destination": _name(destination), "repo": destination.repo, "commit": arrival.commit}
        console.print_json(run_document(job.local, totals, seconds) | more)
        return
    show_run(job.local, totals, seconds)
    if arrival.commit is None:
        console.print_next(console.command("k2convert", "validate", destination.folder))
    else:
        console.print_line(f"{job.hub.endpoint}/{destination.repo} at commit {arrival.commit}")
        console.print_next(f"vllm serve {destination.repo} --trust-remote-code")


def publish(folder: Path, *, repo: str, private: bool, yes: bool, base_model: str | None, as_json: bool) -> None:
    """Validate a finished folder and publish it."""
    check_endpoint()
    bound_memory()
    hub = Hub(notify=console.print_note)
    repo = _own_repo(repo)
    base = None if base_model is None else _base_repo(base_model)
    ledger = read_ledger_document(folder)
    base = base or ledger["source"].get("repo")
    revision = None if base_model else ledger["source"].get("revision")
    source = None if base is None else resolve_source(hub, RepoRef(base, revision))
    card = SourceCard() if source is None else _source_card(hub, source)
    file_bytes = {name: int(shard["bytes"]) for name, shard in ledger["shards"].items()}
    target = check_target(hub, repo=repo, private=private, file_bytes=file_bytes, licence=card.licence, source=source)
    for notice in target.notices:
        console.print_note(f"note: {notice}")
    is_published(hub, target, fingerprint=ledger["fingerprint"], ledger_name=LEDGER_NAME)
    card = accepted_card(hub, card)
    others = ", ".join(str(path) for path in published_files(folder, set(file_bytes)))
    console.print_note(f"beside {len(file_bytes)} shards these files go: {others}")
    confirm(target, total_bytes=sum(file_bytes.values()), yes=yes, ask=typer.confirm)
    total_bytes, hashes = sum(file_bytes.values()), ShardHashes()
    with progress_views.PassDisplay(what="validate", total_bytes=total_bytes, quiet=as_json) as display:
        report = validate_checkpoint(folder=folder, source=None, progress=display.advance, passing=hashes.add)
    if not report.passed:
        raise InvalidCheckpointError(
            f"{folder}: does not validate, so it is not published. `k2convert validate {folder}` says why."
        )
    BUFFERS.clear()
    branch = Branch(hub, target, branch_name(fingerprint_digest(ledger["fingerprint"])))
    with progress_views.PassDisplay(what="publish", total_bytes=total_bytes, quiet=as_json) as display:
        commit = publish_folder(
            folder=folder,
            branch=branch,
            sha256=hashes.sha256,
            extra=card_files(folder, repo=repo, base_model=base, source=card, validation=report),
            sent=display.advance,
        )
    if as_json:
        console.print_json({"repo": repo, "commit": commit, "private": target.private})
        return
    console.print_line(f"{hub.endpoint}/{repo} at commit {commit}")
    console.print_next(f"vllm serve {repo} --trust-remote-code")


def _own_repo(text: str) -> str:
    """The repository to publish to; raises HubError for a malformed name and for a revision."""
    return repo_without_revision(_named(text))


def _base_repo(text: str) -> str:
    """The base model as the card names it; raises HubError for anything but a repository's name."""
    ref = _named(text)
    if ref.revision is not None:
        raise HubError(f"--base-model {text}: a card names the repository alone. Leave out @{ref.revision}.")
    return ref.repo


def _named(text: str) -> RepoRef:
    ref = parse_repo(f"{SCHEME}{text.removeprefix(SCHEME)}")
    assert ref is not None
    return ref


def _source_card(hub: Hub, source: RemoteRepo) -> SourceCard:
    """The base model's card, for its licence."""
    file = source.files.get(CARD_NAME)
    if file is None:
        return SourceCard()
    return read_source_card(read_file(hub, source.repo, source.commit, file).decode(errors="replace"))
