"""Jobs with the Hub and statistics, which may be on the Hub too: pinned, compared, and refused in one line each."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command import RunCli, assert_refused
from damaged_files import flip
from loopback import LoopbackHub
from statistics_makers import layers_of, random_statistics, rewrite

from k2convert.calibration.statistics import open_statistics
from k2convert.checkpoint.header import read_header

NORM = "model-00002-of-000005.safetensors: model.layers.1.post_attention_layernorm.weight"


@pytest.fixture
def source(server: LoopbackHub, cut: Path) -> LoopbackHub:
    server.store.add_folder("moon/cut", cut)
    return server


@pytest.mark.slow
def test_hub_to_hub_gives_the_local_bytes(source: LoopbackHub, cli: RunCli, by_imatrix: Path, statistics: Path) -> None:
    cli("run", "hf://moon/cut", "hf://me/out", "--statistics", statistics, "--yes", code=0)
    for path in by_imatrix.glob("*.safetensors"):
        assert source.store.read("me/out", path.name) == path.read_bytes()
    ledgers = ((by_imatrix / "k2convert.json").read_bytes(), source.store.read("me/out", "k2convert.json"))
    assert json.loads(ledgers[0])["calibration"] == json.loads(ledgers[1])["calibration"]
    card = source.store.read("me/out", "README.md").decode()
    assert "Calibrated on 8,192 tokens of emma.txt" in card
    assert "Smoothing multiplied" in card
    assert "no calibration data were used" not in card
    report = source.store.read("me/out", "report.html").decode()
    assert "<h2>Calibration</h2>" in report
    assert "byte for byte or scaled exactly by the norm" in report
    again = cli("run", "hf://moon/cut", "hf://me/out", "--statistics", statistics, "--yes")
    assert "already holds this result" in again.stderr
    cli("run", "hf://moon/cut", "hf://me/out", "--yes", code=1)


@pytest.mark.usefixtures("source")
def test_another_norm_is_found_in_its_shard(cli: RunCli, cwd: Path, statistics: Path, tmp_path: Path) -> None:
    dense, *layers = layers_of(statistics)
    rewrite(statistics, [dense, *(replace(of, norm_digest="0" * 64) for of in layers)], tmp_path / "wrong")
    done = cli("run", "hf://moon/cut", "out", "--statistics", tmp_path / "wrong", "--quiet", code=1)
    assert_refused(done, f"was made from a source with other norms: {NORM} differs")
    assert not (cwd / "out" / "config.json").exists()
    assert not (cwd / "out" / "model-00002-of-000005.safetensors").exists()


@pytest.mark.parametrize("layers", [(), ("--layers", "1", "--tokens", "8")], ids=["everything", "one layer"])
def test_a_published_result_is_validated_from_the_hub(
    source: LoopbackHub, cli: RunCli, by_imatrix: Path, statistics: Path, layers: tuple[str, ...]
) -> None:
    source.store.add_folder("me/out", by_imatrix)
    words = ("validate", "hf://me/out", "--source", "hf://moon/cut", "--statistics", statistics, *layers, "--json")
    found = json.loads(cli(*words).stdout)
    assert found["contract"]["failed"] == []
    assert found["weights"]["verdicts"]["rule"] == "pass"
    assert (found["weights"]["rule"]["rule"], found["weights"]["rule"]["tensors"]) == ("imatrix", 12)
    if layers:
        assert found["layers"]["layers"][0]["router_unchanged"] is True
    else:
        assert found["passed"] is True
        assert found["contract"]["rules"][6]["note"].endswith("4 of them scaled")


def test_a_changed_exponent_is_found(source: LoopbackHub, cli: RunCli, by_imatrix: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(by_imatrix, tmp_path / "out", ignore=shutil.ignore_patterns(".k2convert")))
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    for path in folder.glob("*.safetensors"):
        if (place := read_header(path).tensors.get(name)) is not None:
            flip(path, place.begin + 1)  # the exponent of the first number
    source.store.add_folder("me/out", folder)
    done = cli("validate", "hf://me/out", "--source", "hf://moon/cut", "--json", code=3)
    rule = json.loads(done.stdout)["contract"]["rules"][6]
    assert [offender["name"] for offender in rule["offenders"]] == [name]
    assert "first in column 0" in rule["offenders"][0]["problem"]


@pytest.mark.quick(1)
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
    cli: RunCli,
    cwd: Path,
    cut: Path,
    statistics: Path,
    by_imatrix: Path,
    tmp_path: Path,
    repo: str,
    as_file: str,
    address: str,
) -> None:
    (tmp_path / "uploaded").mkdir()
    shutil.copy(statistics, tmp_path / "uploaded" / as_file)
    commit = server.store.add_folder(repo, tmp_path / "uploaded").refs["main"]
    done = cli("run", cut, "out", "--statistics", address, code=0)
    for path in by_imatrix.glob("*.safetensors"):
        assert (cwd / "out" / path.name).read_bytes() == path.read_bytes()
    pinned = f"hf://{repo}@{commit}/{as_file}"
    stated = json.loads((cwd / "out" / "k2convert.json").read_text())["calibration"]
    assert stated["statistics"] == open_statistics(statistics).digest
    assert stated["statistics_from"] == pinned
    assert pinned in done.stderr.splitlines()[-1]
    checked = cli("validate", "out", "--source", cut, "--statistics", pinned, "--json", "--quiet")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert json.loads(checked.stdout)["weights"]["verdicts"]["rule"] == "pass"
    server.store.repos[repo].commit("main", {})
    cli("run", cut, "out", "--statistics", pinned, code=0)


def test_what_is_no_statistics_file_on_the_hub_is_refused_in_one_line(
    server: LoopbackHub, cli: RunCli, cwd: Path, cut: Path, tmp_path: Path
) -> None:
    (tmp_path / "uploaded").mkdir()
    for name in ("a.stats", "b.stats"):
        (tmp_path / "uploaded" / name).write_text("import os")
    server.store.add_folder("me/stats", tmp_path / "uploaded")
    for address, words in (
        ("hf://me/none", "could not look up me/none: the Hub answered 404"),
        ("hf://me/stats@nowhere", "could not look up me/stats at revision nowhere: the Hub answered 404"),
        ("hf://me/stats", "hf://me/stats: has 2 files named *.stats. Name the file: hf://me/stats/FILE."),
        ("hf://me/stats/c.stats", "hf://me/stats/c.stats: is not there at commit "),
        ("hf://me/stats/a.stats", "/a.stats"),
        ("hf://me", "hf://me/: not a repository. Write hf://owner/name"),
    ):
        done = cli("run", cut, "out", "--statistics", address, "--quiet")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
        assert "/tmp/" not in done.stderr
        assert not (cwd / "out").exists()


def test_publish_regenerates_the_weights_and_refuses_wrong_statistics(
    server: LoopbackHub, cli: RunCli, cwd: Path, cut: Path, short: Path, statistics: Path, by_imatrix: Path
) -> None:
    shutil.copytree(by_imatrix, cwd / "out")
    damaged = cwd / "damaged.stats"
    damaged.write_bytes(statistics.read_bytes()[:-100])
    foreign = random_statistics(cwd / "foreign.stats", short)
    for given, fact in (
        (damaged, "not a complete"),
        (foreign, "not the statistics of this result"),
        (cwd / "missing.stats", "no such file"),
    ):
        refused = ("publish", "out", "--repo", "me/out", "--statistics", given, "--yes")
        done = cli(*refused, "--source", cut, code=1)
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
        assert f"{given}: " in line
        assert fact in line
        cli(*refused, code=2)  # statistics need the source
    assert server.store.repos == {}
    words = ("publish", "out", "--repo", "me/out", "--source", cut, "--statistics", statistics, "--yes")
    done = cli(*words, code=0)
    assert "by rule imatrix" in server.store.read("me/out", "report.md").decode() or done.stdout
    cli("report", "out", "--source", cut, "--statistics", statistics, "--json", "--quiet", code=0)
    cli("report", "out", "--statistics", statistics, code=2)
    name = next(path.name for path in (cwd / "out").glob("*.safetensors") if "experts" in str(read_header(path)))
    flip(cwd / "out" / name, -1)
    cli(*words, "--repo", "me/other", code=3)
    assert "me/other" not in server.store.repos


def test_quiet_leaves_the_command(source: LoopbackHub, cli: RunCli, by_imatrix: Path, tmp_path: Path) -> None:
    source.store.add_folder("me/out", by_imatrix)
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": list(range(64))}) + "\n")
    verbs = (
        ("calibrate", "hf://moon/cut", "c.stats", "--text", ids, "--tokens", "64", "--window", "32"),
        ("report", "hf://me/out", "--source", "hf://moon/cut"),
        ("validate", "hf://me/out", "--source", "hf://moon/cut"),
        ("run", "hf://moon/cut", "out"),
    )
    for words in verbs:
        done = cli(*words, "--quiet", code=0)
        assert [line for line in done.stderr.splitlines() if not line.startswith("next: ")] == [], words[0]
