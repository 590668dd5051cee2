"""Progress where nobody watches: lines with their time on stderr, and `status` from another process."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import RunCli
from test_counts import Clock

from k2convert.cli import progress
from k2convert.records.events import Extent
from k2convert.records.work_log import lock_destination
from scripts.fixture_maker.damage import edit_tensor

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


def test_plain_lines_have_time_percent_shards_and_names(run_cli: RunCli, tiny: Path, tmp_path: Path) -> None:
    done = run_cli("run", tiny, tmp_path / "out")
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("next:", "`k2convert evaluate"))]
    assert lines
    assert all(re.match(f"{STAMP} ", line) for line in lines)
    assert re.search(r"convert: 100 % \(7\.45 of 7\.45 MB\), 5 of 5 shards", lines[-1])
    assert "ETA" not in lines[-1]


@pytest.mark.parametrize("more", [0, 50])
def test_the_last_line_is_once(more: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.0)
    display = progress.Display(Extent({"check": (100 + more, 0)}, shards=1))
    display.shard_finished("model-00001-of-000001.safetensors")
    display.progress(bytes_in=100)
    output = ""
    with display as events:
        while not output:
            output = capsys.readouterr().err
        events.progress(bytes_in=more)
    lines = (output + capsys.readouterr().err).splitlines()
    assert [line.count("100 %") for line in lines] == ([0, 1] if more else [1])


def test_json_leaves_progress_on_stderr_and_quiet_silences_it(run_cli: RunCli, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = run_cli("run", tiny, out, "--json")
    assert json.loads(run.stdout)["shards"] == 5
    assert re.search(f"^{STAMP} convert: 100 %", run.stderr, re.MULTILINE)
    validated = run_cli("validate", out, "--json")
    assert json.loads(validated.stdout)["passed"]
    assert re.search(f"^{STAMP} check: 100 %", validated.stderr, re.MULTILINE)
    assert run_cli("validate", out, "--json", "--quiet").stderr == ""
    again = run_cli("run", tiny, out, "--json")
    assert f"{out}: already complete: 5 of 5 shards done" in again.stderr
    assert run_cli("run", tiny, out, "--json", "--quiet").stderr == ""


def test_status_of_a_stopped_job_gives_the_exact_command(run_cli: RunCli, tiny: Path, tmp_path: Path) -> None:
    source = tmp_path / "a source"
    out = tmp_path / "out"
    shutil.copytree(tiny, source)
    edit_tensor(source, "model.layers.3.mlp.experts.0.gate_proj.weight_scale", lambda scales: scales * float("nan"))
    run_cli("run", source, out, "--rule", "max", "--workers", "1", code=1)
    status = run_cli("status", out)
    assert re.match(rf"{out}: not finished: \d of 5 shards, [\d.]+ MB of 7\.45 MB\n", status.stdout)
    *_, following = status.stderr.splitlines()
    expected = f"k2convert run '{source}' {out} --rule max --workers 1"
    assert following.startswith("next: ")
    assert following.endswith(expected)
    assert json.loads(run_cli("status", out, "--json").stdout)["resume"].endswith(expected)
    words = following.removeprefix("next: ").replace("k2convert run", f"{sys.executable} -m k2convert run")
    again = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert again.returncode == 1
    assert f"{out}: resuming: " in again.stderr
    assert not (out / ".k2convert" / "lock").read_text()


def test_status_of_a_running_job(run_cli: RunCli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert run_cli("run", tiny, out).returncode == 0
    clock = Clock()
    extent = Extent({"convert": (10_000_000, 0)}, 5)
    counts = progress.Display(extent, clock=clock)
    with lock_destination(out) as keep:
        counts.begun(extent, keep=keep)
        clock.every(1, lambda: counts.progress(bytes_in=500_000), times=8)
        counts.keep()
        status = run_cli("status", out)
        document = json.loads(run_cli("status", out, "--json").stdout)
        keep('{"phases": {"convert": ')
        assert "running" in run_cli("status", out, code=0).stdout, "half written"
    assert f"{out}: running: 5 of 5 shards\nconvert: 4.00 MB of 10.00 MB, 500.00 kB/s\nETA 0:00:12\n" in status.stdout
    assert "next:" not in status.stderr
    assert document["running"]
    assert document["progress"]["seconds_left"] == 12
    assert not (out / ".k2convert" / "lock").read_text()


def test_a_dry_run_says_bytes_and_memory_and_leaves_nothing(run_cli: RunCli, tiny: Path, tmp_path: Path) -> None:
    words = ("run", tiny, tmp_path / "out", "--dry-run")
    shown = run_cli(*words, code=0).stdout
    assert re.search(r"^memory: needs about [\d.]+ [MG]B, available [\d.]+ [MG]B$", shown, re.MULTILINE)
    assert re.search(r"^reads \S+ MB, writes \S+ MB: under a minute at 1 GB/s, ", shown, re.MULTILINE)
    document = json.loads(run_cli(*words, "--json").stdout)
    shards = document["shards"]
    assert document["bytes_to_read"] == sum(shard["bytes_in"] for shard in shards) > 0
    assert document["bytes_to_write"] == document["tensor_bytes_out"]
    assert 0 < document["memory_needed"] < document["memory_available"]
    assert list(tmp_path.iterdir()) == []
    assert ", of which" not in shown
    run_cli("run", tiny, tmp_path / "out", "--part", "1/2", code=0)
    assert re.search(r"^disk: needs \S+ MB, of which \S+ MB are written, free ", run_cli(*words).stdout, re.MULTILINE)


def test_layers_are_counted_by_their_experts(run_cli: RunCli, tiny: Path, tmp_path: Path) -> None:
    assert run_cli("run", tiny, tmp_path / "out").returncode == 0
    done = run_cli("validate", tmp_path / "out", "--source", tiny, "--layers", "1,2", code=0, OMP_NUM_THREADS="1")
    lines = [line.split(" ", 1)[1] for line in done.stderr.splitlines() if re.match(STAMP, line)]
    assert lines[-1] == "check: 100 % (7.45 of 7.45 MB), layers: 100 % (32 of 32 experts)"
