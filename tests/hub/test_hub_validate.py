"""A published result: validate, report and status read it from the Hub, in bounded disk, with the local verdict."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import RunCli, cli_environment, messages_of, start_cli
from damaged_files import flip
from disk import Watched
from evaluation_makers import evaluation_of, write_evaluation
from faults import Fault, Kind
from loopback import LoopbackHub

from scripts.fixture_maker.damage import edit_json


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with Watched(tmp_path / "temporary", ".safetensors", ".safetensors.part") as watched:
        yield watched
    assert list(watched.folder.iterdir()) == []


@pytest.fixture
def published(tmp_path: Path, local_result: Path) -> Path:
    """The files of a result as they are published: without the journal."""
    folder = tmp_path / "published" / "out"  # a report's title has the name
    shutil.copytree(local_result, folder, ignore=shutil.ignore_patterns(".k2convert"))
    return folder


def without_names(document: dict[str, Any]) -> dict[str, Any]:
    contract = {key: value for key, value in document["contract"].items() if key != "folder"}
    return {key: value for key, value in document.items() if key != "folder"} | {"contract": contract}


def two_shards(*folders: Path) -> int:
    """The disk that the largest shard of each folder takes, with one block for its places on the disk."""
    return sum(max((-(-p.stat().st_size // 4096) + 1) * 4096 for p in f.glob("*.safetensors")) for f in folders)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("fault", "with_source"),
    [
        *(("none", True), ("a copied byte", True), ("a missing shard", False)),
        *(("none", False), ("a weight byte", True), ("a weight byte", False)),
        *(("a cut shard", True), ("a stray shard", False), ("no index", True)),
        *(("an evaluation of other weights", False), ("an empty evaluation", False), ("a large evaluation", True)),
    ],
)
def test_a_published_result_gets_the_verdict_and_figures_of_the_same_files_here(
    tiny_hub: LoopbackHub, cli: RunCli, tiny: Path, published: Path, temporary: Watched, fault: str, with_source: bool
) -> None:
    first = published / "model-00001-of-000005.safetensors"
    last = published / "model-00005-of-000005.safetensors"
    evaluation = published / "evaluation.json"
    write_evaluation(published, evaluation_of(published))
    plant: dict[str, Callable[[], object]] = {
        "none": lambda: None,
        "a weight byte": lambda: flip(first, -1000),
        "a copied byte": lambda: flip(last, -1),
        "a missing shard": first.unlink,
        "a cut shard": lambda: first.write_bytes(first.read_bytes()[:-100]),
        "a stray shard": lambda: shutil.copyfile(first, published / "more.safetensors"),
        "no index": (published / "model.safetensors.index.json").unlink,
        "an evaluation of other weights": lambda: edit_json(
            evaluation, lambda document: document["rows"][0]["model"].update(weights="0" * 64)
        ),
        "an empty evaluation": lambda: evaluation.write_text(" " * 10),
        "a large evaluation": lambda: os.truncate(evaluation, 101_000_000),
    }
    plant[fault]()
    tiny_hub.store.add_folder("me/out", published, private=True)
    here = cli("validate", published, "--json", *(("--source", tiny) if with_source else ()))
    there = cli("validate", "hf://me/out", "--json", *(("--source", "hf://moon/tiny") if with_source else ()))
    assert there.returncode == here.returncode == (0 if fault == "none" else 3), there.stderr
    assert json.loads(there.stdout)["folder"] == "hf://me/out"
    assert without_names(json.loads(there.stdout)) == without_names(json.loads(here.stdout))
    assert 0 < temporary.most <= (two_shards(published, tiny) if with_source else two_shards(published))
    if fault.endswith(("other weights", "evaluation")):
        assert json.loads(there.stdout)["contract"]["failed"] == [19]
        errors = cli("report", "hf://me/out", code=0).stderr
        assert "evaluation.json is not shown" in errors
        assert "the contract failed by rule 19" in messages_of(errors)


@pytest.mark.slow
def test_partners_come_in_ranges(server: LoopbackHub, cli: RunCli, split: Path, cwd: Path, temporary: Watched) -> None:
    """Gate and up, and the parts of one projection, lie in different shards of the source."""
    cli("run", split, "out", "--layout", "compressed-tensors", code=0)
    shutil.rmtree(cwd / "out" / ".k2convert")
    server.store.add_folder("me/out", cwd / "out")
    server.store.add_folder("moon/split", split)
    here = cli("validate", "out", "--source", split, "--json")
    there = cli("validate", "hf://me/out", "--source", "hf://moon/split", "--json")
    assert there.returncode == here.returncode == 0, there.stderr
    assert without_names(json.loads(there.stdout)) == without_names(json.loads(here.stdout))
    assert server.traffic.matching("GET", r"moon/split/.*\.safetensors")
    assert 0 < temporary.most <= 1.1 * two_shards(cwd / "out", split)


def test_a_result_without_shards_is_named(tiny_hub: LoopbackHub, cli: RunCli) -> None:
    tiny_hub.store.create("me/empty")
    shown = cli("validate", "hf://me/empty")
    assert (shown.returncode, shown.stdout) == (1, "")
    assert messages_of(shown.stderr) == (
        "error: hf://me/empty: has no shards, so it holds no result. Check the name and the revision.\n"
    )


def test_errors_name_the_repository(tiny_hub: LoopbackHub, cli: RunCli, published: Path, temporary: Watched) -> None:
    edit_json(published / "k2convert.json", lambda ledger: ledger["recipe"].update(target="bf16"))
    tiny_hub.store.add_folder("me/out", published)
    for verb in ("validate", "report"):
        shown = cli(verb, "hf://me/out")
        assert (shown.returncode, shown.stdout) == (1, "")
        assert messages_of(shown.stderr).splitlines()[-1].startswith("error: hf://me/out: holds a BF16 copy")
        assert str(temporary.folder) not in shown.stderr


def test_the_next_command_serves_it(tiny_hub: LoopbackHub, cli: RunCli, published: Path, temporary: Watched) -> None:
    commit = tiny_hub.store.add_folder("me/out", published).refs["main"]
    shown = cli("validate", f"hf://me/out@{commit}", code=0)
    line = messages_of(shown.stderr).splitlines()[-1]
    assert line.startswith(f"next: vllm serve me/out --revision {commit} --tensor-parallel-size")
    assert str(temporary.folder) not in shown.stdout + shown.stderr


def test_a_byte_that_changed_on_the_way_is_fetched_again(tiny_hub: LoopbackHub, cli: RunCli, published: Path) -> None:
    tiny_hub.store.add_folder("me/out", published)
    fault = Fault("GET", r"me/out/.*model-00003.*\.safetensors", Kind.CORRUPT, after_bytes=100_000, times=3)
    tiny_hub.traffic.inject(fault)  # the first two answers are the header, and shorter
    shown = cli("validate", "hf://me/out", code=0)
    assert "model-00003-of-000005.safetensors arrived with a wrong sha256; fetching it again" in shown.stderr


def test_without_space_nothing_is_downloaded(
    tiny_hub: LoopbackHub, cli: RunCli, published: Path, temporary: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_hub.store.add_folder("me/out", published)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**7, 7 * 10**6, 3 * 10**6))
    shown = cli("validate", "hf://me/out", "--source", "hf://moon/tiny", code=1)
    assert "validating from the Hub needs at least" in shown.stderr
    assert "but may use 3.00 MB. Set TMPDIR to a folder on another disk." in shown.stderr
    assert temporary.most == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(tiny_hub: LoopbackHub, cwd: Path, published: Path, number: signal.Signals) -> None:
    tiny_hub.store.add_folder("me/out", published)
    tiny_hub.traffic.bytes_per_second = 300_000
    (cwd / "temporary").mkdir()
    env = cli_environment() | {"TMPDIR": str(cwd / "temporary")}
    process = start_cli("validate", "hf://me/out", cwd=cwd, env=env, stderr=subprocess.PIPE)
    try:
        while not list(cwd.rglob("*.safetensors.part")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.communicate(timeout=300)[1].splitlines()[-1].startswith("interrupted")
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert list((cwd / "temporary").iterdir()) == []


@pytest.mark.slow
def test_the_report_on_a_repository_goes_into_the_current_folder_or_where_asked(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, published: Path, temporary: Watched
) -> None:
    tiny_hub.store.add_folder("me/out", published)
    document = json.loads(cli("report", "hf://me/out", "--source", "hf://moon/tiny", "--json").stdout)
    assert document["files"] == {"html": "report.html", "markdown": "report.md", "picture": "report.png"}
    assert sorted(path.name for path in cwd.iterdir()) == ["report.html", "report.md", "report.png"]
    cli("report", published, "--source", "hf://moon/tiny", "--out", "here", code=0)
    assert (cwd / "report.html").read_bytes() == (cwd / "here" / "report.html").read_bytes()
