"""After publishing: the emptied work folder and the repository say where the result is, and how to check it."""

import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from command import RunCli, messages_of, run_here
from evaluation_makers import evaluation_of, write_evaluation
from loopback import TOKEN, LoopbackHub
from published import WORK

SERVE = (
    "vllm serve me/out --tensor-parallel-size 2 --trust-remote-code "
    "--enable-auto-tool-choice --tool-call-parser kimi_k2 --reasoning-parser kimi_k2"
)


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoopbackHub, Path]]:
    """A Hub to which one job has published me/out, and the job's work folder."""
    folder = tmp_path_factory.mktemp("finished")
    with LoopbackHub(folder / "hub") as running:
        running.api.token = TOKEN
        running.store.add_folder("moon/tiny", tiny)
        env = {"HF_ENDPOINT": running.url, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "home")}
        with chdir(folder):
            done = run_here("run", "hf://moon/tiny", "hf://me/out", "--yes", **env)
        assert (done.returncode, messages_of(done.stderr).splitlines()[-1]) == (0, f"next: {SERVE}")
        assert list((folder / WORK).glob("*.safetensors")) == []
        yield running, folder / WORK


@pytest.fixture
def hub_after(
    finished: tuple[LoopbackHub, Path], cli: RunCli, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> LoopbackHub:
    """The Hub after the job; this test's own copy of the work folder is at WORK."""
    shutil.copytree(finished[1], cwd / WORK)
    monkeypatch.setenv("HF_ENDPOINT", finished[0].url)
    finished[0].traffic.requests.clear()
    return finished[0]


@pytest.fixture
def done(hub_after: LoopbackHub) -> str:
    return hub_after.store.repos["me/out"].refs["main"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("words", [("inspect", "hf://me/out"), ("status", "hf://me/out"), ("status", str(WORK))])
def test_next_commands_work_as_printed(done: str, hub_after: LoopbackHub, cli: RunCli, words: tuple[str, ...]) -> None:
    lines: list[str] = []
    while words[0] != "serve":
        shown = cli(*words, code=0)
        (line,) = (line for line in messages_of(shown.stderr).splitlines() if line.startswith("next: "))
        lines.append(line.removeprefix("next: "))
        words = tuple(shlex.split(lines[-1])[1:])
    assert lines == ["k2convert validate hf://me/out --source hf://moon/tiny", SERVE]


def test_the_work_folder_is_published_and_has_no_shards(done: str, hub_after: LoopbackHub, cli: RunCli) -> None:
    """Each verb says where the result is, and what checks it."""
    status = json.loads(cli("status", WORK, "--json").stdout)
    assert (status["complete"], status["published"]) == (True, {"repo": "me/out", "commit": done})
    for more in ((), ("--json",)):
        refused = cli("validate", WORK, *more, code=1)
        assert refused.stdout == ""
        assert f"{WORK}: published as hf://me/out at commit {done}, and its shards are no longer here" in refused.stderr
        assert "`k2convert validate hf://me/out` checks what was published" in refused.stderr
    again = json.loads(cli("publish", WORK, "--repo", "me/out", "--json", code=0).stdout)
    assert again == {"repo": "me/out", "commit": done, "published_before": True}
    for shown in (cli("status", WORK), cli("publish", WORK, "--repo", "me/out", "--yes")):
        assert f"published as hf://me/out at commit {done}" in shown.stdout
        assert messages_of(shown.stderr) == "next: k2convert validate hf://me/out --source hf://moon/tiny\n"
    assert "published as hf://me/out" in cli("publish", WORK, "--repo", "me/other", "--yes", code=1).stderr
    assert hub_after.traffic.requests == []


def test_running_again_notes_the_commit_at_once(done: str, hub_after: LoopbackHub, cli: RunCli, cwd: Path) -> None:
    (cwd / WORK / ".k2convert" / "published.json").unlink()
    unknown = cli("validate", WORK, code=1)
    assert "its shards were uploaded to the Hub and are no longer here" in unknown.stderr
    assert "the same `k2convert run` command finishes the job" in cli("status", WORK).stderr
    cli("publish", WORK, "--repo", "me/out", code=1)
    hub_after.traffic.requests.clear()
    again = cli("run", "hf://moon/tiny", "hf://me/out", "--yes")
    assert (again.returncode, messages_of(again.stderr).splitlines()[-1]) == (
        0,
        "me/out: main already holds this result",
    )
    assert hub_after.traffic.bytes_sent(r"\.safetensors$") < 200_000  # headers
    assert not hub_after.traffic.matching("POST", "/commit/")
    assert f"published as hf://me/out at commit {done}" in cli("status", WORK).stdout


def test_a_damaged_note_of_the_publication_is_as_none(done: str, cli: RunCli, cwd: Path) -> None:
    (cwd / WORK / ".k2convert" / "published.json").write_text('{"repo": 5}')
    assert json.loads(cli("status", WORK, "--json").stdout)["published"] is None


def test_status_of_a_repository_says_what_it_holds_and_lacks(done: str, hub_after: LoopbackHub, cli: RunCli) -> None:
    source = hub_after.store.repos["moon/tiny"].refs["main"]
    shown = cli("status", "hf://me/out", code=0)
    assert shown.stdout.splitlines() == [
        f"hf://me/out (private) at commit {done}: complete: 5 shards, 7.54 MB",
        "recipe kimi-k2-thinking-nvfp4: rule mse, layout modelopt",
        f"converted from moon/tiny at commit {source}",
        "weight error: SQNR 22.62 dB",
    ]
    assert hub_after.traffic.bytes_sent(r"\.safetensors$") == 0
    document = json.loads(cli("status", f"hf://me/out@{done}", "--json").stdout)
    assert document["published"] == {"repo": "me/out", "commit": done}
    assert document["source"] == {"repo": "moon/tiny", "revision": source}
    assert (document["complete"], document["shards"], document["missing"]) == (True, 5, [])
    repo = hub_after.store.repos["me/out"]
    name = "model-00002-of-000005.safetensors"
    repo.commit("cut", {path: file for path, file in repo.files().items() if path != name})
    assert f"1 of 5, first {name}" in cli("status", "hf://me/out@cut").stdout
    assert json.loads(cli("status", "hf://me/out@cut", "--json").stdout)["missing"] == [name]


@pytest.mark.parametrize("verb", ["status", "validate", "report"])
def test_a_missing_repository_is_one_line(done: str, cli: RunCli, verb: str) -> None:
    for address, words in (
        ("hf://me/none", "could not look up me/none: the Hub answered 404"),
        ("hf://me/out@nowhere", "could not look up me/out at revision nowhere: the Hub answered 404"),
        ("hf://me", "hf://me: not a repository. Write hf://owner/name"),
    ):
        shown = cli(verb, address)
        assert (shown.returncode, shown.stdout) == (1, "")
        assert messages_of(shown.stderr).startswith(f"error: {words}")
        assert messages_of(shown.stderr).count("\n") == 1


@pytest.mark.slow
def test_an_evaluation_made_after_publishing_is_published_by_the_same_command(
    server: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path
) -> None:
    """The shards are on main already: nothing but small files is sent, in one more commit."""
    words = ("publish", "out", "--repo", "me/out", "--yes")
    shutil.copytree(local_result, cwd / "out")
    cli(*words, code=0)
    repo = server.store.repos["me/out"]
    before = repo.files()
    assert "evaluation.json" not in before
    write_evaluation(cwd / "out", evaluation_of(cwd / "out"))
    server.traffic.requests.clear()
    assert "already holds" not in cli(*words, code=0).stderr
    assert server.store.read("me/out", "evaluation.json") == (cwd / "out" / "evaluation.json").read_bytes()
    assert "## Evaluation of the whole model" in server.store.read("me/out", "README.md").decode()
    assert not server.traffic.matching("PUT", "/_lfs/")
    assert "already holds this result" in cli(*words, code=0).stderr
    assert repo.num_commits("main") == 3
    assert all(repo.files()[path.name] == before[path.name] for path in local_result.glob("*.safetensors"))
    report = json.loads(cli("report", "hf://me/out", "--json", code=0).stdout)
    assert report["evaluation"] == json.loads((cwd / "out" / "evaluation.json").read_text())
    assert "Evaluation of the whole model" in Path("report.html").read_text()


def test_status_says_that_the_published_copy_lags_behind(
    server: LoopbackHub, cli: RunCli, cwd: Path, tiny: Path
) -> None:
    """After the folder has taken over what changed at the source. The next command brings the copy up to date."""
    source = Path(shutil.copytree(tiny, cwd / "source"))
    cli("run", source, "out", code=0)
    cli("publish", "out", "--repo", "me/out", "--yes", code=0)
    behind = "and the folder has changed since"
    assert behind not in cli("status", "out", code=0).stdout
    assert json.loads(cli("status", "out", "--json").stdout)["published_is_current"] is True
    (source / "chat_template.jinja").write_text("{{ messages }}")
    cli("run", source, "out", code=0)
    assert json.loads(cli("status", "out", "--json").stdout)["published_is_current"] is False
    shown = cli("status", "out", code=0)
    assert behind in shown.stdout
    assert messages_of(shown.stderr) == "next: k2convert publish out --repo me/out\n"
    cli("publish", "out", "--repo", "me/out", "--yes", code=0)
    assert server.store.read("me/out", "chat_template.jinja") == b"{{ messages }}"
    assert behind not in cli("status", "out", code=0).stdout
