"""The checks of a repository that a job has published to."""

import json
from pathlib import Path

from command import RunCli
from faults import Fault
from loopback import LoopbackHub

JOB = ("run", "hf://moon/tiny", "hf://me/out", "--yes")
WORK = Path("k2convert-work/me--out")

ALL_RULES = "19 of 19 rules of the servable contract were checked, with the source."
WITHOUT_SOURCE = "14 of 19 rules of the servable contract were checked. Not checked: rules 7, 8, 12, 17, 18"
WRITTEN = {"README.md", "report.html", "report.md", "report.png", ".gitattributes"}


def assert_published(
    server: LoopbackHub, local: Path, repo: str = "me/out", *, branch: str = "main", checked: str = ALL_RULES
) -> None:
    """The branch has one commit of ours, with the files and bytes of a local run; the work branch is deleted.

    The figures of an evaluation are those of the local run. Card and report say what was checked.
    """
    stored = server.store.repos[repo]
    assert stored.num_commits(branch) == (2 if branch == "main" else 1), "main has the Hub's own first commit too"
    assert stored.refs.keys() == {"main", branch}
    paths = (path for path in local.rglob("*") if path.is_file())
    names = {name for path in paths if not (name := path.relative_to(local).as_posix()).startswith(".")}
    assert names <= stored.files(branch).keys() <= names | WRITTEN
    for name in sorted(names - WRITTEN - {"k2convert.json", "evaluation.json"}):  # these two name the source
        assert server.store.read(repo, name, branch) == (local / name).read_bytes(), name
    card, report = (server.store.read(repo, name, branch).decode() for name in ("README.md", "report.md"))
    for text in (card, report):
        assert checked in text
        assert "## Needs\n\nWeights: " in text
    if branch != "main":
        assert f"vllm serve {repo} --revision {branch} " in card
    if "evaluation.json" in names:
        assert "## Evaluation of the whole model" in card
        ours, theirs = (
            json.loads(data)
            for data in (server.store.read(repo, "evaluation.json", branch), (local / "evaluation.json").read_bytes())
        )
        for part in ("figures", "layers", "worst"):
            assert ours["rows"][0][part] == theirs["rows"][0][part]
        assert ours["rows"][0]["model"]["weights"] == theirs["rows"][0]["model"]["weights"]


def stop_before_main(server: LoopbackHub, cli: RunCli, *job: object) -> None:
    server.traffic.inject(Fault("POST", "/commit/main", status=403))
    cli(*(job or JOB), code=1)
    server.traffic.clear()
