"""A run may die at any moment; running it again ends in the same bytes, without doing finished shards again."""

import json
import os
import shutil
from pathlib import Path

import pytest
from command import run, run_here
from damaged_files import flip
from results import contents, files_of

from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.names import CONFIG_NAME, INDEX_NAME, LEDGER_NAME


@pytest.fixture
def destination(local_result: Path, tmp_path: Path) -> Path:
    """A finished folder that a test may change."""
    return Path(shutil.copytree(local_result, tmp_path / "out"))


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
    assert run("run", tiny, destination) == 0
    assert (destination / LEDGER_NAME).read_text() == content


def test_lost_or_truncated_shard_is_made_again(tiny: Path, local_result: Path, destination: Path) -> None:
    (destination / "model-00002-of-000005.safetensors").unlink()
    state = json.loads(run_here("status", destination, "--json", code=0).stdout)
    assert (state["complete"], state["pending"]) == (False, ["model-00002-of-000005.safetensors"])
    shard = destination / "model-00003-of-000005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert run("run", tiny, destination) == 0
    assert contents(destination) == contents(local_result)


def test_records_of_another_job_are_not_resumed(tiny: Path, destination: Path, tmp_path: Path) -> None:
    """Somebody deleted what names the job, and some shards, but not the records."""
    for name in (CONFIG_NAME, INDEX_NAME, ".k2convert/job.json"):
        (destination / name).unlink()
    for number in (2, 4):
        (destination / f"model-0000{number}-of-000005.safetensors").unlink()
    assert run("run", tiny, destination, "--rule", "max") == 0
    assert run("run", tiny, tmp_path / "max", "--rule", "max") == 0
    assert contents(destination) == contents(tmp_path / "max")


def test_changed_jobs_are_refused(tiny: Path, local_result: Path) -> None:
    for change, field in (
        (["--rule", "max"], "rule was 'mse', now 'max'"),
        (["--activations", "w4a16"], "activations was 'w4a4', now 'w4a16'"),
        (["--set", "input_scale.down=0.5"], "input_scale was"),
        (["--layout", "compressed-tensors"], "layout was 'modelopt'"),
    ):
        assert field in run_here("run", tiny, local_result, *change, code=1).stderr


def test_shard_files_have_ordinary_permissions_and_aligned_data(local_result: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for shard in local_result.glob("*.safetensors"):
        assert shard.stat().st_mode & 0o777 == 0o666 & ~mask
        assert read_header(shard).data_begin % 4096 == 0


SHARD = "model-00002-of-000003.safetensors"
OTHER = "model-00001-of-000003.safetensors"


@pytest.fixture
def source(small: Path, tmp_path: Path) -> Path:
    """A source of one's own, and the job of `own` was begun with it."""
    return Path(shutil.copytree(small, tmp_path / "source"))


@pytest.fixture
def own(source: Path, tmp_path: Path) -> Path:
    assert run("run", source, tmp_path / "own", "--json") == 0
    return tmp_path / "own"


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def test_a_shard_that_rotted_is_found_and_made_again_on_request(small: Path, copied: Path, finished: Path) -> None:
    before = (copied / SHARD).stat()
    flip(copied / SHARD, -1000)
    os.utime(copied / SHARD, ns=(before.st_atime_ns, before.st_mtime_ns))
    errors = run_here("run", small, copied, code=0).stderr
    assert "finished shards have their recorded size and time (--verify hashes them too)" in errors
    assert contents(copied) != contents(finished)
    before = times(copied)
    errors = run_here("run", small, copied, "--verify", code=0).stderr.replace("\n", " ")
    assert "finished shards hashed: 3 (" in errors
    assert f"damaged, to be converted again: {SHARD}" in errors
    assert contents(copied) == contents(finished)
    assert [name for name, time in times(copied).items() if time != before[name]] == [SHARD]
    assert "damaged" not in run_here("run", small, copied, "--verify", code=0).stderr


def test_a_shard_that_was_written_to_is_found_without_a_request(small: Path, copied: Path, finished: Path) -> None:
    flip(copied / SHARD, -1000)
    errors = run_here("run", small, copied, code=0).stderr.replace("\n", " ")
    assert "finished shards hashed: 1 (" in errors
    assert f"damaged, to be converted again: {SHARD}" in errors
    assert contents(copied) == contents(finished)


def test_a_copy_without_its_times_is_hashed_once_and_not_converted(small: Path, finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, copy_function=shutil.copy)
    before = times(copy)
    for word in ("finished shards hashed: 3", "have their recorded size and time"):
        assert word in run_here("run", small, copy, code=0).stderr
    assert times(copy) == before
    assert contents(copy) == contents(finished)


@pytest.mark.parametrize("lost", [SHARD, OTHER, None], ids=["its result lost", "another lost", "finished"])
def test_a_source_changed_under_its_header_is_refused(lost: str | None, source: Path, own: Path) -> None:
    if lost is not None:
        (own / lost).unlink()
    before = contents(own)
    flip(source / SHARD, -1000)
    errors = run_here("run", source, own, code=1).stderr.replace("\n", " ")
    assert f"error: {SHARD}: this source shard has other bytes than when the job" in errors
    assert "To convert what is there now, choose a new destination. To go on, restore the source." in errors
    assert contents(own) == before


def test_a_source_that_was_copied_goes_on(source: Path, own: Path, tmp_path: Path) -> None:
    """By a scheduler to another node, by tar, or by a second download: the same bytes with other times."""
    before = contents(own)
    (own / OTHER).unlink()
    others = times(own)
    copy = Path(shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copy))
    assert "resuming: 2 of 3 shards done" in run_here("run", copy, own, code=0).stderr
    assert contents(own) == before
    assert others.items() <= times(own).items()


def test_parts_may_each_have_a_copy(source: Path, own: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (1, 2, 3):
        copy = Path(shutil.copytree(source, tmp_path / f"{number}", copy_function=shutil.copy))
        os.utime(copy / SHARD, ns=(number, number))
        run_here("run", copy, out, "--part", f"{number}/3", code=0)
        shutil.rmtree(copy)
    run_here("run", source, out, code=0)
    assert files_of(out) == files_of(own)


def test_a_changed_source_shard_of_which_nothing_was_made_is_accepted(source: Path, own: Path, tmp_path: Path) -> None:
    """Such as one that was damaged, and downloaded again."""
    (own / SHARD).unlink()
    (own / ".k2convert" / "done" / f"{SHARD}.json").unlink()
    flip(source / SHARD, -1000)
    assert run("run", source, own, "--json") == 0
    assert run("run", source, tmp_path / "new", "--json") == 0
    assert contents(own) == contents(tmp_path / "new")
