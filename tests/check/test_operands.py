"""What `validate` refuses before it reads a weight: another source, a source instead of a result, an unfinished job."""

import shutil
from pathlib import Path

import pytest
from command import RunCli

from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import DestinationError
from scripts.fixture_maker import damage


def test_another_source_is_named_first(by_max: Path, cut: Path, run_cli: RunCli) -> None:
    shown = run_cli("validate", by_max, "--source", cut, code=1)
    assert f"{by_max}: {cut} has other weights than the source that it was converted from: " in shown.stderr
    assert "rule" not in shown.stdout


def test_equal_headers_over_other_weights_are_named_first(by_max: Path, tiny: Path, tmp_path: Path) -> None:
    """A fine-tune has the headers of its base model."""
    other = shutil.copytree(tiny, tmp_path / "other")
    for shard in other.glob("*.safetensors"):
        raw = bytearray(shard.read_bytes())
        for tensor in read_header(shard).tensors.values():
            if ".experts." not in tensor.name:
                raw[tensor.begin] ^= 1
        shard.write_bytes(raw)
    report = validate_checkpoint(folder=by_max, source=open_checkpoint(other))
    first = report.contract.rules[6].offenders[0]
    assert first.name == str(other)
    assert "was converted from another source, or the source has changed" in first.problem


def test_an_unfinished_folder_says_how_far_it_is_and_how_to_go_on(tiny: Path, tmp_path: Path, run_cli: RunCli) -> None:
    out = tmp_path / "out"
    run_cli("run", tiny, out, "--rule", "max", "--quiet", code=0)
    records = sorted((out / ".k2convert" / "done").iterdir())
    for record in records[1:]:
        record.unlink()
        (out / record.name.removesuffix(".json")).unlink()
    for name in ("config.json", "model.safetensors.index.json", "k2convert.json"):
        (out / name).unlink()
    shown = run_cli("validate", out, "--source", tiny, code=1)
    assert f"{out}: not finished: 1 of 5 shards are converted" in shown.stderr
    assert f"k2convert run {tiny} {out} --rule max" in shown.stderr
    assert "rule 1 " not in shown.stdout
    with pytest.raises(DestinationError, match="not finished"):
        validate_checkpoint(folder=out, source=None)


def test_rule_10_checks_the_size_that_the_last_line_recommends(by_max: Path, tmp_path: Path, run_cli: RunCli) -> None:
    shown = run_cli("validate", by_max, COLUMNS="200")
    size = shown.stderr.split("--tensor-parallel-size ")[1].split()[0]
    assert f"tensor-parallel size {size})" in shown.stdout
    copy = shutil.copytree(by_max, tmp_path / "copy")
    damage.edit_json(copy / "config.json", lambda config: config.update(moe_intermediate_size=24))
    report = validate_checkpoint(folder=copy, source=None)
    assert report.contract.rules[9].offenders[0].name == "moe_intermediate_size at tensor-parallel size 1"
