"""Hub-to-Hub jobs that are interrupted, hit by faults or short of disk: what they say, and the usual bytes."""

import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from command import RunCli, start_cli
from disk import Watched, used_bytes
from faults import Fault, Kind, Line
from loopback import LoopbackHub
from published import JOB, assert_published
from screen import Screen, in_terminal, same_as_golden


@pytest.mark.slow
def test_a_partial_download(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, tiny: Path) -> None:
    shard = "model-00001-of-000005.safetensors"
    tiny_hub.traffic.bytes_per_second = 60_000.0
    record = cwd / "k2convert-work" / "me--out" / ".k2convert" / "download" / f"{shard}.part.json"
    with start_cli(*JOB, cwd=cwd) as process:
        while not record.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    saved = record.read_text().split('"done": "')[1].count("1") * 65536
    assert saved > 0
    tiny_hub.traffic.bytes_per_second = None
    tiny_hub.traffic.clear()
    cli(*JOB, code=0)
    assert_published(tiny_hub, local_result)
    assert tiny_hub.traffic.bytes_sent(shard) <= (tiny / shard).stat().st_size - saved + 200_000, "and a header"


_REQUESTS = [("GET", path) for path in (r"\.safetensors$", "/api/models/", "/tree/")]
_REQUESTS += [("POST", path) for path in ("/preupload/", "/commit/")]


def random_fault(choice: random.Random) -> Fault:
    kind = choice.choice(["503", "reset", "short", "wrong", "429", "412", "upload"])
    after = choice.randrange(0, 1_000_000)
    if kind in ("503", "429"):
        request = choice.choice(_REQUESTS)
        return Fault(*request, status=int(kind), retry_after=1 if kind == "429" else None)
    if kind == "412":
        return Fault("POST", "/commit/main", status=412)
    if kind == "upload":
        return Fault("PUT", "/_lfs/", Kind.RESET, after_bytes=after)
    broken = {"reset": Kind.RESET, "short": Kind.SHORT, "wrong": Kind.CORRUPT}[kind]
    return Fault("GET", r"\.safetensors$", broken, after_bytes=after)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("seed", "num_faults"), [(1, 6), *((seed, 5) for seed in range(50, 56))])
