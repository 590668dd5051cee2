"""The ledger is read in one place: written and read back it is equal, and a damaged one is refused with what to do."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k2convert.errors import CheckpointError
from k2convert.records.document import encode
from k2convert.records.ledger import read_ledger
from scripts.fixture_maker.damage import edit_json


def test_a_ledger_read_back_gives_its_own_bytes(local_result: Path) -> None:
    ledger = read_ledger(local_result)
    assert encode(ledger) == (local_result / "k2convert.json").read_bytes()
    assert ledger.num_bytes == sum(path.stat().st_size for path in local_result.glob("*.safetensors"))


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "recipe.layout is 'best'": lambda d: d["recipe"].update(layout="best"),
    "fingerprint is missing": lambda d: d.pop("fingerprint"),
    "source.headers is missing": lambda d: d.update(source={"family": None, "repo": None, "revision": None}),
    "source.repo is 5": lambda d: d["source"].update(repo=5),
    "versions is": lambda d: d.update(versions=[]),
    "versions.python is": lambda d: d["versions"].update(python={"major": 3}),
    "k2convert is": lambda d: d.update(k2convert=[1]),
    "source.headers.x is 1": lambda d: d["source"]["headers"].update(x=1),
    "fingerprint.arithmetic is '1'": lambda d: d["fingerprint"].update(arithmetic="1"),
    "shards.*tensors is": lambda d: next(iter(d["shards"].values())).update(tensors={}),
    "not a file name": lambda d: d.update(shards={"../x.safetensors": {"blake3": "", "bytes": 1, "tensors": 1}}),
    "totals.total: energy": lambda d: d["totals"]["total"].update(energy=-1.0),
}


def test_figures_that_only_earlier_versions_measured_are_passed_over(local_result: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(local_result, tmp_path / "copy"))
    edit_json(
        folder / "k2convert.json", lambda d: d["totals"]["total"].update(sampled_error_bound=1.0, weighted_error=1.0)
    )
    assert read_ledger(folder) == read_ledger(local_result)


def test_a_ledger_of_an_earlier_release_keeps_the_name_of_its_rule(local_result: Path, tmp_path: Path) -> None:
    """Its other fields are passed over. The result is measured, and not checked by a rule."""
    folder = Path(shutil.copytree(local_result, tmp_path / "copy"))
    edit_json(folder / "k2convert.json", lambda d: d["recipe"].update(rule="weighted"))
    edit_json(folder / "k2convert.json", lambda d: d.update(colour="red"))
    found = read_ledger(folder)
    assert found.recipe.rule == "weighted"
    assert found.recipe.roles == read_ledger(local_result).recipe.roles
    assert found.totals == read_ledger(local_result).totals


@pytest.mark.parametrize("part", DAMAGE)
def test_a_damaged_part_is_named_with_the_remedy(part: str, local_result: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(local_result, tmp_path / "copy"))
    edit_json(folder / "k2convert.json", DAMAGE[part])
    with pytest.raises(CheckpointError, match=rf"k2convert\.json: .*{part}.*Delete the file and run the conversion"):
        read_ledger(folder)


def test_what_is_not_json_or_not_there_is_refused_with_the_remedy(local_result: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a finished conversion \(no k2convert\.json\)"):
        read_ledger(tmp_path)
    (tmp_path / "k2convert.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"not JSON .*Delete the file and run the conversion again"):
        read_ledger(tmp_path)
