"""Trips: whichever way a checkpoint takes to the Hub, the repository gets the bytes of a run between folders, once."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command import RunCli, messages_of, run_here, start_cli
from disk import Watched
from evaluation_makers import evaluation_of, write_evaluation
from faults import Fault
from loopback import TOKEN, LoopbackHub
from loopback_store import Entry, Repo
from published import ALL_RULES, JOB, WITHOUT_SOURCE, WORK, assert_published, stop_before_main

from k2convert.job import run as executor
from k2convert.job.shard import ShardTask
from k2convert.records.ledger import ShardRecord

Prepare = Callable[["Trip"], "Prepared"]
CALIBRATE = ("--calibrate", "TEXT", "--set", "calibration={tokens: 320, window: 64}", "--device", "cpu")
OTHER_RULE = ("--rule", "max", "--layout", "compressed-tensors")
K3_CARD = (
    "All 36 tensors are lossless: read back, every value is the source's.",
    "MXFP4 has 4.25 bits per weight, NVFP4 4.5",
    "no pipeline parallelism",
)


@dataclass(frozen=True)
class Trip:
    """A checkpoint, the options of `run`, and the way to the repository.

    `stopped` is where the first try ends. `published_with` is the source that `publish` is given: that of the Hub, a
    folder, or none. The card contains the words of `card`.
    """

    checkpoint: str = "tiny"
    options: tuple[str, ...] = ()
    from_hub: bool = True
    to: str = "hf://me/out"
    is_private: bool = True
    upload: str = "Xet"
    bytes_per_second: float | None = None
    stopped: str = ""
    published_with: str = "Hub"
    card: tuple[str, ...] = ()

    @property
    def repo(self) -> str:
        return self.to.removeprefix("hf://").partition("@")[0]

    @property
    def branch(self) -> str:
        return self.to.partition("@")[2] or "main"


DIRECT = {
    "by Xet": Trip(),
    "from a folder, in public": Trip(from_hub=False, to="hf://team/out", is_private=False),
    "by LFS": Trip(upload="LFS"),
    "by LFS in parts": Trip(upload="parts"),
    "on a slow line": Trip(bytes_per_second=3_000_000.0),
    "K3": Trip("k3_tiny", card=K3_CARD),
    "a version": Trip(options=OTHER_RULE, to="hf://me/out@v2"),
    "calibrated": Trip("short", CALIBRATE),
    "stopped before its commit": Trip(upload="LFS", stopped="commit"),
    "continued on another machine": Trip(upload="LFS", stopped="machine lost"),
    "continued there, with a damaged record": Trip(upload="LFS", stopped="machine lost, record damaged"),
}
THROUGH_A_FOLDER = {
    "tiny": Trip(),
    "published with a folder": Trip(published_with="folder"),
    "published without a source": Trip(published_with="none"),
    "K3": Trip("k3_tiny"),
    "a version": Trip(options=OTHER_RULE, to="hf://me/out@v2"),
}


@dataclass(frozen=True)
class Prepared:
    """The folder of moon/tiny's checkpoint, the options of `run`, and the result of a run between folders."""

    folder: Path
    options: tuple[object, ...]
    local: Path


@pytest.fixture(scope="module")
def results(local_result: Path) -> dict[tuple[str, ...], Path]:
    """Results of runs between folders, by checkpoint and options. Read them only."""
    return {("tiny",): local_result}


@pytest.fixture
def prepare(
    request: pytest.FixtureRequest,
    server: LoopbackHub,
    text: Path,
    results: dict[tuple[str, ...], Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Trip], Prepared]:
    """`prepare(trip)` puts its checkpoint on the Hub as moon/tiny, and sets the line.

    A version is added to a repository whose main has another result.
    """

    def run(trip: Trip) -> Prepared:
        folder: Path = request.getfixturevalue(trip.checkpoint)
        options = tuple(text if word == "TEXT" else word for word in trip.options)
        name = (trip.checkpoint, *trip.options)
        if name not in results:
            results[name] = tmp_path_factory.mktemp("result") / "out"
            run_here("run", folder, results[name], *options, code=0)
        server.store.add_folder("moon/tiny", folder)
        if trip.branch != "main":
            repo = server.store.add_folder(trip.repo, results["tiny",], private=True)
            repo.refs[trip.branch] = repo.refs["main"]  # as a job leaves it that was killed before its commit
        server.traffic.bytes_per_second = trip.bytes_per_second
        server.api.part_bytes = 500_000 if trip.upload == "parts" else None
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", trip.upload != "Xet")
        return Prepared(folder, options, results[name])

    return run


