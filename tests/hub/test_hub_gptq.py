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

OPTIONS = ("--set", "calibration={tokens: 320, window: 64}", "--device", "cpu")


@pytest.fixture(scope="module")
def local(short: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "out"
    run_here("run", short, folder, "--calibrate", text, *OPTIONS, code=0)
    return folder


@pytest.fixture
def source(server: LoopbackHub, short: Path) -> LoopbackHub:
    server.store.add_folder("moon/short", short)
    return server


@pytest.mark.slow
def test_hub_to_hub_publishes_the_shards_of_a_local_job_in_bounded_disk(
    source: LoopbackHub, cli: RunCli, cwd: Path, local: Path, short: Path, text: Path
) -> None:
    words = ("run", "hf://moon/short", "hf://me/out", "--calibrate", text, *OPTIONS, "--yes")
    plan = cli(*words, "--dry-run", "--json", code=0)
    needed = json.loads(plan.stdout)["disk_needed"]
    with Watched(cwd) as watched:
        cli(*words, "--max-disk", str(needed), code=0)
    assert 0 < watched.most <= needed + 64 * 4096
    for path in local.glob("*.safetensors"):
        assert source.store.read("me/out", path.name) == path.read_bytes()
        sent = source.traffic.bytes_sent(f"{path.name}$")
        assert sent <= 2.1 * (short / path.name).stat().st_size, "for the layer pass, and for the shard"
    ledgers = [json.loads((local / "k2convert.json").read_text())]
    ledgers.append(json.loads(source.store.read("me/out", "k2convert.json")))
    assert ledgers[0]["calibration"] == ledgers[1]["calibration"]
    again = cli(*words)
    assert "already holds this result" in again.stderr
    assert not list(cwd.rglob("calibration.work"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(seed, seed + 5) for seed in range(100, 120, 5)], ids=lambda seeds: f"from {seeds.start}"
)
def test_killed_at_random_moments_it_ends_with_one_commit_and_equal_bytes(
    seeds: range, source: LoopbackHub, cli: RunCli, cwd: Path, local: Path, text: Path, without_xet: None
) -> None:
    job = ("run", "hf://moon/short", "hf://me/out", "--calibrate", text, *OPTIONS, "--yes")
    kills = 0
    for seed in seeds:
        choice = random.Random(seed)
        kills += kill_after(source, cwd, choice.randrange(1, 60), choice.uniform(0, 2), job)
    assert kills > len(seeds) // 3
    cli(*job, code=0)
    assert_published(source, local)
    assert not list(cwd.rglob("calibration.work"))
