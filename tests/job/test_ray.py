"""`run --ray` on real raylets: a local run's bytes, whichever process dies, and no recorded shard is made twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import run, said
from forked_runs import finish, send, start
from ray_nodes import Nodes
from results import contents

pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    cluster = Nodes(3)
    yield cluster
    cluster.close()


def job(source: Path, out: Path, nodes: Nodes) -> tuple[str, ...]:
    return ("run", str(source), str(out), "--ray", nodes.address, "--cpus-per-shard", "1")


def begin(*words: str) -> subprocess.Popen[str]:
    """Start the command; its lines on stderr can be read."""
    return subprocess.Popen(
        [sys.executable, "-m", "k2convert", *words],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a local run."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert run("run", tiny, folder) == 0
    return contents(folder)


@pytest.mark.parametrize("name", ["split", "small"])
def test_a_cluster_gives_the_bytes_of_a_local_run_and_all_nodes_work(
    name: str, nodes: Nodes, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    source: Path = request.getfixturevalue(name)
    assert run("run", source, tmp_path / "here") == 0
    capsys.readouterr()
    assert run(*job(source, tmp_path / "there", nodes)) == 0
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    said = capsys.readouterr().err
    assert len(set(re.findall(r"node \S+ \((\w+)\): model-", said))) == len(nodes.nodes)


@pytest.mark.parametrize("victim", [pytest.param("worker", marks=pytest.mark.slow), "raylet"])
def test_a_killed_worker_or_node_changes_no_byte(
    victim: str, tiny: Path, whole: dict[str, bytes], nodes: Nodes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    driver = begin(*job(tiny, out, nodes))
    while not list(out.glob("*.tmp")):
        assert driver.poll() is None
    processes = nodes.working()
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    assert processes
    worker, raylet = next(iter(processes.items()))
    if victim == "raylet":
        nodes.kill(raylet)
    os.kill(worker, signal.SIGKILL)
    for process in processes:
        if process != worker:
            os.kill(process, signal.SIGCONT)
    _, said = driver.communicate(timeout=120)
    assert driver.returncode == 0, said
    assert re.search(r"model-0000\d-of-\d+\.safetensors: its worker died; converting it again\n", said)
    assert contents(out) == whole
    assert not list(out.rglob("*.tmp"))


def test_a_killed_driver_is_started_again_and_makes_no_recorded_shard_twice(
    tiny: Path, whole: dict[str, bytes], nodes: Nodes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    driver = start(*job(tiny, out, nodes))
    while not (recorded := list((out / ".k2convert" / "shards").glob("*.json"))):
        assert driver.is_alive()
    send(driver, signal.SIGKILL)
    driver.join()
    before = {path.stem: (out / path.stem).stat().st_mtime_ns for path in recorded}
    assert finish(*job(tiny, out, nodes)) == 0
    assert contents(out) == whole
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert not list(out.rglob("*.tmp"))


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tiny: Path, whole: dict[str, bytes], nodes: Nodes, tmp_path: Path) -> None:
    out = tmp_path / "out"
    driver = start(*job(tiny, out, nodes))
    while not (out / ".k2convert" / "job.json").exists():
        assert driver.is_alive()
    send(driver, signal.SIGINT)
    driver.join(30)
    assert driver.exitcode == 130
    assert finish(*job(tiny, out, nodes)) == 0
    assert contents(out) == whole


@pytest.mark.slow
def test_a_job_waits_for_nodes_that_join_late_and_refuses_another_version(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = Nodes(0)
    try:
        driver = start(*job(small, tmp_path / "out", nodes))
        time.sleep(1)
        assert driver.is_alive()
        nodes.add()
        driver.join(60)
        assert driver.exitcode == 0
        nodes.kill(next(iter({node.all_processes["raylet"][0].process.pid for node in nodes.nodes})))
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, types\nsys.modules['k2convert'] = types.ModuleType('k2convert')\n"
            "sys.modules['k2convert'].__version__ = '0.0.9'\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        nodes.add()
        capsys.readouterr()
        assert run(*job(small, tmp_path / "refused", nodes)) == 1
        assert re.search(r"error: node \S+ \(\w+\) has k2convert 0\.0\.9, but this is", capsys.readouterr().err)
    finally:
        nodes.close()


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cpus-per-shard", "4"), "no node has 4 CPUs (largest: 1): pass --cpus-per-shard 1."),
        (("--device", "cuda"), "no node with CPUs has a GPU: pass --device cpu."),
    ],
    ids=["cpus", "gpus"],
)
def test_a_cluster_without_a_node_for_a_task_is_refused(
    words: tuple[str, ...],
    said: str,
    more: tuple[str, ...],
    small: Path,
    nodes: Nodes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "cuda" in words:
        pytest.importorskip("torch")
    assert run(*job(small, tmp_path / "out", nodes), *words, *more) == 1
    assert f"error: --ray {nodes.address}: {said}\n" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.safetensors*"))


def test_a_job_says_that_it_waits_for_a_cluster_to_grow(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setenv("RAY_NODE_TYPE_NAME", "workers")  # as a launcher does, in place of `ray start`
        nodes = Nodes(1)
    try:
        driver = begin(*job(small, tmp_path / "out", nodes)[:-1], "2")
        assert driver.stderr is not None
        line = next(line for line in driver.stderr if "waiting" in line)
        assert line.endswith(
            "waiting for a node: 3 shards queued, 0 running; no node has 2 CPUs (largest: 1): "
            "pass --cpus-per-shard 1, or wait until the cluster grows\n"
        )
        nodes.add(cpus=2)
        _, said = driver.communicate(timeout=120)
        assert driver.returncode == 0, said
    finally:
        nodes.close()


def test_a_dry_run_shows_the_cluster_and_no_time_of_this_machine(
    small: Path, nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = len(nodes.nodes)
    assert run(*job(small, tmp_path / "out", nodes), "--dry-run") == 0
    said = capsys.readouterr().out
    has = f"{number + 1} nodes, {number} CPU{'s' if number > 1 else ''}"
    assert f"cluster: {has}; {number} shards at a time; the time is not estimated\n" in said
    assert "time: " not in said
    assert run(*job(small, tmp_path / "out", nodes), "--dry-run", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cluster"]["shards_at_a_time"] == number
    assert "estimate" not in document


def test_an_expected_error_names_the_node(
    small: Path, nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / ".k2convert").mkdir(parents=True)
    (out / "model-00001-of-000003.safetensors").mkdir()
    assert run(*job(small, out, nodes)) == 1
    lines = [line for line in said(capsys.readouterr().err).splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.search(r"node \S+ \(\w+\): .*model-00001", lines[0]), lines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ray", "auto", "--part", "1/2"), "use one of them"),
        (("--ray", "auto", "--calibrate", "text.txt"), "leave out --ray"),
        (("--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1: no cluster"),
    ],
    ids=["part", "calibrate", "no cluster"],
)
def test_what_no_cluster_can_do_is_refused(
    words: tuple[str, ...], said: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", small, tmp_path / "out", *words) in (1, 2)
    assert said in capsys.readouterr().err


def test_a_local_run_imports_no_ray(small: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom k2convert.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, "run", small, tmp_path / "out"], cwd=ROOT, check=True)
