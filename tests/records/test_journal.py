"""A journal that somebody damaged is refused in one line that says what to do, by every command that reads it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k2convert.checkpoint.files import write_atomically
from k2convert.checkpoint.folders import make_folder
from k2convert.cli.app import main
from k2convert.errors import DestinationWriteError

JOB = Path(".k2convert") / "job.json"
LOCK = Path(".k2convert") / "lock"
RECORD = Path(".k2convert") / "shards" / "model-00002-of-000005.safetensors.json"

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "result"
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tiny), str(folder), "--json"])
    assert ended.value.code == 0
    return folder


@pytest.fixture
def result(finished: Path, tmp_path: Path) -> Path:
    """A finished conversion, free to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "result"))


def edit(path: Path, change: Change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def messages(result: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `run` and `status` say to a damaged folder."""
    said: list[str] = []
    for words in (["run", tiny, result], ["status", result]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        printed = capsys.readouterr()
        assert ended.value.code == 1
        assert "Traceback" not in printed.err
        *_, last = printed.err.splitlines()
        assert last.startswith("error: ")
        said.append(last)
    return said


JOBS: dict[str, Change] = {
    "empty": lambda job: job.clear(),
    "no fingerprint": lambda job: job.pop("fingerprint"),
    "a fingerprint that is a list": lambda job: job.update(fingerprint=[1]),
    "no recipe": lambda job: job.pop("recipe"),
    "a recipe without a rule": lambda job: job["recipe"].pop("rule"),
    "shards that are a list": lambda job: job.update(shards=["a"]),
    "sizes that are words": lambda job: job["shards"].update(a="many"),
}


@pytest.mark.parametrize("name", JOBS)
def test_damaged_job_is_refused_and_made_again(
    name: str, result: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (result / JOB).read_bytes()
    edit(result / JOB, JOBS[name])
    for message in messages(result, tiny, capsys):
        assert "job.json" in message
        assert "Delete it" in message
    (result / JOB).unlink()
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tiny), str(result), "--json"])
    assert ended.value.code == 0
    assert (result / JOB).read_bytes() == whole
    assert json.loads(capsys.readouterr().out)["resumed_shards"] == 5


RECORDS: dict[str, Change] = {
    "empty object": lambda record: record.clear(),
    "a shard that is a number": lambda record: record.update(shard=5),
    "another shard": lambda record: record.update(shard="model-00003-of-000005.safetensors"),
    "a size that is a word": lambda record: record.update(file_bytes="many"),
    "projections that are an object": lambda record: record.update(projections={}),
    "a projection that is a number": lambda record: record.update(projections=[1]),
    "no metrics in them": lambda record: record["projections"][0].update(metrics={}),
    "an error that is a word": lambda record: record["projections"][0]["metrics"].update(squared_error="none"),
    "a histogram of words": lambda record: record["projections"][0]["metrics"].update(scale_histogram={"a": "b"}),
    "an unknown field": lambda record: record.update(colour="red"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_damaged_record_is_refused(name: str, result: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(result / RECORD, RECORDS[name])
    for message in messages(result, tiny, capsys):
        assert RECORD.name in message
        assert "Delete it: its shard will be converted again" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
@pytest.mark.parametrize("path", [JOB, RECORD])
def test_journal_file_that_is_no_json_is_not_to_be_downloaded(
    path: Path, text: str, result: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (result / path).write_text(text)
    for message in messages(result, tiny, capsys):
        assert path.name in message
        assert "Delete it" in message
        assert "ownload" not in message


def test_lock_that_is_no_file_is_refused(result: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = result / LOCK
    precious = result.parent / "precious.txt"
    precious.write_text("the only copy")
    lock.unlink()
    lock.symlink_to(precious)
    assert all("lock: is a link or a folder" in message for message in messages(result, tiny, capsys))
    assert precious.read_text() == "the only copy"
    lock.unlink()
    lock.mkdir()
    assert all("lock: is a link or a folder" in message for message in messages(result, tiny, capsys))


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Neither the file nor what would clean up after it can get at the folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationWriteError, match=r"report\.html: writing failed"):
        write_atomically(tmp_path / "file" / "report.html", b"")
    with pytest.raises(DestinationWriteError, match="cannot be created"):
        make_folder(tmp_path / "file" / "folder")
