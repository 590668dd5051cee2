"""`status` after publishing: what a repository holds, and where the result of a work folder went."""

from pathlib import Path
from typing import Any

from k2convert.checkpoint.files import parse_json_object
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.cli import console
from k2convert.errors import HubError, remedy
from k2convert.hub.client import Hub, parse_repo
from k2convert.hub.source import RemoteRepo, read_file, resolve_source
from k2convert.records.command import read_command
from k2convert.records.ledger import TOTAL, Ledger, parse_ledger
from k2convert.records.publication import find_published, has_left


def show_repository(text: str, *, as_json: bool) -> None:
    """Say what hf://owner/name[@revision] holds; raises HubError if it is not a result of k2convert."""
    hub, ref = Hub(notify=console.print_note), parse_repo(text)
    assert ref is not None  # with the scheme it is a repository or an error
    repo = resolve_source(hub, ref)
    ledger = _read_ledger(hub, repo, text)
    missing = [n for n, s in ledger.shards.items() if n not in repo.files or repo.files[n].num_bytes != s.num_bytes]
    document = _repository_document(repo, ledger, missing)
    if as_json:
        console.print_json(document)
        return
    kind = "private" if repo.private else "public"
    count, size = len(ledger.shards), console.format_bytes(ledger.num_bytes)
    word = "complete" if document["complete"] else "not complete"
    console.print_line(f"{text} ({kind}) at commit {repo.commit}: {word}: {count} shards, {size}")
    if missing:
        console.print_line(f"shards missing or of a wrong size: {len(missing)} of {count}, first {missing[0]}")
    for problem in ledger.problems:
        console.print_line(f"{LEDGER_NAME}: {problem}")
    recipe = ledger.recipe
    console.print_line(f"recipe {recipe.get('name')}: rule {recipe.get('rule')}, layout {recipe.get('layout')}")
    if ledger.repo is not None:
        console.print_line(f"converted from {ledger.repo} at commit {ledger.revision}")
    if TOTAL in ledger.totals:
        console.print_line(f"weight error: SQNR {ledger.totals[TOTAL].sqnr_db:.2f} dB")
    console.print_next(console.command("k2convert", "validate", text))


def _read_ledger(hub: Hub, repo: RemoteRepo, text: str) -> Ledger:
    file = repo.files.get(LEDGER_NAME)
    if file is None:
        raise HubError(
            f"{text}: has no {LEDGER_NAME} at commit {repo.commit[:12]}, so it holds no result of k2convert. Check the "
            "name and the revision. A job that is not finished leaves main as it is: ask its work folder."
        )
    data = read_file(hub, repo.repo, repo.commit, file)
    with remedy("Choose a different revision, or publish the result again."):
        return parse_ledger(parse_json_object(data.decode(errors="replace"), where=f"{text}: {LEDGER_NAME}"))


def _repository_document(repo: RemoteRepo, ledger: Ledger, missing: list[str]) -> dict[str, Any]:
    return {
        "complete": bool(ledger.shards) and not missing and not ledger.problems,
        "published": {"repo": repo.repo, "commit": repo.commit},
        "private": repo.private,
        "shards": len(ledger.shards),
        "bytes": ledger.num_bytes,
        "missing": missing,
        "problems": list(ledger.problems),
        "source": {"repo": ledger.repo, "revision": ledger.revision},
        "recipe": ledger.recipe,
        "fingerprint": ledger.fingerprint,
    }


def published_document(folder: Path) -> dict[str, Any]:
    """Return where the result of a folder was published, as plain data."""
    found = find_published(folder)
    return {"published": None if found is None else {"repo": found.repo, "commit": found.commit}}


def show_published(folder: Path) -> bool:
    """Say where the result of a folder went; return whether the state's next step was said too."""
    found = find_published(folder)
    if found is not None:
        console.print_line(f"published as {found}")
    if not has_left(folder):
        return False
    if found is None:
        console.print_note("uploaded, but not known to be on main: the same `k2convert run` command finishes the job")
        if (command := read_command(folder)) is not None:
            console.print_next(command.line(here=str(Path.cwd())))
    else:
        console.print_next(console.command("k2convert", "validate", f"hf://{found.repo}"))
    return True
