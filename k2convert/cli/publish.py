"""`publish`: validate a finished folder and publish it on the Hub."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.options import (
    Json,
    Public,
    Quiet,
    SourceOption,
    Yes,
    argument,
    check_folder,
    check_not_address,
    option,
)
from k2convert.errors import HubError, counted
from k2convert.hub.client import SCHEME, Hub, RepoRef, bound_memory, check_endpoint, parse_repo, target_revision

if TYPE_CHECKING:
    from k2convert.job.publish import Publication


def publish(
    folder: Annotated[Path, argument("FOLDER", "Folder of the converted checkpoint.", check_folder)],
    repo: Annotated[str, option("Repository to publish on.", "owner/name[@branch]", check=check_not_address)],
    source: SourceOption = None,
    public: Public = False,
    yes: Yes = False,
    base_model: Annotated[
        str | None,
        option(
            "Repository of the source, for the card and its license [default: the ledger's].",
            "owner/name",
            check=check_not_address,
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Validate a converted checkpoint and publish it on the Hub. It makes one commit, on main or a branch."""
    from k2convert.cli import console
    from k2convert.cli.job_view import show_commit
    from k2convert.hub.branch import Branch, branch_name
    from k2convert.job.locations import Destination
    from k2convert.job.publish import prepare_publication
    from k2convert.job.results import open_result_at
    from k2convert.records.journal import Published, has_left, record_published

    console.set_output(json=json, quiet=quiet)
    say_when_interrupted(lambda: "what was uploaded is kept. The same command resumes")
    ref = _parse_repo(repo)
    revision = target_revision(ref)
    if has_left(folder):
        _show_left(folder, str(ref).removeprefix(SCHEME))
        return
    check_endpoint()
    bound_memory()
    hub = Hub(notify=console.notifier(), warn=console.print_note)
    model = None if base_model is None else _parse_repo(base_model)
    if model is not None and model.revision is not None:
        raise HubError(f"--base-model {model}: a card names the repository only. Leave out @{model.revision}.")
    publication = prepare_publication(
        folder,
        repo=ref.repo,
        revision=revision,
        private=not public,
        base_model=None if model is None else model.repo,
        hub=hub,
    )
    target = publication.target
    ledger = publication.ledger
    if publication.base_model is None:
        console.print_note("note: the card names no model that this was made from: add --base-model owner/name")
    for notice in target.notices:
        console.print_note(f"note: {notice}")
    if publication.is_published:
        if source is not None:
            with open_result_at(str(folder), source=source, hub=hub):  # names what has moved
                pass
        Branch(hub, target, branch_name(ledger.digest)).delete()  # a run killed after its last commit leaves it
        console.print_note(f"{target.repo}: {revision} already holds this result")
        commit = str(target.head)
    else:
        commit = _send(publication, source, yes=yes)
    record_published(folder, Published(target.name, commit))
    console.show(
        {"repo": target.repo, "commit": commit, "private": target.private},
        partial(show_commit, hub, Destination(folder, target.repo, revision), commit),
    )


def _show_left(folder: Path, repo: str) -> None:
    """Say where the shards of a folder went; raises K2ConvertError if it is not this repository."""
    from k2convert.cli import console
    from k2convert.job.locations import named_source
    from k2convert.records.journal import check_shards_are_here, find_published
    from k2convert.records.ledger import find_ledger

    published = find_published(folder)
    if published is None or published.repo != repo:
        check_shards_are_here(folder)  # says where they are
        return
    console.show(
        {"repo": repo, "commit": published.commit, "published_before": True},
        f"{folder}: published as {published}. Its shards are no longer here",
    )
    words = named_source(folder, find_ledger(folder))
    console.print_next(console.command("k2convert", "validate", f"{SCHEME}{repo}", *words))


def _send(publication: "Publication", source: str | None, *, yes: bool) -> str:
    """Validate the folder of a publication, ask unless `yes`, and publish it. Return the commit."""
    from k2convert.check.remote import folder_bytes
    from k2convert.checkpoint.index import missing_sidecars
    from k2convert.cli import console
    from k2convert.cli.job_view import confirm
    from k2convert.cli.progress import Display
    from k2convert.job.publish import publish_folder, validate_publication
    from k2convert.job.results import open_result_at
    from k2convert.records.events import Extent

    folder = publication.folder
    num_bytes = publication.ledger.num_bytes
    if not console.Output.quiet:
        files = ", ".join(publication.files)
        console.print_note(f"publishes {counted(len(publication.ledger.shards), 'shard')} and these files: {files}")
    with open_result_at(str(publication.folder), source=source, hub=publication.hub) as opened:
        for name, problem in missing_sidecars(folder):
            console.print_note(f"warning: {folder}: {name}: {problem}")
        confirm(publication.target, total_bytes=num_bytes, yes=yes)
        with Display(Extent({"check": (folder_bytes(folder), 0)})) as events:
            validation, hashes = validate_publication(publication, opened, events=events)
        if not console.Output.quiet:
            console.print_note(validation.contract.summary)
        with Display(Extent({"upload": (num_bytes, 0)})) as events:
            return publish_folder(publication, validation, hashes, events=events)


def _parse_repo(text: str) -> RepoRef:
    ref = parse_repo(f"{SCHEME}{text.removeprefix(SCHEME)}")
    assert ref is not None  # with the scheme it is a repository or an error
    return ref
