"""The checks of a repository that a job has published to."""

from pathlib import Path

from command import RunCli
from faults import Fault
from loopback import LoopbackHub

JOB = ("run", "hf://moon/tiny", "hf://me/out", "--yes")

ALL_RULES = "19 of 19 rules of the servable contract were checked, with the source."
WITHOUT_SOURCE = "14 of 19 rules of the servable contract were checked. Not checked: rules 7, 8, 12, 17, 18"


def assert_published(server: LoopbackHub, local: Path, repo: str = "me/out", *, checked: str = ALL_RULES) -> None:
    """Main has one commit of ours, with the bytes of a local run, and the work branch is deleted.

    Card and report say what was checked.
    """
    stored = server.store.repos[repo]
    assert stored.num_commits("main") == 2
    assert list(stored.refs) == ["main"]
    for path in sorted(p for p in local.rglob("*") if p.is_file()):
        name = path.relative_to(local).as_posix()
        if not name.startswith(".") and name != "k2convert.json":  # the ledger names the source's commit
            assert server.store.read(repo, name) == path.read_bytes(), name
    for name in ("README.md", "report.md"):
        text = server.store.read(repo, name).decode()
        assert checked in text, name
        assert "## Needs\n\nWeights: " in text, name
    assert not any(name.startswith(".k2convert") for name in stored.files())


def stop_before_main(server: LoopbackHub, cli: RunCli) -> None:
    server.traffic.inject(Fault("POST", "/commit/main", status=403))
    cli(*JOB, code=1)
    server.traffic.clear()
