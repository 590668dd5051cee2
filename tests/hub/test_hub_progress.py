"""What a person sees of a job with the Hub: three phases with their own rates, and how far an earlier run came."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import RunCli, start_cli
from loopback import LoopbackHub
from published import JOB, assert_published

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
from screen import Screen, in_terminal, same_as_golden


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_a_hub_job_on_screen(columns: int, rows: int, tiny_hub: LoopbackHub, cwd: Path, hub_environment: None) -> None:
    tiny_hub.traffic.bytes_per_second = 1_000_000.0
    seen: list[str] = []

    def watch(screen: Screen, process: "subprocess.Popen[bytes]") -> None:
        assert process.pid
        seen.append(screen.stable)

    done = in_terminal(*JOB, columns=columns, rows=rows, folder=cwd, watch=watch, HF_HUB_DISABLE_XET="1")
    assert done.code == 0
    same_as_golden(f"hub-{columns}", done.screen.stable)
    shares = {tuple(map(int, re.findall(r"(\d+) %", text)[:3])) for text in seen}
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
    assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ transfer: download \d+ % ", errors, re.MULTILINE)
    assert "running: " in running
    assert re.search(r"^download: [\d.]+ [kM]B of 7\.\d+ MB", running, re.MULTILINE)

    tiny_hub.traffic.bytes_per_second = None
    stopped = cli("status", "k2convert-work/me--out", "--json")
    assert json.loads(stopped.stdout)["resume"] == "k2convert run hf://moon/tiny hf://me/out --yes"
    again = cli(*JOB, "--json", code=0)
    json.loads(again.stdout)
    assert re.search(r"hf://me/out: resuming: \d of 5 shards done", again.stderr)
    assert_published(tiny_hub, local_result)
