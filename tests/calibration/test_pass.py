"""`calibrate`: what it writes, what it says, and what it refuses in one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from damaged_files import DAMAGES, damage_file
from said import said

from k2convert.calibration.accumulate import calibrate as do_calibration
from k2convert.calibration.layer_files import statistics_work, write_layer
from k2convert.calibration.plan import CalibrationText
from k2convert.calibration.statistics import StatisticsHeader, open_statistics
from k2convert.calibration.text import read_windows
from k2convert.checkpoint.index import open_checkpoint
from k2convert.cli.app import main
from k2convert.errors import CalibrationError, CheckpointError
from k2convert.hub.client import Hub
from k2convert.job.locations import Source
from k2convert.job.prepare import plan_statistics
from scripts.fixture_maker.damage import edit_json

SMALL = ("--tokens", "256", "--window", "64", "--device", "cpu", "--quiet")


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


class Calibrate(Protocol):
    """`calibrate(source, statistics, "--text", file)` in this process."""

    def __call__(self, *words: object) -> Done: ...


@pytest.fixture
def calibrate(capsys: pytest.CaptureFixture[str]) -> Iterator[Calibrate]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}

    def run(*words: object) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(["calibrate", *map(str, words)])
        shown = capsys.readouterr()
        return Done(int(ended.value.code or 0), shown.out, shown.err)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def text(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text: 4 kB of the checkpoint's calibration text."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text((cut / "calibration.txt").read_text()[:4000])
    return path


def calibrated(source: Path, statistics: Path, text: Path, *, workers: int = 2, chunk: int = 4) -> bytes:
    """The statistics file of a pass with these threads and windows at once."""
    windows = read_windows([text], tokenizer=source, vocab_size=2048, tokens=256, window=64, seed=0)
    text_of_job = CalibrationText(windows, 256, 64, 0, chunk, workers, statistics)
    do_calibration(
        plan_statistics(text_of_job, Source(open_checkpoint(source)), statistics, devices=("cpu",), hub=Hub())
    )
    return statistics.read_bytes()


@pytest.fixture(scope="module")
def whole(cut: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The statistics of `SMALL` options, made in one go."""
    path = tmp_path_factory.mktemp("whole") / "out.safetensors"
    calibrated(cut, path, text)
    return path


