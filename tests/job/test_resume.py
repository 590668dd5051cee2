"""A run may die at any moment; running it again ends in the same bytes, without doing finished shards again."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from command import run_here
from forked_runs import finish, send, start
from results import contents

from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.names import CONFIG_NAME, INDEX_NAME, LEDGER_NAME, WORK_FOLDER
from k2convert.errors import LockedError
from k2convert.records.lock import lock_destination


@pytest.fixture(scope="module")
def seconds(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    folder = tmp_path_factory.mktemp("timed")
    assert finish("run", tiny, folder / "warm-up") == 0
    begin = time.monotonic()
    assert finish("run", tiny, folder / "result") == 0
    return time.monotonic() - begin


@pytest.fixture
def destination(local_result: Path, tmp_path: Path) -> Path:
    """A finished folder that a test may change."""
    return Path(shutil.copytree(local_result, tmp_path / "out"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_run_is_resumed(seed: int, tiny: Path, seconds: float, local_result: Path, tmp_path: Path) -> None:
    process = start("run", tiny, tmp_path / "out")
    time.sleep(random.Random(seed).uniform(0, seconds))
    send(process, signal.SIGKILL)
    process.join()
    destination = tmp_path / "out"
    if process.exitcode == -signal.SIGKILL and destination.exists() and not (destination / CONFIG_NAME).exists():
        assert not (destination / INDEX_NAME).exists()
    for shard in destination.glob("*.safetensors"):
        assert shard.read_bytes() == (local_result / shard.name).read_bytes(), f"{shard.name} is half-written"
    done = {p.name: p.stat().st_mtime_ns for p in destination.glob("*.safetensors")}
    recorded = {p.name.removesuffix(".json") for p in (destination / ".k2convert" / "done").glob("*.json")}
    assert recorded <= set(done), "a record without its shard"

    assert finish("run", tiny, destination, "--workers", 4) == 0
    assert contents(destination) == contents(local_result), "whatever the number of workers"
    redone = [name for name in recorded if (destination / name).stat().st_mtime_ns != done[name]]
    assert not redone, "finished shards were converted again"
    times = {path: path.stat().st_mtime_ns for path in destination.glob("*") if path.is_file()}
    assert finish("run", tiny, destination) == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times, "a finished result is left alone"
    assert not list(destination.rglob("*.tmp"))


def test_ctrl_c_ends_with_130_and_resumes(tiny: Path, local_result: Path, tmp_path: Path) -> None:
    for attempt in range(20):  # on a busy machine a job may end before it is interrupted
        destination = tmp_path / str(attempt) / "out"
        process = start("run", tiny, destination)
        while process.is_alive() and not (destination / ".k2convert" / "job.json").exists():
            time.sleep(0.001)
        send(process, signal.SIGINT)
        process.join(600)
        if process.exitcode != 0:
            break
    assert process.exitcode == 130
    assert not list(destination.glob("*.tmp"))
    assert finish("run", tiny, destination) == 0
    assert contents(destination) == contents(local_result)


def test_what_a_complete_folder_lost_is_restored(tiny: Path, destination: Path) -> None:
    (destination / "report.html").write_text("<html>")
    before = contents(destination)
    for name in ("tokenizer.json", "hf_quant_config.json", "k2convert.json"):
        (destination / name).unlink()
    (destination / CONFIG_NAME).write_text("{}")
    for word in ("resuming: 5 of 5", "already complete: 5 of 5"):
        assert word in run_here("run", tiny, destination, code=0).stderr
        assert contents(destination) == before


def test_ledger_keeps_the_versions_of_the_run_that_converted(tiny: Path, destination: Path) -> None:
    ledger = json.loads((destination / LEDGER_NAME).read_text())
    content = json.dumps(ledger | {"versions": {"python": "3.11.0", "torch": "2.0.0"}}, indent=2) + "\n"
    (destination / LEDGER_NAME).write_text(content)
    assert finish("run", tiny, destination) == 0
    assert (destination / LEDGER_NAME).read_text() == content


def test_lost_or_truncated_shard_is_made_again(tiny: Path, local_result: Path, destination: Path) -> None:
    (destination / "model-00002-of-000005.safetensors").unlink()
    state = json.loads(run_here("status", destination, "--json", code=0).stdout)
    assert (state["complete"], state["pending"]) == (False, ["model-00002-of-000005.safetensors"])
    shard = destination / "model-00003-of-000005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert finish("run", tiny, destination) == 0
    assert contents(destination) == contents(local_result)


def test_records_of_another_job_are_not_resumed(tiny: Path, destination: Path, tmp_path: Path) -> None:
    """Somebody deleted what names the job, and some shards, but not the records."""
    for name in (CONFIG_NAME, INDEX_NAME, ".k2convert/job.json"):
        (destination / name).unlink()
    for number in (2, 4):
        (destination / f"model-0000{number}-of-000005.safetensors").unlink()
    assert finish("run", tiny, destination, "--rule", "max") == 0
    assert finish("run", tiny, tmp_path / "max", "--rule", "max") == 0
    assert contents(destination) == contents(tmp_path / "max")


def test_second_run_on_the_same_destination_refuses(tmp_path: Path) -> None:
    (tmp_path / WORK_FOLDER).mkdir()
    with (
        lock_destination(tmp_path),
        pytest.raises(LockedError, match=f"process {os.getpid()}"),
        lock_destination(tmp_path),
    ):
        pass


def test_changed_jobs_are_refused(tiny: Path, local_result: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "changed"))
    config = json.loads((source / CONFIG_NAME).read_text())
    for change, field in (
        (["--rule", "max"], "rule was 'mse', now 'max'"),
        (["--activations", "w4a16"], "activations was 'w4a4', now 'w4a16'"),
        (["--set", "input_scale.down=0.5"], "input_scale was"),
        (["--layout", "compressed-tensors"], "layout was 'modelopt'"),
        ([], "source_config was"),
    ):
        if not change:
            (source / CONFIG_NAME).write_text(json.dumps(config | {"rope_theta": 1.0}))
        assert field in run_here("run", source, local_result, *change, code=1).stderr


def test_shard_files_have_ordinary_permissions_and_aligned_data(local_result: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for shard in local_result.glob("*.safetensors"):
        assert shard.stat().st_mode & 0o777 == 0o666 & ~mask
        assert read_header(shard).data_begin % 4096 == 0
