"""A destination with files of others: what no engine reads is left alone, the rest is refused by name."""

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from command import messages_of, run_here
from results import contents

import k2convert
from k2convert.errors import DestinationError

SHARD = "model-00002-of-000003.safetensors"


def text(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("the only copy")


def link(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("nowhere")


ORDINARY_TEXTS = (
    "lost+found/#12345", "lost+found/model.safetensors", "convert.log", "slurm-17.out", ".git/config.json",
    ".git/hooks/check.py", ".gitattributes", ".DS_Store", ".nfs0001", "thesis.txt", "notes.md", "README.md",
    "docs/metrics.json", "table.csv", "events.jsonl", "tiny.stats",
)  # fmt: skip
ORDINARY: dict[str, Callable[[Path], None]] = dict.fromkeys(ORDINARY_TEXTS, text) | {"latest.log": link}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", ORDINARY)
def test_what_no_engine_reads_is_left_alone(name: str, small: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ORDINARY[name](out / name)
    notes = run_here("run", small, out, code=0).stderr
    is_sent = Path(name).suffix not in (".log", ".out") and not name.startswith((".", "lost+found"))
    assert (f"has other files, such as {name}: they stay, and `k2convert publish` sends them too" in notes) is is_sent
    assert_is_right(out, [name], finished)


def assert_is_right(out: Path, names: Collection[str], finished: Path) -> None:
    files = contents(out)
    for name in names:
        assert (out / name).is_symlink() or files[name] == b"the only copy"
    assert {path: data for path, data in files.items() if path not in names} == contents(finished)


@pytest.mark.quick(1)
@pytest.mark.parametrize("moment", ["in part", "resumed"])
def test_a_job_that_resumes_leaves_them_alone_too(moment: str, small: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if moment == "resumed":
        run_here("run", small, out, "--part", "1/2", "--quiet", code=0)
    for name, plant in ORDINARY.items():
        if not (out / name).exists():
            plant(out / name)
    if moment == "in part":
        run_here("run", small, out, "--part", "1/2", "--quiet", code=0)
    run_here("run", small, out, "--quiet", code=0)
    assert_is_right(out, ORDINARY, finished)
    assert "passed" in run_here("validate", out, "--source", small, "--quiet", code=0).stdout


REFUSED_TEXTS = (
    "generation_config.json", "hf_quant_config.json", "quantize_config.json", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json", "tiktoken.model", "chat_template.jinja", "merges.txt",
    "modeling_other.py", "inner/modeling_other.py", "model.safetensors", "inner/model.safetensors", "model-q4.gguf",
    "pytorch_model.bin", "left.tmp", SHARD, "extra/notes.txt", "extra", "k2convert.json", "evaluation.json",
    "report.html",
)  # fmt: skip
REFUSED: dict[str, Callable[[Path], None]] = {
    "config.json": text,
    "config.json/": Path.mkdir,
    **dict.fromkeys(REFUSED_TEXTS, text),
    "pipe": os.mkfifo,
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_reads_or_the_job_writes_is_named(name: str, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    text(out / "notes.md")
    path = out / name.rstrip("/")
    REFUSED[name](path)
    before = sorted(out.rglob("*"))
    for options in ((), ("--part", "1/2")):
        error = messages_of(run_here("run", small, out, *options, "--quiet", code=1).stderr)
        assert error.startswith(f"error: {path}: is not from k2convert, and ")
        assert error.endswith("Move it elsewhere, or choose a different folder.\n")
    with pytest.raises(DestinationError, match="is not from k2convert"):
        k2convert.convert(small, out)
    assert sorted(out.rglob("*")) == before
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    run_here("run", small, out, "--quiet", code=0)


def test_the_work_of_an_evaluation_does_not_make_a_checkpoint_of_others_ours(small: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(small, tmp_path / "out"))
    (out / ".k2convert" / "validation").mkdir(parents=True)
    before = contents(out)
    assert ": is not from k2convert" in run_here("run", small, out, code=1).stderr
    assert contents(out) == before


@pytest.mark.parametrize("is_whole", [False, True], ids=["half", "whole"])
def test_a_copy_without_its_work_folder(is_whole: bool, small: Path, finished: Path, tmp_path: Path) -> None:
    """`cp -r half/*` leaves hidden files out."""
    half = tmp_path / "half"
    copy = tmp_path / "copy"
    run_here("run", small, half, *(() if is_whole else ("--part", "1/2")), "--quiet", code=0)
    shutil.copytree(half, copy, ignore=shutil.ignore_patterns(".*"))
    error = messages_of(run_here("run", small, copy, code=1).stderr)
    assert f"{copy}: has shards of this job, such as model-00001" in error
    assert "but not .k2convert, which lists finished shards" in error
    assert f"`cp -a FOLDER/. {copy}`" in error
    shutil.copytree(half, copy, dirs_exist_ok=True)
    assert "resuming" in (done := run_here("run", small, copy, code=0).stderr) or "already complete" in done
    assert contents(copy) == contents(finished)
