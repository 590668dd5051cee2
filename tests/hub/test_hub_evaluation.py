"""evaluation.json goes to the Hub in the commit of the result, and is checked there as in a folder."""

import json
import shutil
from pathlib import Path

import pytest
from command import RunCli, said
from evaluation_makers import evaluation_of, full_disk, write_evaluation
from loopback import LoopbackHub
from loopback_store import sha256_of

from k2convert.records.evaluation import Evaluation

WORK = Path("k2convert-work/me--out")


@pytest.fixture
def evaluated(local_result: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(local_result, tmp_path / "out"))
    write_evaluation(folder, evaluation_of(folder))
    return folder


def stale(folder: Path) -> None:
    document = json.loads((folder / "evaluation.json").read_text())
    document["rows"][0]["model"]["weights"] = "0" * 64
    (folder / "evaluation.json").write_text(json.dumps(document))


def commits(server: LoopbackHub) -> int:
    return server.store.repos["me/out"].num_commits("main") if "me/out" in server.store.repos else 0


def test_publish_puts_it_into_the_one_commit(server: LoopbackHub, cli: RunCli, evaluated: Path) -> None:
    done = cli("publish", evaluated, "--repo", "me/out", "--yes", code=0)
    assert "evaluation.json" in done.stderr
    assert commits(server) == 2  # the Hub's own first commit, and ours
    assert server.store.read("me/out", "evaluation.json") == (evaluated / "evaluation.json").read_bytes()
    card = server.store.read("me/out", "README.md").decode()
    assert "## Evaluation of the whole model" in card
    assert "against hf://moon/K2: KL 0.0" in card
    validated = json.loads(cli("validate", "hf://me/out", "--json", code=0).stdout)
    assert validated["passed"]
    report = json.loads(cli("report", "hf://me/out", "--json", code=0).stdout)
    assert report["evaluation"] == json.loads((evaluated / "evaluation.json").read_text())
    assert "Evaluation of the whole model" in Path("report.html").read_text()


def test_a_stale_one_is_not_published(server: LoopbackHub, cli: RunCli, evaluated: Path) -> None:
    stale(evaluated)
    done = cli("publish", evaluated, "--repo", "me/out", "--yes", code=3)
    assert "does not validate, so it is not published" in done.stderr
    assert commits(server) == 0


@pytest.mark.quick(2)
@pytest.mark.parametrize("damage", ["other weights", "no document", "a large file"])
def test_validate_of_a_published_one_refuses_what_it_refuses_here(
    server: LoopbackHub, cli: RunCli, evaluated: Path, damage: str
) -> None:
    if damage == "other weights":
        stale(evaluated)
    else:
        size = 10 if damage == "no document" else 101_000_000
        (evaluated / "evaluation.json").write_bytes(b" " * size)
    shutil.rmtree(evaluated / ".k2convert")
    server.store.add_folder("me/out", evaluated)
    here, there = (json.loads(cli("validate", place, "--json", code=3).stdout) for place in (evaluated, "hf://me/out"))
    for found in (here, there):
        failed = {rule["number"]: rule["offenders"] for rule in found["contract"]["rules"] if rule["verdict"] == "fail"}
        assert list(failed) == [19]
        assert [offender["name"] for offender in failed[19]] == ["evaluation.json"]
    report = cli("report", "hf://me/out", code=0)
    assert "evaluation.json is not shown" in report.stderr
    assert "the contract failed by rule 19" in said(report.stderr)


@pytest.mark.slow
def test_an_evaluation_made_after_publishing_is_published_by_the_same_command(
    server: LoopbackHub, cli: RunCli, local_result: Path, evaluated: Path
) -> None:
    """The shards are on main already: nothing but small files is sent, in one more commit."""
    cli("publish", local_result, "--repo", "me/out", "--yes", code=0)
    assert "evaluation.json" not in server.store.repos["me/out"].files()
    server.traffic.requests.clear()
    done = cli("publish", evaluated, "--repo", "me/out", "--yes", code=0)
    assert "already holds" not in done.stderr
    assert commits(server) == 3
    assert server.store.read("me/out", "evaluation.json") == (evaluated / "evaluation.json").read_bytes()
    assert "## Evaluation of the whole model" in server.store.read("me/out", "README.md").decode()
    assert not server.traffic.matching("PUT", "/_lfs/")
    assert "already holds this result" in cli("publish", evaluated, "--repo", "me/out", "--yes", code=0).stderr
    assert commits(server) == 3
    for shard in evaluated.glob("*.safetensors"):
        assert sha256_of(shard) == server.store.repos["me/out"].files()[shard.name].sha256


