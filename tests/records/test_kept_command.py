"""The command of a job is kept without the path of the folder it was given in."""

import json
from pathlib import Path

import pytest
from command import RunCli

from k2convert.cli.options import typed_command
from k2convert.records.command import JobCommand, keep_command, read_command


def test_the_kept_command_has_no_absolute_path_of_its_own(
    run_cli: RunCli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    kept = JobCommand(("k2convert", "run", "S", str(tmp_path / "out")), str(tmp_path / given_in))
    keep_command(tmp_path / "out", kept)
    assert read_command(tmp_path / "out") == kept


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
