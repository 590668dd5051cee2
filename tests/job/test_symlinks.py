"""A job refuses links below its destination by name when it opens. What they lead to stays as it was."""

import os
import shutil
from pathlib import Path

import pytest
from command import messages_of, run, run_here
from results import contents

from k2convert.checkpoint.files import write_atomically
from k2convert.checkpoint.writer import ShardWriter
from k2convert.errors import DestinationError, LockedError
from k2convert.forward.work import WorkFolder
from k2convert.records.work_log import lock_destination, read_lock, share_destination

SHARD = "model-00002-of-000003.safetensors"
FOLDERS = [".k2convert", ".k2convert/done", ".k2convert/download", ".k2convert/source", "extra"]
WRITTEN = ("config.json", "generation_config.json", "extra/notes.txt", SHARD)
RECORDS = (".k2convert/job.json", f".k2convert/done/{SHARD}.json")
LATE = ("model.safetensors.index.json", "k2convert.json", "hf_quant_config.json")
FILES = [*WRITTEN, *RECORDS, ".k2convert/lock", ".k2convert/published.json", "evaluation.json"]
FILES += [f"{name}.tmp" for name in (*WRITTEN, *RECORDS, *LATE)]


def plant(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def refusal(source: Path, destination: Path) -> str:
    shown = messages_of(run_here("run", source, destination, code=1).stderr)
    [error] = [line for line in shown.splitlines() if line.startswith("error: ")]
    return error


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("name", "begun"),
    [*((name, begun) for name in FILES for begun in (False, True)), *((name, False) for name in FOLDERS)],
)
def test_a_link_as_a_file_is_refused(name: str, begun: bool, small: Path, finished: Path, tmp_path: Path) -> None:
    destination = tmp_path / "out"
    precious = tmp_path / "precious"
    if name in FOLDERS:
        precious.mkdir()
    target = precious / f"{SHARD}.json.tmp" if name in FOLDERS else precious
    target.write_text("the only copy")
    if begun:
        shutil.copytree(finished, destination)
    (destination / ".k2convert").mkdir(parents=True, exist_ok=True)
    plant(destination / name, precious)
    error = refusal(small, destination)
    assert f"{destination / name}: is a link" in error
    assert "Remove it" in error
    assert target.read_text() == "the only copy"
    assert name not in FOLDERS or [path.name for path in precious.iterdir()] == [target.name]
    assert (destination / name).is_symlink()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["report.html", "report.html.tmp", "report.md.tmp"])
def test_the_report_follows_no_link(name: str, copied: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("the only copy")
    plant(copied / name, precious)
    assert run("report", copied) == 0
    assert precious.read_text() == "the only copy"


def test_a_destination_that_is_a_link_is_what_the_user_named(small: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    shown = run_here("run", small, tmp_path / "out", code=0)
    assert f"{tmp_path / 'out'}: is a link, so the result is in {tmp_path / 'disk'}" in shown.stderr
    assert (tmp_path / "disk" / "config.json").is_file()


def test_the_second_name_of_a_file_is_not_written_through(small: Path, tmp_path: Path) -> None:
    """A hard link cannot be told from a file that a killed run left, so the name is removed and the file made anew."""
    destination = tmp_path / "out"
    precious = tmp_path / "precious"
    (destination / ".k2convert" / "done").mkdir(parents=True)
    precious.write_text("the only copy")
    for name in ("config.json.tmp", f"{SHARD}.tmp", ".k2convert/job.json.tmp", ".k2convert/lock"):
        os.link(precious, destination / name)
    assert run("run", small, destination, "--json") == 0
    assert precious.read_text() == "the only copy"
    assert precious.stat().st_nlink == 1


def test_a_copy_by_hard_links_and_its_original_are_two_folders(small: Path, copied: Path, tmp_path: Path) -> None:
    linked = Path(shutil.copytree(copied, tmp_path / "linked", copy_function=os.link))
    before = contents(linked)
    (copied / "config.json").unlink()
    with share_destination(copied), share_destination(copied):
        pass
    with lock_destination(copied), lock_destination(linked):
        assert read_lock(copied)[0]
    for folder in (copied, linked):
        assert run("run", small, folder, "--json") == 0
    assert contents(linked) == contents(copied) == before


def test_a_lock_with_two_names_is_still_a_lock(copied: Path, tmp_path: Path) -> None:
    with lock_destination(copied):
        linked = Path(shutil.copytree(copied, tmp_path / "linked", copy_function=os.link))
        for folder in (copied, linked):
            with pytest.raises(LockedError), lock_destination(folder):
                pass
    with lock_destination(linked), lock_destination(copied):
        pass


def write_shard(path: Path) -> None:
    with ShardWriter(path, 3) as writer:
        writer.write(b"new")
        writer.commit()


def test_a_file_takes_the_place_of_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    out = tmp_path / "out"
    precious.write_text("the only copy")
    out.mkdir()
    for write in (lambda path: write_atomically(path, b"new"), write_shard):
        for name in ("a.tmp", "b"):
            plant(out / name, precious)
        for name in ("a", "b"):
            write(out / name)
            assert (out / name).read_bytes() == b"new"
            assert not (out / name).is_symlink()
    assert precious.read_text() == "the only copy"
    assert {path.name for path in out.iterdir()} == {"a", "b"}


def test_the_work_folder_of_an_evaluation_is_no_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    work = tmp_path / "rows.work"
    work.symlink_to(elsewhere)
    with pytest.raises(DestinationError, match="work: is a link"), WorkFolder(work, purpose="evaluation").locked():
        pass
    assert not list(elsewhere.iterdir())


def test_the_sweep_removes_only_names_of_this_program(small: Path, copied: Path) -> None:
    others = ["notes.tmp", "model.tmp", ".k2convert/notes.tmp", ".k2convert/done/notes.json.tmp"]
    ours = [f"{SHARD}.tmp", f".k2convert/done/{SHARD}.json.tmp"]
    for name in (*others, *ours):
        (copied / name).write_text("x")
    (copied / "folder.tmp").mkdir()
    (copied / "model-00001-of-000003.safetensors.tmp").mkdir()
    assert run("run", small, copied, "--json") == 0
    assert all((copied / name).read_text() == "x" for name in others)
    assert not any((copied / name).exists() for name in ours)
    assert (copied / "folder.tmp").is_dir()
    assert (copied / "model-00001-of-000003.safetensors.tmp").is_dir()


def test_a_folder_in_place_of_a_file_to_write_is_named(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".k2convert").mkdir(parents=True)
    (tmp_path / "out" / f"{SHARD}.tmp").mkdir()
    assert f"{SHARD}.tmp: is a folder, but k2convert needs a file there. Remove it." in refusal(small, tmp_path / "out")
