"""`publish`: validate a finished folder and publish it on the Hub."""

from functools import partial

from k2convert.check.remote import folder_bytes
from k2convert.checkpoint.index import missing_sidecars
from k2convert.cli import console
from k2convert.cli.progress import Display
from k2convert.cli.verbs import PublishOptions
from k2convert.cli.views import confirm, show_commit
from k2convert.errors import HubError, counted
from k2convert.hub.branch import Branch, branch_name
from k2convert.hub.client import SCHEME, Hub, RepoRef, bound_memory, check_endpoint, parse_repo, target_revision
from k2convert.job.locations import Destination
from k2convert.job.opened import open_origin
from k2convert.job.publish import prepare_publication, publish_folder, validate_publication
from k2convert.records.events import Extent
from k2convert.records.journal import Published, check_shards_are_here, find_published, has_left, record_published


def publish(options: PublishOptions) -> None:
    """Validate a finished folder and publish it, unless the branch has it already."""
    folder = options.folder
    ref = _parse_repo(options.repo)
    revision = target_revision(ref)
    if has_left(folder):
        published = find_published(folder)
        repo = str(ref).removeprefix(SCHEME)
        if published is None or published.repo != repo:
            check_shards_are_here(folder)  # says where they are
            return
        console.show(
            {"repo": repo, "commit": published.commit, "published_before": True},
            f"{folder}: published as {published}. Its shards are no longer here",
        )
        console.print_next(console.command("k2convert", "validate", f"{SCHEME}{repo}"))
        return
    check_endpoint()
    bound_memory()
    hub = Hub(notify=console.notifier())
    base_model = None
    if options.base_model is not None:
        base_model = _parse_repo(options.base_model)
    if base_model is not None and base_model.revision is not None:
        advice = f"Leave out @{base_model.revision}."
        raise HubError(f"--base-model {base_model}: a card names the repository only. {advice}")
    publication = prepare_publication(
        folder,
        repo=ref.repo,
        revision=revision,
        private=not options.public,
        base_model=None if base_model is None else base_model.repo,
        hub=hub,
    )
    target = publication.target
    ledger = publication.ledger
    if publication.base_model is None:
        console.print_note("note: the card names no model that this was made from: add --base-model owner/name")
    for notice in target.notices:
        console.print_note(f"note: {notice}")
    if publication.is_published:
        Branch(hub, target, branch_name(ledger.digest)).delete()  # a run killed after its last commit leaves it
        console.print_note(f"{target.repo}: {revision} already holds this result")
        commit = str(target.head)
    else:
        if not console.Asked.quiet:
            files = ", ".join(publication.files)
            console.print_note(f"publishes {counted(len(ledger.shards), 'shard')} and these files: {files}")
        with open_origin(options.source, hub=hub) as (origin, shards):
            for name, problem in missing_sidecars(folder):
                console.print_note(f"warning: {folder}: {name}: {problem}")
            confirm(target, total_bytes=ledger.num_bytes, yes=options.yes)
            with Display("validate", Extent({"check": (folder_bytes(folder), 0)})) as events:
                validation, hashes = validate_publication(publication, source=origin, shards=shards, events=events)
            if not console.Asked.quiet:
                console.print_note(validation.contract.summary)
            with Display("publish", Extent({"upload": (ledger.num_bytes, 0)})) as events:
                commit = publish_folder(publication, validation, hashes, events=events)
    record_published(folder, Published(target.name, commit))
    console.show(
        {"repo": target.repo, "commit": commit, "private": target.private},
        partial(show_commit, hub, Destination(folder, target.repo, revision), commit),
    )


def _parse_repo(text: str) -> RepoRef:
    ref = parse_repo(f"{SCHEME}{text.removeprefix(SCHEME)}")
    assert ref is not None  # with the scheme it is a repository or an error
    return ref
