"""Statistics from the Hub, and publishing with statistics: pinned, compared, and refused in one line each."""

import json
import shutil
from pathlib import Path

import pytest
from command import RunCli
from loopback import LoopbackHub
from statistics_makers import random_statistics

from k2convert.calibration.statistics import open_statistics
from k2convert.checkpoint.header import read_header


def put(server: LoopbackHub, name: str, folder: Path, cut_statistics: Path, *, as_file: str) -> str:
    """Put the statistics into a repository under a name; returns the commit."""
    folder.mkdir(parents=True)
    shutil.copy(cut_statistics, folder / as_file)
    return server.store.add_folder(name, folder).refs["main"]


@pytest.mark.parametrize(
    ("repo", "as_file", "address"),
    [
        ("datasets/me/stats", "cut.stats", "hf://datasets/me/stats"),
        ("me/stats", "in git.stats", "hf://me/stats@main/in git.stats"),
        ("me/stats", "in-lfs.safetensors", "hf://me/stats/in-lfs.safetensors"),
    ],
    ids=["dataset", "git", "LFS"],
)
def test_statistics_of_the_hub_give_the_bytes_of_the_file(
    server: LoopbackHub,
    hub_cli: RunCli,
    workplace: Path,
    cut: Path,
    cut_statistics: Path,
    by_imatrix: Path,
    tmp_path: Path,
    repo: str,
    as_file: str,
    address: str,
) -> None:
    commit = put(server, repo, tmp_path / "uploaded", cut_statistics, as_file=as_file)
    done = hub_cli("run", cut, "out", "--statistics", address)
    assert done.returncode == 0, done.stderr
    for path in by_imatrix.glob("*.safetensors"):
        assert (workplace / "out" / path.name).read_bytes() == path.read_bytes()
    pinned = f"hf://{repo}@{commit}/{as_file}"
    stated = json.loads((workplace / "out" / "k2convert.json").read_text())["calibration"]
    assert stated["statistics"] == open_statistics(cut_statistics).digest
    assert stated["statistics_from"] == pinned
    assert pinned in done.stderr.splitlines()[-1]
    checked = hub_cli("validate", "out", "--source", cut, "--statistics", pinned, "--json", "--quiet")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert json.loads(checked.stdout)["weights"]["verdicts"]["rule"] == "pass"
    server.store.repos[repo].commit("main", {})
    assert hub_cli("run", cut, "out", "--statistics", pinned).returncode == 0


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("hf://me/none", "could not look up me/none: the Hub answered 404"),
        ("hf://me/stats@nowhere", "could not look up me/stats at revision nowhere: the Hub answered 404"),
        ("hf://me/stats", "hf://me/stats: has 2 files named *.stats. Name the file: hf://me/stats/FILE."),
        ("hf://me/stats/c.stats", "hf://me/stats/c.stats: is not there at commit "),
        ("hf://me/stats/a.stats", "/a.stats"),
        ("hf://me", "hf://me/: not a repository. Write hf://owner/name"),
    ],
)
def test_what_is_no_statistics_file_on_the_hub_is_refused_in_one_line(
    server: LoopbackHub, hub_cli: RunCli, workplace: Path, cut: Path, tmp_path: Path, address: str, words: str
) -> None:
    (tmp_path / "uploaded").mkdir()
    for name in ("a.stats", "b.stats"):
        (tmp_path / "uploaded" / name).write_text("import os")
    server.store.add_folder("me/stats", tmp_path / "uploaded")
    done = hub_cli("run", cut, "out", "--statistics", address, "--quiet")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert "/tmp/" not in done.stderr
    assert not (workplace / "out").exists()


@pytest.mark.parametrize("wrong", ["damaged", "foreign", "missing", "without source"])
def test_publish_refuses_wrong_statistics_and_uploads_nothing(
    server: LoopbackHub,
    hub_cli: RunCli,
    workplace: Path,
    cut: Path,
    short: Path,
    cut_statistics: Path,
    by_imatrix: Path,
    wrong: str,
) -> None:
    shutil.copytree(by_imatrix, workplace / "out")
    given = workplace / "given.stats"
    if wrong == "damaged":
        given.write_bytes(cut_statistics.read_bytes()[:-100])
    elif wrong == "foreign":
        random_statistics(given, short)
    source = () if wrong == "without source" else ("--source", cut)
    done = hub_cli("publish", "out", "--repo", "me/out", "--statistics", given, *source, "--yes")
    assert done.returncode == (2 if wrong == "without source" else 1)
    assert "Traceback" not in done.stderr
    if source:
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
        fact = {
            "damaged": "not a complete",
            "foreign": "not the statistics of this result",
            "missing": "no such file",
        }
        assert f"{given}: " in line
        assert fact[wrong] in line
    assert server.store.repos == {}
    assert not server.traffic.matching("POST", "/commit/")


def test_publish_regenerates_the_weights_with_the_right_statistics(
    server: LoopbackHub, hub_cli: RunCli, workplace: Path, cut: Path, cut_statistics: Path, by_imatrix: Path
) -> None:
    shutil.copytree(by_imatrix, workplace / "out")
    words = ("publish", "out", "--repo", "me/out", "--source", cut, "--statistics", cut_statistics, "--yes")
    done = hub_cli(*words)
    assert done.returncode == 0, done.stderr
    assert "by rule imatrix" in server.store.read("me/out", "report.md").decode() or done.stdout
    report = hub_cli("report", "out", "--source", cut, "--statistics", cut_statistics, "--json", "--quiet")
    assert report.returncode == 0, report.stderr
    assert hub_cli("report", "out", "--statistics", cut_statistics).returncode == 2
    name = next(path.name for path in (workplace / "out").glob("*.safetensors") if "experts" in str(read_header(path)))
    data = bytearray((workplace / "out" / name).read_bytes())
    data[-1] ^= 1
    (workplace / "out" / name).write_bytes(data)
    assert hub_cli(*words, "--repo", "me/other").returncode == 3
    assert "me/other" not in server.store.repos


def test_quiet_leaves_the_result_and_the_next_command(
    server: LoopbackHub, hub_cli: RunCli, cut: Path, by_imatrix: Path, tmp_path: Path
) -> None:
    server.store.add_folder("moon/cut", cut)
    server.store.add_folder("me/out", by_imatrix)
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": list(range(64))}) + "\n")
    verbs = (
        ("calibrate", "hf://moon/cut", "c.stats", "--text", ids, "--tokens", "64", "--window", "32"),
        ("report", "hf://me/out", "--source", "hf://moon/cut"),
        ("validate", "hf://me/out", "--source", "hf://moon/cut"),
        ("run", "hf://moon/cut", "out"),
    )
    for words in verbs:
        done = hub_cli(*words, "--quiet")
        assert done.returncode == 0, done.stderr
        assert [line for line in done.stderr.splitlines() if not line.startswith("next: ")] == [], words[0]
