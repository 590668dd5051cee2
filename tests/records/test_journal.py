"""The journal: a damaged job.json is refused with the remedy, a damaged record is made again; its command."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import RunCli, messages_of, run_here
from damaged_files import edit_sealed

from k2convert.checkpoint.files import write_atomically
from k2convert.checkpoint.folders import make_folder
from k2convert.cli.options import typed_command
from k2convert.errors import DestinationWriteError
from k2convert.records.command import JobCommand, keep_command, read_command

JOB = Path(".k2convert") / "job.json"
LOCK = Path(".k2convert") / "lock"
RECORD = Path(".k2convert") / "done" / "model-00002-of-000005.safetensors.json"

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def result(local_result: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(local_result, tmp_path / "result"))


def messages(result: Path, tiny: Path) -> list[str]:
    lines: list[str] = []
    for words in (["run", tiny, result], ["status", result]):
        done = run_here(*words, code=1)
        assert "Traceback" not in done.stderr
        *_, last = messages_of(done.stderr).splitlines()
        assert last.startswith("error: ")
        lines.append(last)
    return lines


JOBS: dict[str, Change | str] = {
    "no text": "",
    "a list": "[]",
    "empty": lambda job: job.clear(),
    "no fingerprint": lambda job: job.pop("fingerprint"),
    "no recipe": lambda job: job.pop("recipe"),
    "sizes that are words": lambda job: job["shards"].update(a="many"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", JOBS)
def test_damaged_job_is_refused_and_made_again(name: str, result: Path, tiny: Path) -> None:
    whole = (result / JOB).read_bytes()
    change = JOBS[name]
    if isinstance(change, str):
        (result / JOB).write_text(change)
    else:
        document = json.loads(whole)
        change(document)
        (result / JOB).write_text(json.dumps(document))
    for message in messages(result, tiny):
        assert "job.json" in message
        assert "Delete it" in message
        assert "ownload" not in message
    (result / JOB).unlink()
    again = run_here("run", tiny, result, "--json")
    assert (result / JOB).read_bytes() == whole
    assert json.loads(again.stdout)["resumed_shards"] == 5


RECORDS: dict[str, Change] = {
    "empty object": lambda record: record.clear(),
    "another shard": lambda record: record.update(shard="model-00003-of-000005.safetensors"),
    "no metrics in them": lambda record: record["projections"][0].update(metrics={}),
    "a histogram of words": lambda record: record["projections"][0]["metrics"].update(scale_histogram={"a": "b"}),
    "an unknown field": lambda record: record.update(colour="red"),
}


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "command.json"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_made_again(result: Path, tiny: Path, whole: dict[str, bytes]) -> None:
    """`status` does not count the record's shard; `run` names it and makes it again, and only it."""
    assert json.loads(run_here("status", result, "--json").stdout)["pending"] == [RECORD.stem]
    before = {path.name: path.stat().st_mtime_ns for path in result.glob("*.safetensors")}
    assert f"to be converted again: {RECORD.stem}" in run_here("run", tiny, result).stderr.replace("\n", " ")
    assert contents(result) == whole
    after = {path.name: path.stat().st_mtime_ns for path in result.glob("*.safetensors")}
    assert [name for name in before if before[name] != after[name]] == [RECORD.stem]


@pytest.mark.parametrize(("name", "is_sealed"), [(name, True) for name in RECORDS] + [("an unknown field", False)])
def test_record_of_another_form_is_made_again(name: str, is_sealed: bool, result: Path, tiny: Path) -> None:
    whole = contents(result)
    path = result / RECORD
    edit_sealed(path, RECORDS[name], is_sealed=is_sealed)
    assert_made_again(result, tiny, whole)


@pytest.mark.parametrize("damage", [0.3, 0.9999, "", "[]"])
def test_a_damaged_record_is_made_again(damage: float | str, result: Path, tiny: Path) -> None:
    """A flipped byte at a place of the file, or another text."""
    whole = contents(result)
    data = bytearray((result / RECORD).read_bytes())
    if isinstance(damage, str):
        data = damage.encode()
    else:
        while data[int(damage * len(data))] in b" \n":
            damage += 1 / len(data)
        data[int(damage * len(data))] ^= 1
    (result / RECORD).write_bytes(data)
    assert_made_again(result, tiny, whole)


def test_lock_that_is_no_file_is_refused(result: Path, tiny: Path) -> None:
    lock = result / LOCK
    precious = result.parent / "precious.txt"
    precious.write_text("the only copy")
    lock.unlink()
    lock.symlink_to(precious)
    assert all("lock: is a link" in message for message in messages(result, tiny))
    assert precious.read_text() == "the only copy"
    lock.unlink()
    lock.mkdir()
    assert all("lock: is not a file" in message for message in messages(result, tiny))


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Neither the file nor what would clean up after it can get at the folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationWriteError, match=r"report\.html: writing failed"):
        write_atomically(tmp_path / "file" / "report.html", b"")
    with pytest.raises(DestinationWriteError, match="file: is not a folder"):
        make_folder(tmp_path / "file" / "folder")


def test_the_command_has_no_path(run_cli: RunCli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli("run", tiny, "out", "--quiet").returncode == 0
    assert json.loads((tmp_path / "out/.k2convert/command.json").read_text())["folder"] == ".."
    command = read_command(Path("out"))
    assert command.folder == str(tmp_path)
    assert "cd " not in command.line(here=str(tmp_path))
    assert (tmp_path / "out/.gitignore").read_text() == "/.k2convert/\n"


@pytest.mark.parametrize("given_in", ["", "out/inner", "elsewhere"])
def test_a_command_is_read_with_the_folder_it_was_given_in(tmp_path: Path, given_in: str) -> None:
    (tmp_path / "real/out/.k2convert").mkdir(parents=True)
    (tmp_path / "out").symlink_to("real/out")
    command = JobCommand(("k2convert", "run", "S", str(tmp_path / "out")), str(tmp_path / given_in))
    keep_command(tmp_path / "out", command)
    assert read_command(tmp_path / "out") == command


@pytest.mark.parametrize("words", [["run", "S", "out"], ["run", "--rule=max", "S", "--yes", "sub/../out"]])
def test_a_command_is_shown_as_it_was_typed(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/k2convert", *words, "--part", "1/2"])
    monkeypatch.chdir(tmp_path)
    assert typed_command(source="S").words == ("k2convert", *words, "--part", "1/2")
    assert typed_command(source="S", without="--part").words == ("k2convert", *words)
    monkeypatch.setattr("sys.argv", ["k2convert", *words, "--part=1/2"])
    command = typed_command(source="S", without="--part")
    assert command == JobCommand(("k2convert", *words), str(tmp_path), "S")
    (tmp_path / "out/.k2convert").mkdir(parents=True)
    (tmp_path / "sub").mkdir()
    keep_command(tmp_path / "out", command)
    assert read_command(tmp_path / "out") == command
    (tmp_path / "out").rename(tmp_path / "moved")
    assert read_command(tmp_path / "moved") is None


def test_a_gitignore_that_is_there_stays(run_cli: RunCli, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out/.k2convert").mkdir(parents=True)
    (tmp_path / "out/.gitignore").write_text("*.log\n")
    assert run_cli("run", tiny, tmp_path / "out", "--quiet").returncode == 0
    assert (tmp_path / "out/.gitignore").read_text() == "*.log\n"
