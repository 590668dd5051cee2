"""A pass over a source on the Hub: layer by layer in bounded disk, with the statistics of the same files here."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from command import RunCli, run_here, said
from disk import Watched
from faults import Fault, Line
from loopback import LoopbackHub

LAYERS = ("--tokens", "64", "--window", "32", "--device", "cpu")


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.arange(200) * 7)
    return path


@pytest.fixture(scope="module")
def here(tiny: Path, ids: Path) -> bytes:
    """The statistics made from the folder."""
    path = ids.with_name("here")
    done = run_here("calibrate", tiny, path, "--text", ids, *LAYERS)
    assert done.returncode == 0, done.stderr
    return path.read_bytes()


def test_a_source_on_the_hub_gives_the_same_file_in_bounded_disk(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, tiny: Path, ids: Path, workplace: Path, here: bytes
) -> None:
    plan = hub_cli("calibrate", "hf://moon/tiny", "there", "--text", ids, *LAYERS, "--dry-run", "--json")
    needed = json.loads(plan.stdout)["disk_needed"]
    shards = sum(path.stat().st_size for path in tiny.glob("*.safetensors"))
    assert needed < 0.5 * shards
    assert not (workplace / "there.work").exists()
    with Watched(workplace) as watched:
        options = ("--text", ids, *LAYERS, "--max-disk", str(needed))
        done = hub_cli("calibrate", "hf://moon/tiny", "there", *options)
    assert done.returncode == 0, done.stderr
    assert (workplace / "there").read_bytes() == here
    assert 0 < watched.most <= needed + len(here) + 64 * 4096
    assert not (workplace / "there.work").exists()
    for path in tiny.glob("*.safetensors"):
        assert tiny_on_hub.traffic.bytes_sent(f"{path.name}$") <= 1.1 * path.stat().st_size


def test_too_little_disk_is_refused_before_a_shard_is_fetched(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, ids: Path, workplace: Path
) -> None:
    done = hub_cli("calibrate", "hf://moon/tiny", "there", "--text", ids, *LAYERS, "--max-disk", "1MB", "--quiet")
    assert (done.returncode, done.stdout, said(done.stderr).count("\n")) == (1, "", 1)
    assert said(done.stderr).startswith("error: there.work: the calibration needs ")
    assert done.stderr.endswith(
        "may use 1,000,000. Allow more with --max-disk, or free some space, or use fewer tokens.\n"
    )
    assert not (workplace / "there.work").exists()


def test_a_pass_that_the_hub_ended_goes_on_with_the_commit_it_began_with(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, ids: Path, workplace: Path, here: bytes
) -> None:
    traffic, first = tiny_on_hub.traffic, workplace / "there.work" / "layer-000.safetensors"
    traffic.down = Line(3_000_000)  # so that the last layers are not fetched when the first one is done

    def refuse() -> None:
        while not first.exists():
            time.sleep(0.001)
        traffic.inject(Fault("GET", r"model-0000[45]-of-000005\.safetensors$", status=403, times=1000))

    options = ("--text", ids, *LAYERS)
    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    done = hub_cli("calibrate", "hf://moon/tiny", "there", *options)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    thread.join()
    traffic.clear()
    tiny_on_hub.store.repos["moon/tiny"].commit("main", {})
    done = hub_cli("calibrate", "hf://moon/tiny", "there", *options)
    assert done.returncode == 0, done.stderr
    assert "there: resuming: " in done.stderr
    assert (workplace / "there").read_bytes() == here
