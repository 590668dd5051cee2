"""A pass over a source on the Hub: layer by layer in bounded disk, with the statistics of the same files here."""

import json
from pathlib import Path

import pytest
from command import RunCli, run_here, said
from disk import Watched
from faults import refused_after
from loopback import LoopbackHub

LAYERS = ("--tokens", "64", "--window", "32", "--device", "cpu")


@pytest.fixture(scope="module")
def here(tiny: Path, ids: Path) -> bytes:
    path = ids.with_name("here")
    run_here("calibrate", tiny, path, "--text", ids, *LAYERS, code=0)
    return path.read_bytes()


def test_a_source_on_the_hub_gives_the_same_file(
    tiny_hub: LoopbackHub, cli: RunCli, tiny: Path, ids: Path, cwd: Path, here: bytes
) -> None:
    plan = cli("calibrate", "hf://moon/tiny", "there", "--text", ids, *LAYERS, "--dry-run", "--json")
    needed = json.loads(plan.stdout)["disk_needed"]
    shards = sum(path.stat().st_size for path in tiny.glob("*.safetensors"))
    assert needed < 0.5 * shards
    assert not (cwd / "there.work").exists()
    with Watched(cwd) as watched:
        cli("calibrate", "hf://moon/tiny", "there", "--text", ids, *LAYERS, "--max-disk", str(needed), code=0)
    assert (cwd / "there").read_bytes() == here
    assert 0 < watched.most <= needed + len(here) + 64 * 4096
    assert not (cwd / "there.work").exists()
    for path in tiny.glob("*.safetensors"):
        assert tiny_hub.traffic.bytes_sent(f"{path.name}$") <= 1.1 * path.stat().st_size


def test_too_little_disk_is_refused_at_the_start(tiny_hub: LoopbackHub, cli: RunCli, ids: Path, cwd: Path) -> None:
    done = cli("calibrate", "hf://moon/tiny", "there", "--text", ids, *LAYERS, "--max-disk", "1MB", "--quiet")
    assert (done.returncode, done.stdout, said(done.stderr).count("\n")) == (1, "", 1)
    assert said(done.stderr).startswith("error: there.work: the calibration needs ")
    assert done.stderr.endswith(
        "may use 1.00 MB. Allow more with --max-disk, or free some space, or use fewer tokens.\n"
    )
    assert not (cwd / "there.work").exists()


@pytest.mark.slow
def test_a_pass_that_the_hub_ended_goes_on_with_the_commit_it_began_with(
    tiny_hub: LoopbackHub, cli: RunCli, ids: Path, cwd: Path, here: bytes
) -> None:
    refused = refused_after(cwd / "there.work" / "layer-000.safetensors", tiny_hub.traffic)
    options = ("--text", ids, *LAYERS)
    done = cli("calibrate", "hf://moon/tiny", "there", *options, code=1)
    assert "Traceback" not in done.stderr
    refused.join()
    tiny_hub.traffic.clear()
    tiny_hub.store.repos["moon/tiny"].commit("main", {})
    done = cli("calibrate", "hf://moon/tiny", "there", *options, code=0)
    assert "there: resuming: " in done.stderr
    assert (cwd / "there").read_bytes() == here
