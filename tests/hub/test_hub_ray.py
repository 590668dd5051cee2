"""A Hub-to-Hub job on a Ray cluster: each node fetches, converts and sends shards of its own, with the usual bytes."""

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from command import RunCli, start_cli
from faults import Fault
from loopback import LoopbackHub
from published import JOB, assert_published
from ray_nodes import Nodes

pytest.importorskip("ray")

FOLDER_JOB = ("run", "hf://moon/tiny", "shared")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder with a short name: Ray puts sockets below it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def nodes(
    request: pytest.FixtureRequest, tiny_hub: LoopbackHub, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Nodes]:
    """Three nodes, or as many as a test asks for. Their workers have its Hub and folder for temporary files."""
    with monkeypatch.context() as changed:
        changed.setenv("TMPDIR", str(temporary))
        cluster = Nodes(getattr(request, "param", 3))
    yield cluster
    cluster.close()


def start(cwd: Path, nodes: Nodes) -> subprocess.Popen[str]:
    return start_cli(*JOB, "--ray", nodes.address, cwd=cwd, stderr=subprocess.PIPE)


def downloading(driver: subprocess.Popen[str], temporary: Path, nodes: Nodes) -> tuple[int, int]:
    """Wait until a node downloads; returns a process that does a task, and its raylet."""
    while not list(temporary.rglob("*.safetensors.part")) or not (workers := nodes.working()):
        assert driver.poll() is None
    return next(iter(workers.items()))


@pytest.mark.slow
def test_nodes_fetch_convert_and_send_whoever_dies(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, nodes: Nodes, temporary: Path
) -> None:
    tiny_hub.traffic.bytes_per_second = 1_000_000.0
    with start(cwd, nodes) as driver:
        downloading(driver, temporary, nodes)
        driver.send_signal(signal.SIGKILL)
    with start(cwd, nodes) as driver:
        worker, raylet = downloading(driver, temporary, nodes)
        nodes.kill(raylet)
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        tiny_hub.traffic.bytes_per_second = None
        _, errors = driver.communicate(timeout=120)
        assert driver.returncode == 0, errors
    assert_published(tiny_hub, local_result)
    assert len(set(re.findall(r"node \S+ \((\w+)\): model-", errors))) >= 2
    assert not list(cwd.rglob("*.safetensors")), "no shard came to the driver"

    left = set(temporary.glob("k2convert-*"))  # by tasks that were killed
    cli(*FOLDER_JOB, "--ray", nodes.address, code=0)
    for path in local_result.glob("*.safetensors"):
        assert (cwd / "shared" / path.name).read_bytes() == path.read_bytes()
    assert set(temporary.glob("k2convert-*")) <= left, "nodes keep nothing"


@pytest.mark.slow
def test_what_a_node_says_of_an_outage_is_shown(
    tiny_hub: LoopbackHub, cwd: Path, nodes: Nodes, temporary: Path
) -> None:
    tiny_hub.traffic.bytes_per_second = 1_000_000.0
    with start(cwd, nodes) as driver:
        downloading(driver, temporary, nodes)
        tiny_hub.traffic.inject(Fault("GET", r"\.safetensors$", times=2))
        tiny_hub.traffic.bytes_per_second = None
        _, errors = driver.communicate(timeout=120)
    assert driver.returncode == 0, errors
    assert re.search(r"node \S+ \(\w+\): model-\S+: .*503.*; trying again in ", errors)