def head(server: LoopbackHub, repo: str, branch: str = "main") -> str:
    return server.store.repos[repo].refs[branch]


def stop(trip: Trip, server: LoopbackHub, cli: RunCli, job: tuple[object, ...]) -> None:
    """Let the first try of a job end where the trip says."""
    if trip.stopped:
        stop_before_main(server, cli, *job)
    repo = server.store.repos[trip.repo]
    assert list(repo.files()) == [".gitattributes"]
    if "machine lost" in trip.stopped:
        WORK.parent.rename("elsewhere")
    if "record damaged" in trip.stopped:
        (branch,) = repo.refs.keys() - {"main"}
        record = next(name for name in sorted(repo.files(branch)) if name.startswith(".k2convert/done/"))
        repo.commit(branch, repo.files(branch) | {record: Entry(2, b"{}")})


def assert_arrived(trip: Trip, server: LoopbackHub, cli: RunCli, local: Path, job: tuple[object, ...]) -> None:
    """The repository has the result, the same command sends nothing again, and the result is valid."""
    checked = WITHOUT_SOURCE if trip.published_with == "none" else ALL_RULES
    repo = server.store.repos[trip.repo]
    for _ in range(2):
        assert_published(server, local, trip.repo, branch=trip.branch, checked=checked)
        assert repo.private is trip.is_private
        assert f"{trip.repo}: {trip.branch} already holds this result" in cli(*job, code=0).stderr
    card = server.store.read(trip.repo, "README.md", trip.branch).decode()
    assert all(words in card for words in trip.card)
    assert ("INT4" in card) is (trip.checkpoint != "k3_tiny")
    document = cli("validate", trip.to, "--source", "hf://moon/tiny", "--json", code=0).stdout
    assert json.loads(document)["passed"]


def hashed_again(path: Path) -> str:
    raise AssertionError(f"{path} has a known sha256, which the Hub compares")


def states(folder: Path) -> list[tuple[str, int]]:
    return sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.quick(1)
