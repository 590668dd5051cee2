"""`run --calibrate` with the Hub: the shards of a local job, on both sides, in bounded disk."""

import json
import random
from pathlib import Path

import pytest
from command import RunCli, run_here
from disk import Watched
from loopback import LoopbackHub
from published import assert_published
from test_hub_interrupted import kill_after

NUM_KILLS, NUM_SLOW_KILLS = 1, 20
OPTIONS = ("--set", "calibration={tokens: 320, window: 64}", "--device", "cpu")


@pytest.fixture(scope="module")
def text(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text((tiny / "calibration.txt").read_text()[:6000])
    return path


@pytest.fixture(scope="module")
def local(short: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "out"
    done = run_here("run", short, folder, "--calibrate", text, *OPTIONS)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def source(server: LoopbackHub, short: Path) -> LoopbackHub:
    """The loopback Hub with the short checkpoint as moon/short."""
    server.store.add_folder("moon/short", short)
    return server


def test_hub_to_hub_publishes_the_shards_of_a_local_job_in_bounded_disk(
    source: LoopbackHub, hub_cli: RunCli, workplace: Path, local: Path, short: Path, text: Path
) -> None:
    words = ("run", "hf://moon/short", "hf://me/out", "--calibrate", text, *OPTIONS, "--yes")
    plan = hub_cli(*words, "--dry-run", "--json")
    assert plan.returncode == 0, plan.stderr
    needed = json.loads(plan.stdout)["disk_needed"]
    with Watched(workplace) as watched:
        done = hub_cli(*words, "--max-disk", str(needed))
    assert done.returncode == 0, done.stderr
    assert 0 < watched.most <= needed + 64 * 4096
    for path in local.glob("*.safetensors"):
        assert source.store.read("me/out", path.name) == path.read_bytes()
        sent = source.traffic.bytes_sent(f"{path.name}$")
        assert sent <= 2.1 * (short / path.name).stat().st_size, "for the walk, and for the shard"
    ledgers = [json.loads((local / "k2convert.json").read_text())]
    ledgers.append(json.loads(source.store.read("me/out", "k2convert.json")))
    assert ledgers[0]["calibration"] == ledgers[1]["calibration"]
    again = hub_cli(*words)
    assert "already holds this result" in again.stderr
    assert not list(workplace.rglob("calibration.work"))


def check_killed_job(
    source: LoopbackHub, hub_cli: RunCli, workplace: Path, local: Path, text: Path, seeds: range
) -> None:
    """Kill the job at one random moment per seed, then let it finish."""
    job = ("run", "hf://moon/short", "hf://me/out", "--calibrate", text, *OPTIONS, "--yes")
    kills = 0
    for seed in seeds:
        choice = random.Random(seed)
        kills += kill_after(source, workplace, choice.randrange(1, 60), choice.uniform(0, 2), job)
    assert kills > len(seeds) // 3
    done = hub_cli(*job)
    assert done.returncode == 0, done.stderr
    assert_published(source, local)
    assert not list(workplace.rglob("calibration.work"))


def test_killed_at_some_moments_it_ends_with_one_commit_and_equal_bytes(
    source: LoopbackHub, hub_cli: RunCli, workplace: Path, local: Path, text: Path, without_xet: None
) -> None:
    check_killed_job(source, hub_cli, workplace, local, text, range(NUM_KILLS))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SLOW_KILLS, 5))
def test_killed_at_twenty_moments(
    source: LoopbackHub, hub_cli: RunCli, workplace: Path, local: Path, text: Path, without_xet: None, first: int
) -> None:
    check_killed_job(source, hub_cli, workplace, local, text, range(100 + first, 105 + first))
