"""A Hub-to-Hub job on a Ray cluster: each node fetches, converts and sends shards of its own, with the usual bytes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_cli import HubCli, cli_environment, command
from loopback import LoopbackHub
from published import assert_published
from ray_nodes import Nodes, working

pytest.importorskip("ray")

JOB = ("run", "hf://moon/tiny", "hf://me/out", "--yes", "--cpus-per-shard", "1")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder with a short name: Ray puts sockets below it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def nodes(tiny_on_hub: LoopbackHub, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Three nodes whose workers have this test's Hub and folder for temporary files in their environment."""
    with monkeypatch.context() as changed:
        changed.setenv("TMPDIR", str(temporary))
        cluster = Nodes(3)
    yield cluster
    cluster.close()


def test_nodes_fetch_convert_and_send(
    tiny_on_hub: LoopbackHub,
    hub_cli: HubCli,
    workplace: Path,
    local_result: Path,
    nodes: Nodes,
    temporary: Path,
    tmp_path: Path,
) -> None:
    tiny_on_hub.traffic.bytes_per_second = 1_000_000.0
    with subprocess.Popen(
        command(*JOB, "--ray", nodes.address), env=cli_environment(), cwd=workplace, stderr=subprocess.PIPE, text=True
    ) as driver:
        while not list(temporary.rglob("*.safetensors.part")):
            assert driver.poll() is None
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    tiny_on_hub.traffic.bytes_per_second = None
    done = hub_cli(*JOB, "--ray", nodes.address)
    assert done.returncode == 0, done.stderr
    assert_published(tiny_on_hub, local_result)
    assert len(set(re.findall(r"node \S+ \((\w+)\): model-", done.stderr))) == 3
    assert not list(temporary.rglob("*.safetensors*")), "nodes keep nothing"
    assert not list(workplace.rglob("*.safetensors")), "no shard came to the driver"

    out = tmp_path / "shared"
    done = hub_cli("run", "hf://moon/tiny", out, "--ray", nodes.address, "--cpus-per-shard", "1", "--max-disk", "12MB")
    assert done.returncode == 0, done.stderr
    for path in local_result.glob("*.safetensors"):
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_a_node_that_dies_while_it_fetches_changes_no_byte(
    tiny_on_hub: LoopbackHub, workplace: Path, local_result: Path, nodes: Nodes, temporary: Path
) -> None:
    tiny_on_hub.traffic.bytes_per_second = 1_000_000.0
    with subprocess.Popen(
        command(*JOB, "--ray", nodes.address), env=cli_environment(), cwd=workplace, stderr=subprocess.PIPE, text=True
    ) as driver:
        while not (list(temporary.rglob("*.safetensors.part")) and working()):
            assert driver.poll() is None
        worker, raylet = next(iter(working().items()))
        nodes.kill(raylet)
        os.kill(worker, signal.SIGKILL)
        tiny_on_hub.traffic.bytes_per_second = None
        _, said = driver.communicate(timeout=120)
        assert driver.returncode == 0, said
    assert_published(tiny_on_hub, local_result)
