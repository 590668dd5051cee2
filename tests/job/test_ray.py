"""`run --ray` on real raylets: a local run's bytes, whichever process dies, and no recorded shard is made twice."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from command import messages_of, run, run_here, start_cli
from forked_runs import finish, send, start
from places import FOLDER_KINDS
from ray_nodes import Nodes
from results import contents

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with closing(Nodes(3)) as cluster:
        yield cluster


def job(source: Path, out: Path, nodes: Nodes) -> tuple[str, ...]:
    return ("run", str(source), str(out), "--ray", nodes.address)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("split", "a snapshot of the cache"), ("small", "a folder of links"), ("k3_edges", "plain")]
)
def test_a_cluster_gives_equal_bytes_wherever_the_source_lies(
    name: str, kind: str, nodes: Nodes, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "place").mkdir()
    source = FOLDER_KINDS[kind](request.getfixturevalue(name), tmp_path / "place")
    assert run("run", source, tmp_path / "here") == 0
    errors = run_here(*job(source, tmp_path / "there", nodes), code=0).stderr
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert len(set(re.findall(r"node \S+ \((\w+)\): model-", errors))) == len(nodes.nodes)


def stop_workers(nodes: Nodes, driver: "subprocess.Popen[str]") -> dict[int, int]:
    """Stop workers while they do a task; those whose task ended meanwhile go on."""
    while True:
        assert driver.poll() is None
        workers = nodes.working()
        for process in workers:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)
        still = {process: raylet for process, raylet in nodes.working().items() if process in workers}
        for process in workers.keys() - still.keys():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        if still:
            return still


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "raylet"])
def test_a_worker_may_be_killed(victim: str, tiny: Path, whole: dict[str, bytes], nodes: Nodes, tmp_path: Path) -> None:
    out = tmp_path / "out"
    driver = start_cli(*job(tiny, out, nodes), "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    processes = stop_workers(nodes, driver)
    worker, raylet = next(iter(processes.items()))
    if victim == "raylet":
        nodes.kill(raylet)
    os.kill(worker, signal.SIGKILL)
    for process in processes:
        if process != worker:
            os.kill(process, signal.SIGCONT)
    output, errors = driver.communicate(timeout=120)
    assert driver.returncode == 0, errors
    assert json.loads(output), "nothing else is on stdout"
    assert re.search(r"model-0000\d-of-\d+\.safetensors: its worker died; converting it again\n", errors)
    assert "raylet" not in errors
    assert contents(out) == whole
    assert not list(out.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_driver_is_started_again_and_makes_no_recorded_shard_twice(
    number: signal.Signals, tiny: Path, whole: dict[str, bytes], nodes: Nodes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    driver = start(*job(tiny, out, nodes))
    while not (recorded := list((out / ".k2convert" / "done").glob("*.json"))):
        assert driver.is_alive()
    send(driver, number)
    driver.join(30)
    assert number == signal.SIGKILL or driver.exitcode == 130
    before = {path.stem: (out / path.stem).stat().st_mtime_ns for path in recorded}
    assert finish(*job(tiny, out, nodes)) == 0
    assert contents(out) == whole
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert not list(out.rglob("*.tmp"))


@pytest.mark.slow
def test_a_node_with_another_version_is_refused(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Nodes(0)) as nodes:
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, types\nsys.modules['k2convert'] = types.ModuleType('k2convert')\n"
            "sys.modules['k2convert'].__version__ = '0.0.9'\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        nodes.add()
        error = run_here(*job(small, tmp_path / "refused", nodes), code=1).stderr
        assert re.search(r"error: node \S+ \(\w+\) has k2convert 0\.0\.9, but this is", error)


@pytest.mark.slow
def test_a_job_waits_for_a_cluster_to_grow(small: Path, tmp_path: Path) -> None:
    with closing(Nodes(0)) as nodes:
        driver = start_cli(*job(small, tmp_path / "out", nodes), stderr=subprocess.PIPE)
        assert driver.stderr is not None
        line = next(line for line in driver.stderr if "no node" in line)
        assert line.endswith("no node has CPUs: start one with `ray start`, or wait until the cluster grows\n")
        nodes.add(cpus=4)
        _, errors = driver.communicate(timeout=120)
        assert driver.returncode == 0, errors


@pytest.mark.slow
def test_a_dry_run_shows_the_cluster_and_no_time_of_this_machine(small: Path, nodes: Nodes, tmp_path: Path) -> None:
    number = len(nodes.nodes)
    output = run_here(*job(small, tmp_path / "out", nodes), "--dry-run", code=0).stdout
    has = f"{number + 1} nodes, {number} CPU{'s' if number > 1 else ''}"
    assert f"cluster: {has}; {number} shards at a time; the time is not estimated\n" in output
    assert "time: " not in output
    document = json.loads(run_here(*job(small, tmp_path / "out", nodes), "--dry-run", "--json", code=0).stdout)
    assert document["cluster"]["shards_at_a_time"] == number
    assert "estimate" not in document


@pytest.mark.slow
def test_an_expected_error_names_the_node(small: Path, nodes: Nodes, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".k2convert" / "done").mkdir(parents=True)
    (out / "model-00001-of-000003.safetensors").mkdir()
    error = messages_of(run_here(*job(small, out, nodes), code=1).stderr)
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.search(r"node \S+ \(\w+\): .*model-00001", lines[0]), lines


def test_what_no_cluster_can_do_is_refused(small: Path, tmp_path: Path) -> None:
    for words, says in (
        (("--ray", "auto", "--part", "1/2"), "use one of them"),
        (("--ray", "auto", "--calibrate", "text.txt"), "leave out --ray"),
        (("--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1: no cluster"),
    ):
        refused = run_here("run", small, tmp_path / "out", *words)
        assert refused.returncode in (1, 2)
        assert says in refused.stderr
