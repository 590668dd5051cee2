"""A source is read wherever it lies, by every verb, and what is written never goes through a link."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from command import run_here
from damaged_files import flip
from places import COMMIT, FOLDER_KINDS, put_into_cache
from results import contents

from k2convert.errors import DestinationError
from k2convert.job.locations import check_output_path

SHARD = "model-00002-of-000003.safetensors"
SMALL = ("--tokens", "128", "--window", "64", "--device", "cpu")


def result(folder: Path) -> dict[str, bytes]:
    """The files of a result but its description of the job, which has the times of the source."""
    return {name: data for name, data in contents(folder).items() if not name.endswith("job.json")}


@pytest.fixture(params=FOLDER_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def placed(kind: str, source: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return FOLDER_KINDS[kind](source, folder)


@pytest.mark.quick(1)
def test_conversions_are_the_same(kind: str, small: Path, finished: Path, tmp_path: Path) -> None:
    source = placed(kind, small, tmp_path / "place")
    out = tmp_path / "out"
    parts = tmp_path / "parts"
    run_here("run", source, out, "--json", code=0)
    assert result(out) == result(finished)
    assert not any(path.is_symlink() for path in out.rglob("*")), "what is copied is a file"
    for options in (("--part", "1/2"), ("--part", "2/2"), ()):
        run_here("run", source, parts, *options, "--quiet", code=0)
    assert result(parts) == result(finished)
    assert "passed" in run_here("validate", out, "--source", source, "--quiet", code=0).stdout
    for verb in ("inspect", "fit"):
        shown = [json.loads(run_here(verb, folder, "--json", code=0).stdout) for folder in (source, small)]
        assert str(shown[0]).replace(str(source), str(small)) == str(shown[1])


@pytest.mark.slow
def test_layer_passes_are_the_same(kind: str, short: Path, text: Path, passed: Path, tmp_path: Path) -> None:
    source = placed(kind, short, tmp_path / "place")
    assert files_of_passes(source, text, tmp_path) == files_of_passes(short, text, passed)


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("passed")


def files_of_passes(source: Path, text: Path, folder: Path) -> list[dict[str, bytes]]:
    out = folder / "out"
    if not out.exists():
        use = "calibration={tokens: 128, window: 64}"
        run_here("run", source, out, "--calibrate", text, "--set", use, "--device", "cpu", "--quiet", code=0)
        other = folder / "other.txt"
        other.write_text(text.read_text() + "another text")
        run_here("evaluate", source, out, "--text", other, *SMALL, "--quiet", code=0)
    return [result(out)]


@pytest.mark.quick(1)
def test_results_are_read_wherever_they_lie(kind: str, small: Path, finished: Path, tmp_path: Path) -> None:
    folder = placed(kind, finished, tmp_path / "place")
    for options in ((), ("--source", small)):
        assert "passed" in run_here("validate", folder, *options, "--quiet", code=0).stdout
    run_here("fit", folder, "--json", code=0)
    run_here("report", folder, "--out", tmp_path / "report", code=0)
    assert (tmp_path / "report" / "report.html").is_file()


NEEDED = ["config.json", "model.safetensors.index.json", SHARD, "generation_config.json"]


@pytest.mark.parametrize("target", ["nowhere", "itself", "a pipe", "a folder", "a device"])
@pytest.mark.parametrize("name", NEEDED)
def test_a_needed_link_that_leads_to_no_file_is_named(name: str, target: str, small: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(small, tmp_path / "source"))
    (source / name).unlink()
    os.mkfifo(tmp_path / "a pipe")
    (tmp_path / "a folder").mkdir()
    link = {"itself": name, "a device": "/dev/null"}.get(target, f"../{target}")
    (source / name).symlink_to(link)
    if name == "generation_config.json" and target == "a folder":
        return  # a folder of that name has no files
    for words in (("run", source, tmp_path / "out"), ("inspect", source)):
        if words[0] == "inspect" and name == "generation_config.json":
            continue
        error = run_here(*words, code=1).stderr
        assert f"{name}: is a link to '{link}', which" in error.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "file", "loop of links"])
@pytest.mark.parametrize("name", ["out", "out/.k2convert/lock"])
def test_what_stands_in_the_place_of_a_destination_or_a_lock_is_named(
    name: str, kind: str, small: Path, tmp_path: Path
) -> None:
    if (name, kind) in (("out", "folder"), ("out/.k2convert/lock", "file")):
        return  # as it should be
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    make = {"pipe": os.mkfifo, "folder": Path.mkdir, "file": Path.touch, "loop of links": lambda p: p.symlink_to(p)}
    make[kind](path)
    error = run_here("run", small, tmp_path / "out", "--quiet", code=1).stderr
    error = error[error.index(f"error: {path}") :]
    problem = "is not a " if kind != "loop of links" else "link"
    assert problem in error
    assert "Remove " in error or "Choose a folder" in error


def test_destinations_in_a_cache_are_refused(small: Path, tmp_path: Path) -> None:
    snapshot = put_into_cache(small, tmp_path / "hub")
    repo = snapshot.parents[1]
    before = {path: path.lstat().st_mtime_ns for path in repo.rglob("*")}
    for destination in (snapshot / "out", repo / "out", repo / "blobs" / "out", repo / "blobs", repo.parent, repo):
        assert "source" in run_here("run", snapshot, destination, code=1).stderr
    with pytest.raises(DestinationError, match="is inside the source"):
        check_output_path(repo / "blobs" / "figures.json", source=snapshot)
    assert {path: path.lstat().st_mtime_ns for path in repo.rglob("*")} == before


def test_a_finished_shard_may_move_to_another_disk(small: Path, finished: Path, copied: Path, tmp_path: Path) -> None:
    moved = shutil.move(copied / SHARD, tmp_path / SHARD)
    (copied / SHARD).symlink_to(moved)
    (copied / "config.json").unlink()
    run_here("run", small, copied, code=0)
    assert (copied / SHARD).is_symlink(), "it counts as finished"
    assert contents(copied) == contents(finished)
    flip(moved, -1)
    damaged = moved.read_bytes()
    run_here("run", small, copied, code=0)
    assert not (copied / SHARD).is_symlink(), "it is replaced where it was linked"
    assert contents(copied) == contents(finished)
    assert moved.read_bytes() == damaged


def note_hashes(source: Path, *, seconds: float = 0) -> None:
    """Leave what `hf download --local-dir` leaves of every shard."""
    notes = source / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for path in source.glob("*.safetensors"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        written = path.stat().st_mtime + seconds
        (notes / f"{path.name}.metadata").write_text(f"{COMMIT}\n{digest}\n{written}\n")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("origin", "position"), [("the cache", 0.5), ("a download", 1), ("the cache", 1), ("a download", 0.5)]
)
def test_a_damaged_download(origin: str, position: float, small: Path, finished: Path, tmp_path: Path) -> None:
    """By the sha256 that it left, while the shard is read."""
    source = Path(shutil.copytree(small, tmp_path / "source"))
    out = tmp_path / "out"
    if origin == "the cache":
        source = put_into_cache(small, tmp_path / "hub")
    else:
        note_hashes(source)
    path = (source / SHARD).resolve()
    before = path.stat()
    flip(path, int(position * before.st_size) - 1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    error = run_here("run", source, out, code=1).stderr.replace("\n", " ")
    assert f"{source / SHARD}: is damaged: its sha256 is " in error
    assert f"`hf download REPO {SHARD} --force-download` replaces it." in error
    assert not (out / SHARD).exists()
    path.write_bytes((small / SHARD).read_bytes())
    run_here("run", source, out, code=0)
    assert result(out) == result(finished)


def test_a_file_that_was_changed_on_purpose_has_no_known_hash(small: Path, tmp_path: Path) -> None:
    """Training in place: the file is younger than the note of its download."""
    source = Path(shutil.copytree(small, tmp_path / "source"))
    note_hashes(source, seconds=-60)
    flip(source / SHARD, -1)
    run_here("run", source, tmp_path / "out", "--quiet", code=0)
