"""`calibrate`: what it writes, what it says, and what it refuses in one line."""

import json
import os
import socket
from pathlib import Path
from shutil import copy, copytree
from subprocess import CompletedProcess
from typing import NamedTuple

import numpy as np
import pytest
from command import assert_refused, run_here, said
from damaged_files import DAMAGES, NAN, damage_file, damaged_weight, flip, plant
from statistics_makers import HEADER

from k2convert.calibration.accumulate import calibrate as do_calibration
from k2convert.calibration.layer_files import statistics_work, write_layer
from k2convert.calibration.plan import WalkText
from k2convert.calibration.statistics import open_statistics
from k2convert.calibration.text import read_windows
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CalibrationError, CheckpointError
from k2convert.hub.client import Hub
from k2convert.job.opening import plan_statistics
from k2convert.records.fingerprint import Source
from scripts.fixture_maker.damage import edit_json

SMALL = ("--tokens", "256", "--window", "64", "--device", "cpu", "--quiet")


def calibrate(*words: object, code: int | None = None) -> CompletedProcess[str]:
    return run_here("calibrate", *words, code=code)


def calibrated(source: Path, statistics: Path, text: Path, *, workers: int = 2, chunk: int = 4) -> bytes:
    """The statistics file of a pass with these threads and windows at once."""
    windows = read_windows([text], tokenizer=source, vocab_size=2048, tokens=256, window=64, seed=0)
    text_of_job = WalkText(windows, chunk, ("cpu",), workers, statistics)
    do_calibration(plan_statistics(text_of_job, Source(open_checkpoint(source)), statistics, hub=Hub()))
    return statistics.read_bytes()


