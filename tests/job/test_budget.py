"""A result with more weight error than `validate` accepts: `run` says so, exits 3, and publishes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import RunCli


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose budget a few tensors of the tiny checkpoint miss by rule max."""
    path = tmp_path / "strict.yaml"
    path.write_text("name: strict\nrule: max\nbudget: {tensor_sqnr_db: 22.5}\n")
    return path


def test_a_result_below_the_budget_ends_with_3(recipe: Path, k2_shaped: Path, tmp_path: Path, run_cli: RunCli) -> None:
    words = ("run", k2_shaped, tmp_path / "out", "--recipe", recipe, "--device", "cpu")
    for more in ((), ("--json",)):  # finished once, it is said again
        done = run_cli(*words, *more, code=3)
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert "below the error budget of 22.5 dB, so `validate` fails: " in line
        assert "_proj has " in line
    assert (tmp_path / "out" / "config.json").exists()
    found = json.loads(done.stdout)["below_budget"]
    checked = run_cli("validate", tmp_path / "out", "--source", k2_shaped, "--json", code=3)
    rule = next(rule for rule in json.loads(checked.stdout)["contract"]["rules"] if rule["number"] == 18)
    assert found["tensor_sqnr_db"] == 22.5
    assert len(found["tensors"]) == rule["count"]
    for name, figure in found["tensors"].items():
        assert figure < 22.5
        assert f"has {figure:.2f} dB" in line or len(found["tensors"]) > 3, name


def test_a_result_within_the_budget_says_nothing_of_it(k2_shaped: Path, tmp_path: Path, run_cli: RunCli) -> None:
    done = run_cli("run", k2_shaped, tmp_path / "out", "--rule", "max", "--device", "cpu", "--json", code=0)
    assert "below_budget" not in json.loads(done.stdout)