def test_faults(
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
def test_a_job_continued_with_less_disk_keeps_to_it(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, tiny: Path, without_xet: None
) -> None:
    """Killed with two shards to upload and two fetched; together with one more they would exceed the limit."""
    limit = 7_000_000
    work = cwd / "k2convert-work" / "me--out"
    shards = sorted(path.name for path in tiny.glob("*.safetensors"))
    tiny_hub.traffic.up = Line(1000.0)
    with start_cli(*JOB, cwd=cwd) as process:
        while len(list((work / ".k2convert" / "done").glob("*.json"))) < len(shards) and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    shutil.rmtree(work / ".k2convert" / "download", ignore_errors=True)
    (work / ".k2convert" / "download").mkdir()
    for name in shards[2:]:
        (work / name).unlink()
        (work / ".k2convert" / "done" / f"{name}.json").unlink()
    for name in shards[2:4]:
        shutil.copy(tiny / name, work / ".k2convert" / "download")
    assert used_bytes(cwd) < limit
    tiny_hub.traffic.up = Line(1_500_000.0)
    with Watched(cwd) as watched:
        cli(*JOB, "--max-disk", str(limit), code=0)
    assert_published(tiny_hub, local_result)
    assert watched.most < limit


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


OUTAGES = {
    "at the start": Fault("GET", "/api/models/moon/tiny"),
    "in a download": Fault("GET", r"00003-of-000005\.safetensors$"),
    "in a download, by resets": Fault("GET", r"00003-of-000005\.safetensors$", Kind.RESET, after_bytes=0),
    "in an upload": Fault("PUT", "/_lfs/"),
    "in a commit": Fault("POST", "/commit/k2convert"),
    "at the end": Fault("POST", "/commit/main"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("when", OUTAGES)
@pytest.mark.usefixtures("without_xet", "hub")
def test_an_outage_of_ten_minutes_is_waited_for(
    when: str, tiny_hub: LoopbackHub, cli: RunCli, local_result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by half a minute with each failure."""
    minutes = 0.0

    def now() -> float:
        nonlocal minutes
        if tiny_hub.traffic.injected:
            minutes += 0.5
        if minutes >= 10:
            tiny_hub.traffic.clear_faults()
        return 60 * minutes

    monkeypatch.setattr("k2convert.hub.client.PATIENCE_SECONDS", 3600.0)
    monkeypatch.setattr("k2convert.hub.client.now", now)
    tiny_hub.traffic.inject(replace(OUTAGES[when], times=10_000))
    begin = time.monotonic()
    done = cli(*JOB, code=0)
    assert minutes >= 10
    assert 1 <= done.stderr.count("trying again in") <= 1 + (time.monotonic() - begin) / 60  # one line a minute
    assert_published(tiny_hub, local_result)


@pytest.mark.slow
@pytest.mark.parametrize("when", OUTAGES)
@pytest.mark.usefixtures("without_xet", "hub")
def test_an_outage_of_more_than_an_hour_ends_the_job(
    when: str, tiny_hub: LoopbackHub, cli: RunCli, local_result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 300.0)
    monkeypatch.setattr("k2convert.hub.client.PATIENCE_SECONDS", 3600.0)
    monkeypatch.setattr("k2convert.hub.client.now", lambda: next(clock))
    tiny_hub.traffic.inject(replace(OUTAGES[when], times=10_000))
    done = cli(*JOB, code=1)
    assert "un the same command again to continue" in done.stderr
    tiny_hub.traffic.clear_faults()
    cli(*JOB, code=0)
    assert_published(tiny_hub, local_result)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_a_hub_job_on_screen(columns: int, rows: int, tiny_hub: LoopbackHub, cwd: Path, hub_environment: None) -> None:
    tiny_hub.traffic.bytes_per_second = 1_000_000.0
    screens: list[str] = []

    def watch(screen: Screen, process: "subprocess.Popen[bytes]") -> None:
        assert process.pid
        screens.append(screen.stable)

    done = in_terminal(*JOB, columns=columns, rows=rows, folder=cwd, watch=watch, HF_HUB_DISABLE_XET="1")
    assert done.code == 0
    same_as_golden(f"hub-{columns}", done.screen.stable)
    shares = {tuple(map(int, re.findall(r"(\d+) %", text)[:3])) for text in screens}
    assert any(len(s) == 3 and 100 > s[0] > s[2] for s in shares), f"phases run ahead of each other: {shares}"


@pytest.mark.slow
def test_an_interrupted_hub_job_says_what_is_done_and_its_status_gives_the_command(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path
) -> None:
    tiny_hub.traffic.bytes_per_second = 100_000.0
    records = cwd / "k2convert-work" / "me--out" / ".k2convert" / "done"
    with start_cli(*JOB, cwd=cwd, stderr=subprocess.PIPE) as process:
        while len(list(records.glob("*.json"))) < 2 and process.poll() is None:
            time.sleep(0.05)
        running = cli("status", "k2convert-work/me--out").stdout
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert re.search(r"^interrupted: [23] of 5 shards are converted\. The same command resumes$", errors, re.MULTILINE)
    assert "next: k2convert run hf://moon/tiny hf://me/out --yes\n" in errors
    assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ download: \d+ % ", errors, re.MULTILINE)
    assert "running: " in running
    assert re.search(r"^download: [\d.]+ [kM]B of 7\.\d+ MB", running, re.MULTILINE)

    tiny_hub.traffic.bytes_per_second = None
    stopped = cli("status", "k2convert-work/me--out", "--json")
    assert json.loads(stopped.stdout)["resume"] == "k2convert run hf://moon/tiny hf://me/out --yes"
    again = cli(*JOB, "--json", code=0)
    json.loads(again.stdout)
    assert re.search(r"hf://me/out: resuming: \d of 5 shards done", again.stderr)
    assert_published(tiny_hub, local_result)