@pytest.fixture(scope="module")
def whole(cut: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The statistics of `SMALL` options, made in one go."""
    path = tmp_path_factory.mktemp("whole") / "out.safetensors"
    calibrated(cut, path, text)
    return path


def test_every_layer_is_in_the_file_and_the_work_folder_is_gone(
    cut: Path, text: Path, tmp_path: Path, whole: Path
) -> None:
    out = tmp_path / "out.safetensors"
    done = calibrate(cut, out, "--text", text, *SMALL)
    size = f"{out}: {out.stat().st_size / 1000:.2f} kB, 2 layers, 256 tokens\n"
    median = "tokens of the median expert: 256, in layer 1, where they are fewest\n"
    assert (done.returncode, done.stdout) == (0, size + median)
    assert said(done.stderr) == f"next: k2convert run {cut} DEST --statistics {out}\n"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert out.read_bytes() == whole.read_bytes()
    found = open_statistics(out)
    assert (found.layers, found.tokens, found.window, found.windows) == ((0, 1), 256, 64, 4)
    assert found.texts[0][0] == "calibration.txt"
    assert {"k2convert", "python", "torch", "transformers"} <= found.versions.keys()
    assert found.layer(0).tokens.tolist() == [256]
    assert found.layer(1).tokens.tolist() == [256] * 4


def test_neither_threads_nor_windows_at_once_change_the_statistics(
    cut: Path, text: Path, tmp_path: Path, whole: Path
) -> None:
    assert calibrated(cut, tmp_path / "one", text, workers=1) == whole.read_bytes()
    calibrated(cut, tmp_path / "out", text, chunk=3)
    one = open_statistics(whole)
    other = open_statistics(tmp_path / "out")
    for layer in one.layers:
        for name, array in one.layer(layer).arrays().items():
            np.testing.assert_allclose(other.layer(layer).arrays()[name], array, rtol=1e-4, atol=1e-9, err_msg=name)


def test_a_finished_pass_is_not_made_again_and_another_one_is_refused(
    cut: Path, text: Path, tmp_path: Path, whole: Path
) -> None:
    out = Path(copy(whole, tmp_path / "out.safetensors"))
    before = out.stat().st_mtime_ns
    done = calibrate(cut, out, "--text", text, *SMALL)
    assert (done.returncode, out.stat().st_mtime_ns) == (0, before)
    assert said(done.stderr).splitlines()[0] == f"{out}: already complete"
    assert "dropped" not in done.stdout
    done = calibrate(cut, out, "--text", text, *SMALL, "--seed", "1")
    assert_refused(done, f"error: {out}: exists, made from something else: seed was 0, now 1. ")
    for file in (Path(copy(cut / "config.json", tmp_path)), Path(copy(text, tmp_path / "text.txt"))):
        content = file.read_bytes()
        done = calibrate(cut, file, "--text", text, *SMALL)
        assert_refused(done, f"error: {file}: is not a statistics file, so it is not replaced (")
        assert file.read_bytes() == content


def test_a_dry_run_says_what_the_pass_takes_and_writes_nothing(cut: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    done = calibrate(cut, out, "--text", text, *SMALL, "--dry-run", code=0)
    assert done.stdout.startswith("2 layers on 256 tokens of calibration.txt, in 4 windows of 64\ndisk: needs ")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[1:]] == ["disk", "memory", "time"]
    document = json.loads(calibrate(cut, out, "--text", text, *SMALL, "--dry-run", "--json").stdout)
    assert (document["layers"], document["finished_layers"], document["tokens"]) == (2, 0, 256)
    assert (document["memory_bytes"] > 0, document["gpu_memory_bytes"]) == (True, 0)
    assert len(document["seconds"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_window_that_is_not_finite_is_dropped_and_counted(cut: Path, tmp_path: Path) -> None:
    source = copytree(cut, tmp_path / "source")
    ids = tmp_path / "ids.npy"
    out = tmp_path / "out"
    plant(source, "model.embed_tokens.weight", 7 * 256, NAN)  # of token 7
    np.save(ids, np.where(np.arange(16 * 32).reshape(16, 32) == 40, 7, 9 + np.arange(16 * 32).reshape(16, 32) % 1000))
    options = ("--text", ids, "--tokens", "512", "--window", "32", "--device", "cpu", "--json")
    done = calibrate(source, out, *options)
    assert (done.returncode, json.loads(done.stdout)["dropped_windows"]) == (0, 1), done.stderr
    found = open_statistics(out)
    assert found.dropped == 1
    assert found.layer(0).tokens.tolist() == [15 * 32]
    assert found.layer(1).tokens.sum() == 15 * 32 * 4


class Begun(NamedTuple):
    """A pass whose first layer is done, and its source, complete again."""

    source: Path
    statistics: Path


@pytest.fixture(scope="module")
def begun_once(cut: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """A pass that failed in layer 1: a weight was not a number, and was then repaired."""
    folder = tmp_path_factory.mktemp("begun")
    begun = Begun(copytree(cut, folder / "source"), folder / "out")
    says = "layer 1: the hidden states of 4 of 4 windows are not finite"
    with (
        damaged_weight(begun.source, "model.layers.1.self_attn.q_a_proj.weight"),
        pytest.raises(CalibrationError, match=says),
    ):
        calibrated(begun.source, begun.statistics, text)
    return begun


@pytest.fixture
def begun(begun_once: Begun, tmp_path: Path) -> Begun:
    """A copy of an unfinished pass, with the same source."""
    copytree(f"{begun_once.statistics}.work", tmp_path / "out.work")
    return Begun(begun_once.source, tmp_path / "out")


def test_a_pass_goes_on_at_its_layer(text: Path, begun: Begun, whole: Path) -> None:
    done = calibrate(begun.source, begun.statistics, "--text", text, *SMALL[:-1], code=0)
    assert f"{begun.statistics}: resuming: 1 of 2 layers done" in done.stderr
    assert "calibrate: 100 % (2 of 2 layers)" in done.stderr
    assert begun.statistics.read_bytes() == whole.read_bytes()
    assert not Path(f"{begun.statistics}.work").exists()


def test_what_differs_from_the_work_folder_is_named(
    cut: Path, reap: Path, text: Path, begun: Begun, tmp_path: Path
) -> None:
    other = tmp_path / "calibration.txt"
    other.write_text(text.read_text() + "!")
    changed = copytree(begun.source, tmp_path / "source")
    flip(changed / "model-00002-of-000005.safetensors", -1)
    different = "holds a different calibration: "
    for source, file, change, says in (
        (begun.source, text, ("--seed", "1"), f"{different}seed was 0, now 1"),
        (begun.source, text, ("--tokens", "128"), "tokens was 256, now 128"),
        (begun.source, text, ("--window", "32"), "window was 64, now 32"),
        (begun.source, other, (), f"{different}texts was 'calibration.txt ("),
        (reap, text, (), "source_headers was "),
        (changed, text, (), "error: model-00002-of-000005.safetensors: this source shard has other bytes"),
    ):
        assert_refused(calibrate(source, begun.statistics, "--text", file, *SMALL, *change), says)


@pytest.mark.quick(2)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["layer-000.safetensors", "hidden-001.safetensors", ".k2convert/calibration.json"])
def test_a_damaged_work_file_is_named_and_the_pass_is_computed_again(
    cut: Path, text: Path, begun: Begun, whole: Path, name: str, damage: str
) -> None:
    path = Path(f"{begun.statistics}.work", name)
    damage_file(path, damage, foreign=cut / "model-00002-of-000005.safetensors")
    done = calibrate(begun.source, begun.statistics, "--text", text, *SMALL[:-1], code=0)
    fact = "missing" if damage == "missing" and name[0] != "." else "damaged"
    expected = f"{path}: {fact}: the calibration starts again at the beginning"
    if (name, damage) == ("layer-000.safetensors", "missing"):
        expected = ""  # nothing says that the layer was done
    assert expected in done.stderr
    assert begun.statistics.read_bytes() == whole.read_bytes()


def test_a_pass_that_kept_earlier_hidden_states_goes_on_from_them(
    cut: Path, text: Path, begun: Begun, whole: Path, tmp_path: Path
) -> None:
    """Killed after the last layer was declared done and before the hidden states that it took were removed."""
    work = statistics_work(begun.statistics)
    write_layer(work, open_statistics(whole).layer(1), HEADER)
    assert work.num_finished() == 2
    damage_file(work.path("layer", 1), "flipped", foreign=cut)
    done = calibrate(begun.source, begun.statistics, "--text", text, *SMALL[:-1])
    assert (done.returncode, done.stderr.count("damaged")) == (0, 1), done.stderr
    assert f"{work.path('layer', 1)}: damaged: the calibration starts again with layer 1" in done.stderr
    assert begun.statistics.read_bytes() == whole.read_bytes()


def test_a_file_that_is_damaged_while_the_pass_runs_is_refused_and_the_same_command_mends_it(
    cut: Path, begun: Begun
) -> None:
    work = statistics_work(begun.statistics)
    damage_file(work.path("hidden", 1), "flipped", foreign=cut)
    says = r"hidden-001\.safetensors: damaged\. Repeat the command"
    with pytest.raises(CheckpointError, match=says), work.reading("hidden", 1, (4, 64, 256)):
        pass


def test_a_second_run_of_the_same_pass_waits_for_the_first(text: Path, begun: Begun) -> None:
    with statistics_work(begun.statistics).locked():
        done = calibrate(begun.source, begun.statistics, "--text", text, *SMALL)
    assert_refused(
        done, f"{begun.statistics}.work: another run (process {os.getpid()} on {socket.gethostname()}) is working here"
    )


def test_texts_and_places_that_cannot_be_used_are_one_line_and_nothing_is_written(
    cut: Path, text: Path, tmp_path: Path
) -> None:
    contents = {"file": "", "empty.txt": "", "high.jsonl": "[1, 2, 2048]\n", "low.jsonl": "[1, 2, -1]\n"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    free = tmp_path / "free"
    for place, file, says in (
        (free, tmp_path / "empty.txt", "no token in it"),
        (free, tmp_path / "high.jsonl", "holds the token id 2048"),
        (free, tmp_path / "low.jsonl", "holds the token id -1"),
        (tmp_path, text, "is a folder"),
        (tmp_path / "file" / "out", text, "is a file, not a folder"),
        (cut / "out", text, "is inside the source"),
        (tmp_path / "out", text, "its files are not from k2convert"),
    ):
        assert_refused(calibrate(cut, place, "--text", file, *SMALL), says)
    assert sorted(tmp_path.rglob("*")) == before
    for words in ((), ("--text", text, "--max-disk", "1GB")):
        assert calibrate(cut, free, *words).returncode == 2


def test_a_window_is_not_longer_than_the_model_reads(cut: Path, text: Path, tmp_path: Path) -> None:
    source = copytree(cut, tmp_path / "source")
    edit_json(source / "config.json", lambda config: config.update(max_position_embeddings=48))
    words = (source, tmp_path / "out", "--text", text, "--tokens", "96", "--device", "cpu", "--dry-run")
    done = calibrate(*words, code=0)
    assert done.stdout.splitlines()[0] == "2 layers on 96 tokens of calibration.txt, in 2 windows of 48"
