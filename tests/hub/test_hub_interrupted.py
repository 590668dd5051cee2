"""Hub-to-Hub jobs that are killed, hit by faults, or short of disk still end with the local run's bytes."""

import json
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from command import RunCli, cli_environment, start_cli
from disk import Watched, used_bytes
from faults import Fault, Kind, Line
from loopback import LoopbackHub
from published import JOB, assert_published

NUM_KILLS, NUM_SLOW_KILLS, NUM_SLOW_FAULTS = 3, 20, 30


def uploads_by_path(server: LoopbackHub) -> dict[str, int]:
    """How often each object was uploaded as a whole."""
    counts: dict[str, int] = {}
    for request in server.traffic.matching("PUT", "/_lfs/"):
        if request.status == 200:
            counts[request.path] = counts.get(request.path, 0) + 1
    return counts


def kill_after(
    server: LoopbackHub, workplace: Path, num_requests: int, seconds: float, job: Sequence[object] = JOB
) -> bool:
    """Start a job and SIGKILL it `seconds` after `num_requests` requests; returns whether it still ran."""
    seen = len(server.traffic.requests)
    with start_cli(*job, cwd=workplace) as process:
        while len(server.traffic.requests) < seen + num_requests and process.poll() is None:
            time.sleep(0.005)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


def check_killed_job(server: LoopbackHub, hub_cli: RunCli, workplace: Path, local: Path, seeds: range) -> None:
    """Kill the job at one random moment per seed, then let it finish."""
    server.traffic.bytes_per_second = 400_000.0
    for seed in seeds:
        choice = random.Random(seed)
        kill_after(server, workplace, choice.randrange(1, 90), choice.uniform(0, 0.6))
    server.traffic.bytes_per_second = None
    before = uploads_by_path(server)
    repo = server.store.repos.get("me/out")
    branches = [b for b in repo.refs if b != "main"] if repo is not None else []
    committed = {e.sha256 for b in branches for e in repo.files(b).values() if e.sha256} if repo is not None else set()
    done = hub_cli(*JOB)
    assert done.returncode == 0, done.stderr
    assert_published(server, local)
    for path, count in uploads_by_path(server).items():
        if path.removeprefix("/_lfs/") in committed:
            assert count == before[path], f"{path} was on the branch and uploaded again"


def test_killed_at_random_moments_it_ends_right_and_uploads_nothing_twice(
    tiny_on_hub: LoopbackHub,
    hub_cli: RunCli,
    workplace: Path,
    local_result: Path,
    tiny: Path,
    without_xet: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    check_killed_job(tiny_on_hub, hub_cli, workplace, local_result, range(NUM_KILLS))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SLOW_KILLS, 4))
