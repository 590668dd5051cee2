"""An interrupted validation goes on at the shard where it was, and uses nothing that other bytes or options gave."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import RunCli, start_cli
from conversions import convert
from damaged_files import flip

from k2convert.check.results import ValidationReport, validation_document
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.records.events import Events

KEPT = ".k2convert/check"
FINISHED = 2


class Stopped(BaseException):
    """An interrupt, where the test wants it."""


class StopAfter(Events):
    """Stops at the first progress after some shards are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def progress(self, *, bytes_in: int = 0, bytes_out: int = 0, tensors: int = 0) -> None:
        if len(list(self.folder.glob(f"{KEPT}/*.json"))) >= FINISHED:
            raise Stopped


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that are read as a whole, in order."""
    names: list[str] = []
    usual = ShardReader.read

    def noted(self: ShardReader, tensor: TensorInfo, *, begin: int = 0, end: int | None = None) -> Bytes:
        if tensor.name == "(all)" and tensor.shard not in names[-1:]:
            names.append(tensor.shard)
        return usual(self, tensor, begin=begin, end=end)

    monkeypatch.setattr(ShardReader, "read", noted)
    return names


@pytest.fixture
def stopped(mse: Path, tiny: Path, tmp_path: Path) -> Path:
    """A result whose validation was stopped after two of its five shards."""
    folder = shutil.copytree(mse, tmp_path / "stopped")
    with pytest.raises(Stopped):
        validate_checkpoint(folder=folder, source=open_checkpoint(tiny), events=StopAfter(folder))
    assert len(list(folder.glob(f"{KEPT}/*.json"))) == FINISHED
    return folder


def finish(folder: Path, source: Path, *, reference: bool = False) -> ValidationReport:
    return validate_checkpoint(folder=folder, source=open_checkpoint(source), reference=reference)


def document_of(report: ValidationReport) -> dict[str, Any]:
    """The findings without the name of the folder."""
    document = json.loads(json.dumps(validation_document(report)))
    del document["folder"], document["contract"]["folder"]
    return document


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_finished_shards_are_not_read_again_and_the_report_is_the_same(
    stopped: Path, mse: Path, tiny: Path, read: list[str]
) -> None:
    resumed = document_of(finish(stopped, tiny))
    assert read == shards(stopped)[FINISHED:]
    assert not (stopped / KEPT).exists()
    whole = document_of(finish(mse, tiny))
    assert read[3:] == shards(mse)
    assert resumed == whole
    assert resumed["passed"] is True


def test_a_finding_on_a_finished_shard_is_kept_too(mse: Path, tiny: Path, tmp_path: Path, read: list[str]) -> None:
    folder = shutil.copytree(mse, tmp_path / "broken")
    first = folder / shards(folder)[0]
    flip(first, -1)
    with pytest.raises(Stopped):
        validate_checkpoint(folder=folder, source=open_checkpoint(tiny), events=StopAfter(folder))
    read.clear()
    report = finish(folder, tiny)
    assert first.name not in read
    assert 19 in report.contract.failed
    assert not report.passed


def touch_result(folder: Path, _source: Path) -> None:
    """Change a byte and put the time of modification back."""
    path = folder / shards(folder)[0]
    before = path.stat()
    flip(path, -1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch_source(_folder: Path, source: Path) -> None:
    path = source / shards(source)[0]
    path.write_bytes(path.read_bytes())


def damage_kept(folder: Path, _source: Path) -> None:
    for path in folder.glob(f"{KEPT}/*.json"):
        flip(path, path.stat().st_size // 2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("change", [touch_result, touch_source, damage_kept])
def test_what_changed_meanwhile_is_read_again(
    change: Callable[[Path, Path], None], mse: Path, tiny: Path, tmp_path: Path, read: list[str]
) -> None:
    folder = shutil.copytree(mse, tmp_path / "out")
    source = shutil.copytree(tiny, tmp_path / "source")
    with pytest.raises(Stopped):
        validate_checkpoint(folder=folder, source=open_checkpoint(source), events=StopAfter(folder))
    change(folder, source)
    read.clear()
    report = finish(folder, source)
    assert read == shards(folder)
    assert report.passed is (change is not touch_result)


def test_other_options_begin_at_the_first_shard(stopped: Path, tiny: Path, read: list[str]) -> None:
    report = finish(stopped, tiny, reference=True)
    assert read == shards(stopped)
    assert report.weights.decoder_compared == 144


def test_modules_that_span_shards_are_measured_once(split: Path, tmp_path: Path, read: list[str]) -> None:
    folder = convert(split, tmp_path / "out", rule="mse")
    with pytest.raises(Stopped):
        validate_checkpoint(folder=folder, source=open_checkpoint(split), events=StopAfter(folder))
    read.clear()
    report = finish(folder, split)
    assert len(read) == len(shards(folder)) - FINISHED
    assert report.passed
    assert len(report.weights.errors) == 144


@pytest.mark.slow
def test_a_killed_command_resumes_and_says_so(mse: Path, tiny: Path, tmp_path: Path, run_cli: RunCli) -> None:
    folder = shutil.copytree(mse, tmp_path / "out")
    process = start_cli("validate", folder, "--source", tiny, stderr=subprocess.PIPE)
    while process.poll() is None and not list(folder.glob(f"{KEPT}/*.json")):
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    errors = process.communicate()[1]
    assert process.returncode == 130
    assert "checked. The same command resumes" in errors
    shown = run_cli("validate", folder, "--source", tiny, "--json", code=0)
    assert json.loads(shown.stdout)["passed"] is True
    assert not (folder / KEPT).exists()


def test_where_nothing_can_be_written_nothing_is_kept(mse: Path, tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(mse, tmp_path / "out")
    shutil.rmtree(folder / ".k2convert")
    (folder / ".k2convert").write_text("in the way")
    assert finish(folder, tiny).passed
    assert (folder / ".k2convert").read_text() == "in the way"
