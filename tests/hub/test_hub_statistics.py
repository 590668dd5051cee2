"""Jobs with the Hub and statistics: the bytes of a local job, and statistics of another source are refused."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
from command import RunCli
from loopback import LoopbackHub
from said import said

from k2convert.calibration.statistics import StatisticsHeader, open_statistics, write_statistics
from k2convert.checkpoint.header import read_header

NORM = "model-00002-of-000005.safetensors: model.layers.1.post_attention_layernorm.weight"


@pytest.fixture
def source(server: LoopbackHub, cut: Path) -> LoopbackHub:
    """The loopback Hub with the small checkpoint as moon/cut."""
    server.store.add_folder("moon/cut", cut)
    return server


@pytest.mark.usefixtures("source")
def test_hub_to_folder_gives_the_bytes_of_a_local_job(
    hub_cli: RunCli, workplace: Path, by_imatrix: Path, cut_statistics: Path
) -> None:
    done = hub_cli("run", "hf://moon/cut", "out", "--statistics", cut_statistics, "--workers", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["calibration"]["smoothing"] is True
    for path in by_imatrix.glob("*.safetensors"):
        assert (workplace / "out" / path.name).read_bytes() == path.read_bytes()
    ledgers = [json.loads((folder / "k2convert.json").read_text()) for folder in (by_imatrix, workplace / "out")]
    assert ledgers[0]["calibration"] == ledgers[1]["calibration"]


def test_hub_to_hub_publishes_the_bytes_of_a_local_job(
    source: LoopbackHub, hub_cli: RunCli, by_imatrix: Path, cut_statistics: Path
) -> None:
    done = hub_cli("run", "hf://moon/cut", "hf://me/out", "--statistics", cut_statistics, "--yes")
    assert done.returncode == 0, done.stderr
    for path in by_imatrix.glob("*.safetensors"):
        assert source.store.read("me/out", path.name) == path.read_bytes()
    card = source.store.read("me/out", "README.md").decode()
    assert "Calibrated on 8,192 tokens of emma.txt" in card
    assert "Smoothing multiplied" in card
    assert "no calibration data were used" not in card
    report = source.store.read("me/out", "report.html").decode()
    assert "<h2>Calibration</h2>" in report
    assert "byte for byte or scaled exactly by the norm" in report
    again = hub_cli("run", "hf://moon/cut", "hf://me/out", "--statistics", cut_statistics, "--yes")
    assert "already holds this result" in again.stderr
    other = hub_cli("run", "hf://moon/cut", "hf://me/out", "--yes")
    assert other.returncode == 1


@pytest.mark.usefixtures("source")
def test_another_norm_is_found_when_its_shard_has_arrived(
    hub_cli: RunCli, workplace: Path, cut_statistics: Path, tmp_path: Path
) -> None:
    found = open_statistics(cut_statistics)
    header = StatisticsHeader(**{field.name: getattr(found, field.name) for field in fields(StatisticsHeader)})
    wrong = [replace(found.layer(number), norm_digest="0" * 64) for number in found.layers if number]
    write_statistics(tmp_path / "wrong", [found.layer(0), *wrong], header)
    done = hub_cli("run", "hf://moon/cut", "out", "--statistics", tmp_path / "wrong", "--quiet")
    assert done.returncode == 1
    assert f"was made from a different source: {NORM} differs" in done.stderr
    assert said(done.stderr).count("\n") == 1
    assert not (workplace / "out" / "config.json").exists()
    assert not (workplace / "out" / "model-00002-of-000005.safetensors").exists()


@pytest.mark.parametrize("layers", [(), ("--layers", "1", "--tokens", "8")], ids=["everything", "one layer"])
def test_a_published_result_is_validated_from_the_hub(
    source: LoopbackHub, hub_cli: RunCli, by_imatrix: Path, cut_statistics: Path, layers: tuple[str, ...]
) -> None:
    source.store.add_folder("me/out", by_imatrix)
    words = ("validate", "hf://me/out", "--source", "hf://moon/cut", "--statistics", cut_statistics, *layers, "--json")
    found = json.loads(hub_cli(*words).stdout)
    assert found["contract"]["failed"] == []
    assert found["weights"]["verdicts"]["rule"] == "pass"
    assert (found["weights"]["rule"]["rule"], found["weights"]["rule"]["tensors"]) == ("imatrix", 12)
    if layers:
        assert found["layers"]["layers"][0]["router_unchanged"] is True
    else:
        assert found["passed"] is True
        assert found["contract"]["rules"][6]["note"].endswith("4 of them scaled")


def test_a_changed_exponent_is_found_from_the_hub(
    source: LoopbackHub, hub_cli: RunCli, by_imatrix: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(by_imatrix, tmp_path / "out", ignore=shutil.ignore_patterns(".k2convert")))
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    for path in folder.glob("*.safetensors"):
        if (place := read_header(path).tensors.get(name)) is not None:
            data = bytearray(path.read_bytes())
            data[place.begin + 1] ^= 1  # the exponent of the first number
            path.write_bytes(data)
    source.store.add_folder("me/out", folder)
    done = hub_cli("validate", "hf://me/out", "--source", "hf://moon/cut", "--json")
    assert done.returncode == 3
    rule = json.loads(done.stdout)["contract"]["rules"][6]
    assert [offender["name"] for offender in rule["offenders"]] == [name]
    assert "first in column 0" in rule["offenders"][0]["problem"]