def prepared_work(cwd: Path, found: Evaluation) -> None:
    (cwd / WORK / ".k2convert" / "shards").mkdir(parents=True)
    write_evaluation(cwd / WORK, found)


@pytest.mark.slow
def test_a_job_from_hub_to_hub_puts_it_into_the_one_commit(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, evaluated: Path
) -> None:
    """The same bytes are converted there, so that an evaluation made here is of them."""
    prepared_work(cwd, evaluation_of(evaluated))
    cli("run", "hf://moon/tiny", "hf://me/out", "--yes", code=0)
    assert commits(tiny_hub) == 2
    assert tiny_hub.store.read("me/out", "evaluation.json") == (cwd / WORK / "evaluation.json").read_bytes()
    assert "## Evaluation of the whole model" in tiny_hub.store.read("me/out", "README.md").decode()
    assert json.loads(cli("validate", "hf://me/out", "--json", code=0).stdout)["passed"]


@pytest.mark.slow
def test_a_job_from_hub_to_hub_with_a_stale_one_changes_nothing_on_main(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, evaluated: Path
) -> None:
    prepared_work(cwd, evaluation_of(evaluated))
    stale(cwd / WORK)
    done = cli("run", "hf://moon/tiny", "hf://me/out", "--yes", code=3)
    assert "rule 19 fail: evaluation.json: measures other weights than this result has" in done.stdout
    assert commits(tiny_hub) == 1
    (cwd / WORK / "evaluation.json").unlink()
    cli("run", "hf://moon/tiny", "hf://me/out", "--yes", code=0)
    assert commits(tiny_hub) == 2


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "novel.txt").write_text("It was the best of times, it was the worst of times, and nobody knew. " * 20)
    return tmp_path / "novel.txt"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_job_that_evaluates_reads_its_shards_back_and_makes_one_commit(
    server: LoopbackHub, cli: RunCli, cwd: Path, short: Path, text: Path
) -> None:
    """From the work branch, layer by layer; the figures are those of the same conversion here."""
    server.store.add_folder("moon/tiny", short)
    done = cli("run", "hf://moon/tiny", "hf://me/out", "--yes", "--evaluate", text, "--json", code=0)
    assert commits(server) == 2
    assert list(server.store.repos["me/out"].refs) == ["main"]
    found = json.loads(server.store.read("me/out", "evaluation.json"))
    assert json.loads(done.stdout)["evaluation"] == found
    assert found["reference"]["name"] == f"hf://moon/tiny@{server.store.repos['moon/tiny'].refs['main']}"
    assert found["rows"][0]["model"]["name"] == "hf://me/out"
    assert "## Evaluation of the whole model" in server.store.read("me/out", "README.md").decode()
    cli("run", short, "here", "--evaluate", text, code=0)
    here = json.loads((cwd / "here" / "evaluation.json").read_text())
    assert here["rows"][0]["model"]["weights"] == found["rows"][0]["model"]["weights"]
    for part in ("figures", "layers", "worst"):
        assert here["rows"][0][part] == found["rows"][0][part]
    assert json.loads(cli("validate", "hf://me/out", "--json", code=0).stdout)["passed"]
    work = cwd / WORK
    assert not list(work.glob("*.safetensors"))
    assert not list((work / ".k2convert").glob("evaluation.*work*"))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_job_whose_evaluation_fails_resumes_it_and_converts_nothing_again(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_disk(monkeypatch):
        done = cli("run", "hf://moon/tiny", "hf://me/out", "--yes", "--evaluate", text, code=1)
    assert "the disk is full" in done.stderr
    assert commits(tiny_hub) == 1
    tiny_hub.traffic.requests.clear()
    done = cli("run", "hf://moon/tiny", "hf://me/out", "--yes", "--evaluate", text, code=0)
    assert "resuming: 5 of 5 shards done" in done.stderr
    assert not tiny_hub.traffic.matching("PUT", "/_lfs/")
    assert commits(tiny_hub) == 2
    again = cli("run", "hf://moon/tiny", "hf://me/out", "--yes", "--evaluate", text, code=0)
    assert "already holds this result" in again.stderr
    assert "it was not evaluated: use `k2convert evaluate` with its address" in again.stderr
