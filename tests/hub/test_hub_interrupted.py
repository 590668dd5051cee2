"""Hub-to-Hub jobs that are killed, hit by faults, or short of disk still end with the local run's bytes."""

import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from command import RunCli, start_cli
from disk import Watched, used_bytes
from faults import Fault, Kind, Line
from loopback import LoopbackHub
from published import JOB, assert_published


@pytest.fixture
def without_xet(without_xet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own too."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")


def uploads_by_path(server: LoopbackHub) -> dict[str, int]:
    return Counter(request.path for request in server.traffic.matching("PUT", "/_lfs/") if request.status == 200)


def kill_after(server: LoopbackHub, cwd: Path, num_requests: int, seconds: float, job: Sequence[object] = JOB) -> bool:
    """Start a job and SIGKILL it `seconds` after `num_requests` requests; returns whether it still ran."""
    seen = len(server.traffic.requests)
    with start_cli(*job, cwd=cwd) as process:
        while len(server.traffic.requests) < seen + num_requests and process.poll() is None:
            time.sleep(0.005)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [range(3), *(range(seed, seed + 4) for seed in range(100, 120, 4))],
    ids=lambda seeds: f"from {seeds.start}",
)
def test_killed_at_random_moments_it_ends_right_and_uploads_nothing_twice(
    seeds: range, tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, without_xet: None
) -> None:
    tiny_hub.traffic.bytes_per_second = 400_000.0
    for seed in seeds:
        choice = random.Random(seed)
        kill_after(tiny_hub, cwd, choice.randrange(1, 90), choice.uniform(0, 0.6))
    tiny_hub.traffic.bytes_per_second = None
    before = uploads_by_path(tiny_hub)
    repo = tiny_hub.store.repos.get("me/out")
    branches = [b for b in repo.refs if b != "main"] if repo is not None else []
    committed = {e.sha256 for b in branches for e in repo.files(b).values() if e.sha256} if repo is not None else set()
    cli(*JOB, code=0)
    assert_published(tiny_hub, local_result)
    for path, count in uploads_by_path(tiny_hub).items():
        if path.removeprefix("/_lfs/") in committed:
            assert count == before[path], f"{path} was on the branch and uploaded again"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 204))
def test_kimi_k3_killed_at_random_moments_ends_right(
    seed: int, server: LoopbackHub, cli: RunCli, cwd: Path, k3_tiny: Path, without_xet: None
) -> None:
    server.store.add_folder("moon/tiny", k3_tiny)
    cli("run", k3_tiny, "local", code=0)
    choice = random.Random(seed)
    server.traffic.bytes_per_second = 800_000.0
    for _ in range(3):
        kill_after(server, cwd, choice.randrange(1, 90), choice.uniform(0, 0.6))
    server.traffic.bytes_per_second = None
    cli(*JOB, code=0)
    for path in (*(cwd / "local").glob("*.safetensors"), cwd / "local" / "config.json"):
        assert server.store.read("me/out", path.name) == path.read_bytes()
    assert list(server.store.repos["me/out"].refs) == ["main"]


@pytest.mark.slow
def test_a_partial_download_goes_on(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, tiny: Path
) -> None:
    shard = "model-00001-of-000005.safetensors"
    tiny_hub.traffic.bytes_per_second = 60_000.0
    record = cwd / "k2convert-work" / "me--out" / ".k2convert" / "download" / f"{shard}.part.json"
    with start_cli(*JOB, cwd=cwd) as process:
        while not record.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    kept = record.read_text().split('"done": "')[1].count("1") * 65536
    assert kept > 0
    tiny_hub.traffic.bytes_per_second = None
    tiny_hub.traffic.clear()
    cli(*JOB, code=0)
    assert_published(tiny_hub, local_result)
    header = 200_000
    assert tiny_hub.traffic.bytes_sent(shard) <= (tiny / shard).stat().st_size - kept + header


_PLACES = [("GET", place) for place in (r"\.safetensors$", "/api/models/", "/tree/")]
_PLACES += [("POST", place) for place in ("/preupload/", "/commit/")]


def random_fault(choice: random.Random) -> Fault:
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


@pytest.mark.quick(1)
@pytest.mark.parametrize(("seed", "num_faults"), [(1, 6), *((seed, 5) for seed in range(50, 56))])
def test_faults_are_survived(
    seed: int, num_faults: int, tiny_hub: LoopbackHub, cli: RunCli, local_result: Path, without_xet: None
) -> None:
    choice = random.Random(seed)
    tiny_hub.traffic.inject(*(random_fault(choice) for _ in range(num_faults)))
    for _ in range(num_faults + 1):
        done = cli(*JOB)
        if done.returncode == 0:
            break
        assert "error:" in done.stderr
        assert "Traceback" not in done.stderr
    assert_published(tiny_hub, local_result)


@pytest.mark.slow
def test_disk_is_within_limits(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, tiny: Path) -> None:
    """The least room is that of the largest source shard and its result."""
    plan = json.loads(cli(*JOB, "--dry-run", "--json").stdout)
    largest = max(p.stat().st_size for p in tiny.glob("*.safetensors"))
    room = plan["disk_needed"]
    assert 2 * largest < room < 3 * largest
    tiny_hub.traffic.bytes_per_second = 3_000_000.0
    with Watched(cwd) as watched:
        cli(*JOB, "--max-disk", str(room), code=0)
    assert_published(tiny_hub, local_result)
    assert largest < watched.most < room


@pytest.mark.slow
def test_a_job_continued_with_less_room_keeps_to_it(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, tiny: Path, without_xet: None
) -> None:
    """Killed with two shards to upload and two fetched; together with one more they would exceed the room."""
    room = 7_000_000
    work = cwd / "k2convert-work" / "me--out"
    shards = sorted(path.name for path in tiny.glob("*.safetensors"))
    tiny_hub.traffic.up = Line(1000.0)
    with start_cli(*JOB, cwd=cwd) as process:
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
    assert used_bytes(cwd) < room
    tiny_hub.traffic.up = Line(1_500_000.0)
    with Watched(cwd) as watched:
        cli(*JOB, "--max-disk", str(room), code=0)
    assert_published(tiny_hub, local_result)
    assert watched.most < room


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["00002-of-000005.safetensors", "tokenizer.json"], ids=["header", "small file"])
def test_an_interrupt_while_planning_waits_for_no_answer(tiny_hub: LoopbackHub, cwd: Path, name: str) -> None:
    tiny_hub.traffic.inject(Fault("GET", name, status=429, retry_after=300))
    with start_cli("inspect", "hf://moon/tiny", cwd=cwd) as process:
        while not tiny_hub.traffic.injected and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130, "the Hub asked for a pause of 300 s"