def copy_of(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def plant(source: Path, tensor: str, element: int, bits: int) -> None:
    """Set one BF16 of a checkpoint."""
    info = open_checkpoint(source).tensors[tensor]
    with (source / info.shard).open("r+b") as file:
        file.seek(info.begin + 2 * element)
        file.write(bits.to_bytes(2, "little"))


NAN = 0x7FC0


def test_every_layer_is_in_the_file_and_the_work_folder_is_gone(
    calibrate: Calibrate, cut: Path, text: Path, tmp_path: Path, whole: Path
) -> None:
    out = tmp_path / "out.safetensors"
    done = calibrate(cut, out, "--text", text, *SMALL)
    assert (done.code, done.out) == (0, f"{out}: {out.stat().st_size / 1000:.2f} kB, 2 layers, 256 tokens\n")
    assert said(done.err) == f"next: k2convert run {cut} DEST --statistics {out}\n"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert out.read_bytes() == whole.read_bytes()
    found = open_statistics(out)
    assert (found.layers, found.tokens, found.window, found.windows) == ((0, 1), 256, 64, 4)
    assert found.texts[0][0] == "calibration.txt"
    assert {"k2convert", "python", "torch", "transformers"} <= found.versions.keys()
    assert found.layer(0).tokens.tolist() == [256]
    assert found.layer(1).tokens.tolist() == [256] * 4


def test_the_bytes_do_not_depend_on_the_number_of_threads(cut: Path, text: Path, tmp_path: Path, whole: Path) -> None:
    assert calibrated(cut, tmp_path / "one", text, workers=1) == whole.read_bytes()


def test_windows_computed_at_different_times_give_the_same_statistics(
    cut: Path, text: Path, tmp_path: Path, whole: Path
) -> None:
    calibrated(cut, tmp_path / "out", text, chunk=3)
    one, other = open_statistics(whole), open_statistics(tmp_path / "out")
    for layer in one.layers:
        for name, array in one.layer(layer).arrays().items():
            np.testing.assert_allclose(other.layer(layer).arrays()[name], array, rtol=1e-4, atol=1e-9, err_msg=name)


def test_a_finished_pass_is_not_made_again_and_another_one_is_refused(
    calibrate: Calibrate, cut: Path, text: Path, tmp_path: Path, whole: Path
) -> None:
    out = Path(shutil.copy(whole, tmp_path / "out.safetensors"))
    before = out.stat().st_mtime_ns
    done = calibrate(cut, out, "--text", text, *SMALL)
    assert (done.code, out.stat().st_mtime_ns) == (0, before)
    assert said(done.err).splitlines()[0] == f"{out}: already complete"
    assert "dropped" not in done.out
    done = calibrate(cut, out, "--text", text, *SMALL, "--seed", "1")
    assert (done.code, done.out) == (1, "")
    assert said(done.err) == (
        f"error: {out}: exists, made from something else: seed was 0, now 1. Choose a different name, or remove the "
        "file.\n"
    )


def test_a_dry_run_says_what_the_pass_takes_and_writes_nothing(
    calibrate: Calibrate, cut: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    done = calibrate(cut, out, "--text", text, *SMALL, "--dry-run")
    assert done.code == 0
    first, disk, memory, time = done.out.splitlines()
    assert first == "2 layers on 256 tokens of calibration.txt, in 4 windows of 64"
    assert disk.startswith("disk: needs ")
    assert memory.startswith("memory: needs about ")
    assert time == "time: less than a minute, an estimate from one expert on this machine"
    document = json.loads(calibrate(cut, out, "--text", text, *SMALL, "--dry-run", "--json").out)
    assert (document["layers"], document["finished_layers"], document["tokens"]) == (2, 0, 256)
    assert (document["memory_bytes"] > 0, document["gpu_memory_bytes"], document["computed_for"]) == (True, 0, None)
    assert len(document["seconds"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_finite_stop_the_pass(calibrate: Calibrate, cut: Path, text: Path, tmp_path: Path) -> None:
    source = copy_of(cut, tmp_path / "source")
    plant(source, "model.layers.1.input_layernorm.weight", 5, NAN)
    done = calibrate(source, tmp_path / "out", "--text", text, *SMALL)
    assert (done.code, done.out) == (1, "")
    assert said(done.err) == (
        "error: layer 1: the hidden states of 4 of 4 windows are not finite. The weights of this layer or an earlier "
        "one are damaged. Download the source again.\n"
    )


def test_a_window_that_is_not_finite_is_dropped_and_counted(calibrate: Calibrate, cut: Path, tmp_path: Path) -> None:
    source, ids, out = copy_of(cut, tmp_path / "source"), tmp_path / "ids.npy", tmp_path / "out"
    plant(source, "model.embed_tokens.weight", 7 * 256, NAN)  # of token 7
    np.save(ids, np.where(np.arange(16 * 32).reshape(16, 32) == 40, 7, 9 + np.arange(16 * 32).reshape(16, 32) % 1000))
    options = ("--text", ids, "--tokens", "512", "--window", "32", "--device", "cpu", "--json")
    done = calibrate(source, out, *options)
    assert (done.code, json.loads(done.out)["dropped_windows"]) == (0, 1), done.err
    found = open_statistics(out)
    assert found.dropped == 1
    assert found.layer(0).tokens.tolist() == [15 * 32]
    assert found.layer(1).tokens.sum() == 15 * 32 * 4


@dataclass(frozen=True, slots=True)
class Begun:
    """A pass whose first layer is done, and its source, complete again."""

    source: Path
    statistics: Path


@pytest.fixture(scope="module")
def begun_once(cut: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """A pass that failed in layer 1: a weight was not a number, and was then repaired."""
    folder = tmp_path_factory.mktemp("begun")
    begun = Begun(copy_of(cut, folder / "source"), folder / "out")
    shard = begun.source / "model-00002-of-000005.safetensors"
    times = shard.stat()
    plant(begun.source, "model.layers.1.input_layernorm.weight", 5, NAN)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(CalibrationError, match="layer 1"):
        calibrated(begun.source, begun.statistics, text)
    with shard.open("r+b") as file:
        file.write((cut / shard.name).read_bytes())
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    return begun


@pytest.fixture
def begun(begun_once: Begun, tmp_path: Path) -> Begun:
    """A copy of an unfinished pass, with the same source."""
    shutil.copytree(f"{begun_once.statistics}.work", tmp_path / "out.work")
    return Begun(begun_once.source, tmp_path / "out")


def test_a_pass_goes_on_at_its_layer(calibrate: Calibrate, text: Path, begun: Begun, whole: Path) -> None:
    done = calibrate(begun.source, begun.statistics, "--text", text, *SMALL[:-1])
    assert done.code == 0, done.err
    assert f"{begun.statistics}: resuming: 1 of 2 layers done" in done.err
    assert "calibrate: 100 % (2 of 2 layers)" in done.err
    assert begun.statistics.read_bytes() == whole.read_bytes()
    assert not Path(f"{begun.statistics}.work").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--seed", "1"), "seed was 0, now 1"),
        (("--tokens", "128"), "tokens was 256, now 128"),
        (("--window", "32"), "window was 64, now 32"),
    ],
)
def test_other_options_than_those_of_the_work_folder_are_named(
    calibrate: Calibrate, text: Path, begun: Begun, change: tuple[str, ...], says: str
) -> None:
    done = calibrate(begun.source, begun.statistics, "--text", text, *SMALL, *change)
    assert (done.code, done.out, said(done.err).count("\n")) == (1, "", 1)
    assert said(done.err).startswith(f"error: {begun.statistics}.work: holds a different calibration: ")
    assert says in done.err


def test_another_source_or_text_than_that_of_the_work_folder_is_named(
    calibrate: Calibrate, reap: Path, text: Path, begun: Begun, tmp_path: Path
) -> None:
    done = calibrate(reap, begun.statistics, "--text", text, *SMALL)
    assert (done.code, said(done.err).count("\n")) == (1, 1)
    assert "source_headers was " in done.err
    other = tmp_path / "calibration.txt"
    other.write_text(text.read_text() + "!")
    done = calibrate(begun.source, begun.statistics, "--text", other, *SMALL)
    assert (done.code, said(done.err).count("\n")) == (1, 1)
    assert "holds a different calibration: texts was 'calibration.txt (" in done.err


def test_a_source_shard_that_changed_meanwhile_is_named(
    calibrate: Calibrate, text: Path, begun: Begun, tmp_path: Path
) -> None:
    source = copy_of(begun.source, tmp_path / "source")
    os.utime(source / "model-00002-of-000005.safetensors", ns=(1, 1))
    done = calibrate(source, begun.statistics, "--text", text, *SMALL)
    assert (done.code, said(done.err).count("\n")) == (1, 1)
    assert said(done.err).startswith(
        "error: model-00002-of-000005.safetensors: this source shard has a different size or time "
    )


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["layer-000.safetensors", "hidden-001.safetensors", ".k2convert/calibration.json"])
def test_a_damaged_work_file_is_named_and_the_pass_is_computed_again(
    calibrate: Calibrate, cut: Path, text: Path, begun: Begun, whole: Path, name: str, damage: str
) -> None:
    path = Path(f"{begun.statistics}.work", name)
    damage_file(path, damage, foreign=cut / "model-00002-of-000005.safetensors")
    done = calibrate(begun.source, begun.statistics, "--text", text, *SMALL[:-1])
    assert done.code == 0, done.err
    fact = "missing" if damage == "missing" and name[0] != "." else "damaged"
    expected = f"{path}: {fact}: the calibration starts again at the beginning"
    if (name, damage) == ("layer-000.safetensors", "missing"):
        expected = ""  # nothing says that the layer was done
    assert expected in done.err
    assert begun.statistics.read_bytes() == whole.read_bytes()


def test_a_pass_that_kept_earlier_hidden_states_goes_on_from_them(
    calibrate: Calibrate, cut: Path, text: Path, begun: Begun, whole: Path, tmp_path: Path
) -> None:
    """Killed after the last layer was declared done and before the hidden states that it took were removed."""
    work = statistics_work(begun.statistics)
    found = open_statistics(whole)
    header = StatisticsHeader(**{field.name: getattr(found, field.name) for field in fields(StatisticsHeader)})
    write_layer(work, found.layer(1), header)
    assert work.num_finished() == 2
    damage_file(work.path("layer", 1), "flipped", foreign=cut)
    done = calibrate(begun.source, begun.statistics, "--text", text, *SMALL[:-1])
    assert (done.code, done.err.count("damaged")) == (0, 1), done.err
    assert f"{work.path('layer', 1)}: damaged: the calibration starts again with layer 1" in done.err
    assert begun.statistics.read_bytes() == whole.read_bytes()


def test_a_file_that_is_damaged_while_the_pass_runs_is_refused_and_the_same_command_mends_it(
    cut: Path, begun: Begun
) -> None:
    work = statistics_work(begun.statistics)
    damage_file(work.path("hidden", 1), "flipped", foreign=cut)
    says = r"hidden-001\.safetensors: damaged\. Repeat the command"
    with pytest.raises(CheckpointError, match=says), work.reading("hidden", 1, (4, 64, 256)):
        pass


def test_a_second_run_of_the_same_pass_waits_for_the_first(calibrate: Calibrate, text: Path, begun: Begun) -> None:
    with statistics_work(begun.statistics).locked():
        done = calibrate(begun.source, begun.statistics, "--text", text, *SMALL)
    assert (done.code, said(done.err).count("\n")) == (1, 1)
    assert f"{begun.statistics}.work: another run (process {os.getpid()}) is working here" in done.err


def test_a_folder_of_others_in_place_of_the_work_folder_stays_as_it_is(
    calibrate: Calibrate, cut: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "mine").write_text("mine")
    done = calibrate(cut, tmp_path / "out", "--text", text, *SMALL)
    assert (done.code, said(done.err).count("\n")) == (1, 1)
    assert "its files are not from k2convert" in done.err
    assert [path.name for path in tmp_path.rglob("*")] == ["out.work", "mine"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", "", "no token in it"),
        ("ids.jsonl", "[1, 2, 2048]\n", "holds the token id 2048"),
        ("ids.jsonl", "[1, 2, -1]\n", "holds the token id -1"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_line_and_nothing_is_written(
    calibrate: Calibrate, cut: Path, tmp_path: Path, name: str, content: str, says: str
) -> None:
    (tmp_path / name).write_text(content)
    done = calibrate(cut, tmp_path / "out", "--text", tmp_path / name, *SMALL)
    assert (done.code, done.out, said(done.err).count("\n")) == (1, "", 1)
    assert says in done.err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_places_that_no_file_can_be_written_to_are_refused(
    calibrate: Calibrate, cut: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for place, says in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "out", "is a file, not a folder"),
        (cut / "out", "is inside the source"),
    ):
        done = calibrate(cut, place, "--text", text, *SMALL)
        assert (done.code, said(done.err).count("\n")) == (1, 1), done.err
        assert says in done.err


def test_a_window_is_not_longer_than_the_model_reads(
    calibrate: Calibrate, cut: Path, text: Path, tmp_path: Path
) -> None:
    source = copy_of(cut, tmp_path / "source")
    edit_json(source / "config.json", lambda config: config.update(max_position_embeddings=48))
    done = calibrate(source, tmp_path / "out", "--text", text, "--tokens", "96", "--device", "cpu", "--dry-run")
    assert (done.code, done.out.splitlines()[0]) == (0, "2 layers on 96 tokens of calibration.txt, in 2 windows of 48")


def test_usage_errors(calibrate: Calibrate, cut: Path, text: Path, tmp_path: Path) -> None:
    for words in ((), ("--text", text, "--max-disk", "1GB")):
        assert calibrate(cut, tmp_path / "out", *words).code == 2


def test_a_long_pass_needs_yes(
    calibrate: Calibrate, cut: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k2convert.cli.forecast.MAX_HOURS", 0)
    done = calibrate(cut, tmp_path / "out", "--text", text, *SMALL)
    assert (done.code, done.out, said(done.err).count("\n")) == (1, "", 1)
    assert "Use a machine with a GPU, or fewer tokens, or repeat the command with --yes." in done.err
    assert calibrate(cut, tmp_path / "out", "--text", text, *SMALL, "--yes", "--dry-run").code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_pass_over_k2_takes_days_on_two_cores(calibrate: Calibrate, k2_headers: Path, tmp_path: Path) -> None:
    """All of Kimi-K2-Thinking, of which only the headers are here."""
    np.save(tmp_path / "ids.npy", np.arange(131_072) % 100_000)
    done = calibrate(k2_headers, tmp_path / "out", "--text", tmp_path / "ids.npy", "--device", "cpu", "--quiet")
    assert (done.code, done.out, said(done.err).count("\n")) == (1, "", 1), done.err
    assert " on this machine, more than 12 hours. Use a machine with a GPU, or fewer tokens, or repeat" in done.err
    assert not (tmp_path / "out.work").exists()