def test_killed_at_twenty_moments(
    tiny_on_hub: LoopbackHub,
    hub_cli: RunCli,
    workplace: Path,
    local_result: Path,
    tiny: Path,
    without_xet: None,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    check_killed_job(tiny_on_hub, hub_cli, workplace, local_result, range(100 + first, 104 + first))


def test_a_shard_half_downloaded_when_killed_is_continued(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path, local_result: Path, tiny: Path
) -> None:
    shard = "model-00001-of-000005.safetensors"
    tiny_on_hub.traffic.bytes_per_second = 60_000.0
    record = workplace / "k2convert-work" / "me--out" / ".k2convert" / "download" / f"{shard}.part.json"
    with start_cli(*JOB, cwd=workplace) as process:
        while not record.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    kept = record.read_text().split('"done": "')[1].count("1") * 65536
    assert kept > 0
    tiny_on_hub.traffic.bytes_per_second = None
    tiny_on_hub.traffic.clear()
    assert hub_cli(*JOB).returncode == 0
    assert_published(tiny_on_hub, local_result)
    header = 200_000
    assert tiny_on_hub.traffic.bytes_sent(shard) <= (tiny / shard).stat().st_size - kept + header


_PLACES = [
    ("GET", r"\.safetensors$"),
    ("GET", "/api/models/"),
    ("GET", "/tree/"),
    ("POST", "/preupload/"),
    ("POST", "/commit/"),
]


def random_fault(choice: random.Random) -> Fault:
    """A random fault at a random place of the job."""
    kind = choice.choice(["503", "reset", "short", "wrong", "429", "412", "upload"])
    after = choice.randrange(0, 1_000_000)
    if kind in ("503", "429"):
        place = choice.choice(_PLACES)
        return Fault(*place, status=int(kind), retry_after=1 if kind == "429" else None)
    if kind == "412":
        return Fault("POST", "/commit/main", status=412)
    if kind == "upload":
        return Fault("PUT", "/_lfs/", Kind.RESET, after_bytes=after)
    broken = {"reset": Kind.RESET, "short": Kind.SHORT, "wrong": Kind.CORRUPT}[kind]
    return Fault("GET", r"\.safetensors$", broken, after_bytes=after)


def check_faulty_job(server: LoopbackHub, hub_cli: RunCli, local: Path, *, seed: int, num_faults: int) -> None:
    choice = random.Random(seed)
    server.traffic.inject(*(random_fault(choice) for _ in range(num_faults)))
    for _ in range(num_faults + 1):
        done = hub_cli(*JOB)
        if done.returncode == 0:
            break
        assert "error:" in done.stderr
        assert "Traceback" not in done.stderr
    assert_published(server, local)


def test_random_faults_are_survived(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, local_result: Path, without_xet: None
) -> None:
    check_faulty_job(tiny_on_hub, hub_cli, local_result, seed=1, num_faults=6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SLOW_FAULTS // 5))
def test_thirty_faults_are_survived(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, local_result: Path, without_xet: None, seed: int
) -> None:
    check_faulty_job(tiny_on_hub, hub_cli, local_result, seed=50 + seed, num_faults=5)


def test_disk_stays_under_its_limit(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path, local_result: Path, tiny: Path
) -> None:
    """The least room is that of the largest source shard and its result."""
    plan = json.loads(hub_cli(*JOB, "--dry-run", "--json").stdout)
    largest, room = max(p.stat().st_size for p in tiny.glob("*.safetensors")), plan["disk_needed"]
    assert 2 * largest < room < 3 * largest
    tiny_on_hub.traffic.bytes_per_second = 3_000_000.0
    with Watched(workplace) as watched:
        done = hub_cli(*JOB, "--max-disk", str(room))
    assert done.returncode == 0, done.stderr
    assert_published(tiny_on_hub, local_result)
    assert largest < watched.most < room


def test_a_job_continued_with_less_room_keeps_to_it(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path, local_result: Path, tiny: Path, without_xet: None
) -> None:
    """Killed with two shards to upload and two fetched; together with one more they would exceed the room."""
    room, work = 7_000_000, workplace / "k2convert-work" / "me--out"
    shards = sorted(path.name for path in tiny.glob("*.safetensors"))
    tiny_on_hub.traffic.up = Line(1000.0)
    with start_cli(*JOB, cwd=workplace, env=cli_environment() | {"HF_HUB_DISABLE_XET": "1"}) as process:
        while len(list((work / ".k2convert" / "shards").glob("*.json"))) < len(shards) and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    shutil.rmtree(work / ".k2convert" / "download", ignore_errors=True)
    (work / ".k2convert" / "download").mkdir()
    for name in shards[2:]:
        (work / name).unlink()
        (work / ".k2convert" / "shards" / f"{name}.json").unlink()
    for name in shards[2:4]:
        shutil.copy(tiny / name, work / ".k2convert" / "download")
    assert used_bytes(workplace) < room
    tiny_on_hub.traffic.up = Line(1_500_000.0)
    with Watched(workplace) as watched:
        done = hub_cli(*JOB, "--max-disk", str(room))
    assert done.returncode == 0, done.stderr
    assert_published(tiny_on_hub, local_result)
    assert watched.most < room


@pytest.mark.parametrize("name", ["00002-of-000005.safetensors", "tokenizer.json"], ids=["header", "small file"])
def test_an_interrupt_while_planning_waits_for_no_answer(tiny_on_hub: LoopbackHub, workplace: Path, name: str) -> None:
    tiny_on_hub.traffic.inject(Fault("GET", name, status=429, retry_after=300))
    with start_cli("inspect", "hf://moon/tiny", cwd=workplace) as process:
        while not tiny_on_hub.traffic.injected and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130, "the Hub asked for a pause of 300 s"