@pytest.mark.parametrize("trip", DIRECT.values(), ids=DIRECT)
def test_a_run_to_the_hub_gives_the_bytes_of_a_run_between_folders(
    trip: Trip, prepare: Prepare, server: LoopbackHub, cli: RunCli, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the disk that its plan says."""
    prepared = prepare(trip)
    before = states(prepared.folder)
    main = head(server, trip.repo) if trip.branch != "main" else ""
    source = "hf://moon/tiny" if trip.from_hub else prepared.folder
    job = ("run", source, trip.to, *prepared.options, "--yes", *(() if trip.is_private else ("--public",)))
    if trip.from_hub:
        plan = json.loads(cli(*job, "--dry-run", "--json", code=0).stdout)
        assert plan["source_commit"] == head(server, "moon/tiny")
        assert plan["branch"].startswith("k2convert-")
        assert list(cwd.iterdir()) == [], "a plan writes nothing"
        job += ("--max-disk", str(plan["disk_needed"]))
    server.traffic.requests.clear()
    monkeypatch.setattr("k2convert.hub.branch.file_sha256", hashed_again)
    if trip.stopped:
        stop(trip, server, cli, job)
    with Watched(cwd) as watched:
        done = json.loads(cli(*job, "--json", code=0).stdout)

    assert (done["repo"], done["commit"]) == (trip.repo, head(server, trip.repo, trip.branch))
    assert bool(server.traffic.matching("PUT", "/_lfs/")) is (trip.upload != "Xet" and not trip.stopped)
    sizes = {path.name: path.stat().st_size for path in prepared.folder.glob("*.safetensors")}
    sent = {name: server.traffic.bytes_sent(f"moon/tiny/.*{name}$") for name in sizes}
    if trip.stopped in ("commit", "machine lost"):
        assert done["resumed_shards"] == done["shards"], "all that were sent"
        assert max(sent.values()) < 60_000, "headers alone"
    else:
        times = 2.1 if "--calibrate" in trip.options else 1.2  # for the layers, and for the shard
        assert all(sent[name] <= times * size for name, size in sizes.items())
    if trip.from_hub:
        assert 0 < watched.most <= plan["disk_needed"] + 64 * 4096
        assert trip.options or 2 * max(sizes.values()) < plan["disk_needed"] < 3 * max(sizes.values())
    if main:
        assert head(server, trip.repo) == main
        shown = cli("status", f"{WORK}@{trip.branch}", code=0).stderr
        assert messages_of(shown) == f"next: k2convert validate {trip.to} --source hf://moon/tiny\n"
        other = cli("run", source, trip.to, "--yes", code=1)
        assert f"{WORK}@{trip.branch}: holds a different job" in other.stderr, other.stderr
    assert_arrived(trip, server, cli, prepared.local, job)
    ledger = server.store.read(trip.repo, "k2convert.json", trip.branch)
    ours, theirs = (json.loads(text) for text in (ledger, (prepared.local / "k2convert.json").read_bytes()))
    assert ours["source"]["revision"] == (head(server, "moon/tiny") if trip.from_hub else None)
    assert ours.get("calibration") == theirs.get("calibration")
    if "machine lost" in trip.stopped:
        assert (cwd / "elsewhere" / WORK.name / "k2convert.json").read_bytes() == ledger
    assert states(prepared.folder) == before
    assert not {path.suffix for path in cwd.rglob("*")} & {".safetensors", ".work"}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("trip", THROUGH_A_FOLDER.values(), ids=THROUGH_A_FOLDER)
def test_a_run_from_the_hub_into_a_folder_that_is_published_gives_these_bytes_too(
    trip: Trip, prepare: Prepare, server: LoopbackHub, cli: RunCli, cwd: Path
) -> None:
    prepared = prepare(trip)
    done = cli("run", "hf://moon/tiny@main", "out", *prepared.options, "--json", code=0)
    assert json.loads(done.stdout)["commit"] is None
    names = {path.name for path in prepared.local.glob("*.safetensors")}
    for name in names:
        assert (cwd / "out" / name).read_bytes() == (prepared.local / name).read_bytes()
    source = {"Hub": "hf://moon/tiny", "folder": prepared.folder, "none": None}[trip.published_with]
    job = ("publish", "out", "--repo", trip.to, "--yes", *(("--source", source) if source else ()))
    sent = json.loads(cli(*job, "--json", code=0).stdout)
    commit = head(server, trip.repo, trip.branch)
    assert sent == {"repo": trip.repo, "commit": commit, "private": True}
    assert f"published as {trip.to} at commit {commit}\n" in cli("status", "out", code=0).stdout
    assert_arrived(trip, server, cli, prepared.local, job)
    assert {path.name for path in (cwd / "out").glob("*.safetensors")} == names
    for name in ("k2convert.json", *(path.name for path in (cwd / "out").glob("evaluation.json"))):
        assert server.store.read(trip.repo, name, trip.branch) == (cwd / "out" / name).read_bytes()
    ledger = json.loads((cwd / "out" / "k2convert.json").read_text())
    assert ledger["source"]["revision"] == head(server, "moon/tiny")


def kill_after(server: LoopbackHub, cwd: Path, num_requests: int, seconds: float, job: tuple[object, ...]) -> bool:
    """Start a job and SIGKILL it `seconds` after `num_requests` requests; returns whether it still ran."""
    before = len(server.traffic.requests)
    with start_cli(*job, cwd=cwd) as process:
        while len(server.traffic.requests) < before + num_requests and process.poll() is None:
            time.sleep(0.005)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


TINY = [(Trip(), 0.6, range(seed, seed + 4)) for seed in range(100, 124, 4)]
K3 = [(Trip("k3_tiny"), 0.6, range(seed, seed + 4)) for seed in range(200, 212, 4)]
CALIBRATED = [(Trip("short", CALIBRATE), 2.0, range(seed, seed + 5)) for seed in range(100, 120, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(("trip", "most_seconds", "seeds"), [*TINY, *K3, *CALIBRATED])
def test_killed_at_random_moments_it_ends_with_one_commit_and_uploads_nothing_twice(
    trip: Trip,
    most_seconds: float,
    seeds: range,
    prepare: Prepare,
    server: LoopbackHub,
    cli: RunCli,
    cwd: Path,
    without_xet: None,
) -> None:
    prepared = prepare(trip)
    job = ("run", "hf://moon/tiny", trip.to, *prepared.options, "--yes")
    server.traffic.bytes_per_second = 400_000.0
    kills = 0
    for seed in seeds:
        choice = random.Random(seed)
        kills += kill_after(server, cwd, choice.randrange(1, 90), choice.uniform(0, most_seconds), job)
    assert kills > len(seeds) // 3
    server.traffic.bytes_per_second = None
    before = uploads_by_path(server)
    repo = server.store.repos.get(trip.repo, Repo())
    branches = repo.refs.keys() - {"main"}
    committed = {entry.sha256 for branch in branches for entry in repo.files(branch).values()}
    cli(*job, code=0)
    assert_published(server, prepared.local)
    for path, count in uploads_by_path(server).items():
        if path.removeprefix("/_lfs/") in committed:
            assert count == before[path], f"{path} was on the branch and uploaded again"
    assert not list(cwd.rglob("calibration.work"))


def uploads_by_path(server: LoopbackHub) -> dict[str, int]:
    return Counter(request.path for request in server.traffic.matching("PUT", "/_lfs/") if request.status == 200)


@pytest.mark.slow
def test_several_shards_are_converted_at_once_if_requested(
    tiny_hub: LoopbackHub, cli: RunCli, local_result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    convert = executor.convert_shard

    def together(task: ShardTask, **options: Any) -> ShardRecord:
        if task.shard.name in ("model-00001-of-000005.safetensors", "model-00002-of-000005.safetensors"):
            both.wait(timeout=300)  # the first waits here until another thread has come with the second
        return convert(task, **options)

    monkeypatch.setattr(executor, "convert_shard", together)
    cli(*JOB, "--workers", "2", code=0)
    assert_published(tiny_hub, local_result)


@pytest.mark.slow
def test_a_job_that_stopped_at_its_commits_goes_on_as_it_began(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, tmp_path: Path
) -> None:
    """Meanwhile the source moved on, a record was damaged, and files got into the work folder by chance."""
    repo = tiny_hub.store.repos["moon/tiny"]
    first = repo.refs["main"]
    tiny_hub.traffic.inject(Fault("POST", "/commit/main", status=412))
    assert "run the same command again" in cli(*JOB, code=1).stderr
    shown = cli("status", WORK)
    assert "published" not in shown.stdout
    assert "the same `k2convert run` command finishes the job" in shown.stderr
    assert "has no k2convert.json" in cli("status", "hf://me/out", code=1).stderr

    repo.commit("main", repo.files() | {"news.md": repo.files()["README.md"]})
    record = sorted((WORK / ".k2convert" / "done").iterdir())[0]
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b'"file_bytes":1', b'"file_bytes":2', 1))
    assert record.read_bytes() != whole
    (WORK / "run.log").write_text("private")
    (WORK / "report.html").write_text("an old one")
    tiny_hub.traffic.clear()
    tiny_hub.traffic.inject(Fault("POST", "/commit/main", status=500, times=2), Fault("DELETE", "/branch/", status=403))
    cli(*JOB, code=1)
    assert record.read_bytes() == whole, "the branch has the record, undamaged"
    assert tiny_hub.traffic.bytes_sent(r"\.safetensors$") < 200_000, "only headers were fetched"
    cli(*JOB, code=0)
    assert_published(tiny_hub, local_result)
    assert json.loads(tiny_hub.store.read("me/out", "k2convert.json"))["source"]["revision"] == first
    assert "<html" in tiny_hub.store.read("me/out", "report.html").decode()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert TOKEN.encode() not in path.read_bytes(), path
    assert os.environ["HF_TOKEN"] == TOKEN


@pytest.mark.slow
def test_an_evaluation_of_these_weights_is_published(tiny_hub: LoopbackHub, cli: RunCli, local_result: Path) -> None:
    """The same bytes are converted there, so that an evaluation made elsewhere is of them."""
    (WORK / ".k2convert" / "done").mkdir(parents=True)
    write_evaluation(WORK, evaluation_of(local_result))
    whole = (WORK / "evaluation.json").read_bytes()
    document = json.loads(whole)
    document["rows"][0]["model"]["weights"] = "0" * 64
    (WORK / "evaluation.json").write_text(json.dumps(document))
    done = cli(*JOB, code=3)
    assert "rule 19 fail: evaluation.json: measures other weights than this result has" in done.stdout
    assert tiny_hub.store.repos["me/out"].num_commits("main") == 1
    (WORK / "evaluation.json").write_bytes(whole)
    cli(*JOB, code=0)
    assert tiny_hub.store.read("me/out", "evaluation.json") == whole
    assert "## Evaluation of the whole model" in tiny_hub.store.read("me/out", "README.md").decode()
    assert json.loads(cli("validate", "hf://me/out", "--json", code=0).stdout)["passed"]
