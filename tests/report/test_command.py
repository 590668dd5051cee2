"""`k2convert report` as users run it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from damaged_files import flip


@pytest.fixture(scope="module")
def folder(local_result: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the conversion, to write a report into."""
    return Path(shutil.copytree(local_result, tmp_path_factory.mktemp("command") / "converted"))


def test_report_with_source_shows_all_rules(folder: Path, tiny: Path, run_cli: Any) -> None:
    done = run_cli("report", folder, "--source", tiny, code=0)
    assert done.stdout.split() == [str(folder / name) for name in ("report.html", "report.md", "report.png")]
    assert "next: k2convert publish" in done.stderr
    page = (folder / "report.html").read_text()
    assert "19 of 19" in page
    assert "144 tensors decoded" in page
    assert "<h2>Needs</h2>" in page


def test_report_without_source_skips_what_needs_it(folder: Path, run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("report", folder, "--out", tmp_path / "new" / "folder", "--json")
    document = json.loads(done.stdout)
    assert document["contract"]["skipped"] > 0
    assert document["contract"]["failed"] == []
    assert document["totals"]["total"]["sqnr_db"] == pytest.approx(22.6166, abs=1e-4)
    assert document["complete"]
    assert Path(document["files"]["html"]).parent == tmp_path / "new" / "folder"
    assert "skipped" in Path(document["files"]["html"]).read_text()


def test_weights_that_the_rule_does_not_give_are_shown(folder: Path, tiny: Path, run_cli: Any, tmp_path: Path) -> None:
    validation = json.loads(run_cli("validate", folder, "--source", tiny, "--json").stdout)
    validation["passed"] = False
    wrong = {"model.layers.1.mlp.experts.0.down_proj": "1 of 8 codes differ"}
    validation["weights"]["certificate"]["mismatches"] = wrong
    (tmp_path / "validation.json").write_text(json.dumps(validation))
    done = run_cli("report", folder, "--validation", tmp_path / "validation.json", "--out", tmp_path)
    assert "but the validation failed. Do not publish or serve this result" in done.stderr.splitlines()[-1]
    assert "next: k2convert publish" not in done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "do not serve it: see what was compared" in page
    assert "by code that shares nothing with the conversion: faults in 1 of them." in page


def test_broken_contract_is_shown(folder: Path, run_cli: Any, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    flip(broken / "model-00003-of-000005.safetensors", -1)
    done = run_cli("report", broken, code=0)
    assert "the contract failed by rule 19. Do not publish or serve this result" in done.stderr.splitlines()[-1]
    page = (broken / "report.html").read_text()
    assert "1 broken" in page
    assert '<td class="bad">fail</td>' in page


def test_validation_is_taken_from_a_file(
    folder: Path, validation: dict[str, Any], run_cli: Any, tmp_path: Path, tiny: Path
) -> None:
    saved = tmp_path / "validation.json"
    saved.write_text(json.dumps(validation | {"folder": str(folder)}))
    run_cli("report", folder, "--validation", saved, "--out", tmp_path, code=0)
    assert "Reference layers" in (tmp_path / "report.html").read_text()
    run_cli("report", folder, "--validation", saved, "--source", tiny, code=2)


@pytest.mark.parametrize(
    ("named", "is_accepted"),
    [("RESULT", True), ("result", True), ("there/../result", True), ("other", False), ("/x/result", False),
     ("hf://me/result", False), (".", False)],
)  # fmt: skip
def test_the_validation_of_another_result_is_refused(
    named: str, is_accepted: bool, folder: Path, validation: dict[str, Any], run_cli: Any, tmp_path: Path
) -> None:
    result = tmp_path / "result"
    result.symlink_to(folder)
    saved = tmp_path / "validation.json"
    saved.write_text(json.dumps(validation | {"folder": named.replace("RESULT", str(result))}))
    done = run_cli("report", result, "--validation", saved, "--out", tmp_path / "out", code=0 if is_accepted else 1)
    assert (tmp_path / "out").exists() == is_accepted
    if not is_accepted:
        assert done.stderr == (
            f"error: {saved}: is the validation of {named}, not of {result}. Name the result as the validation does, "
            f"or write the file again: `k2convert validate {result} --json > {saved}`.\n"
        )


DOCUMENTS = [{}, {"contract": 1}] + [
    {"contract": {"rules": [rule]}} for rule in ({"number": "x"}, {"number": 1, "verdict": "perhaps"}, 7)
]


@pytest.mark.parametrize("text", [None, "{", *map(json.dumps, DOCUMENTS)])
def test_file_that_is_not_a_validation_is_refused(folder: Path, run_cli: Any, tmp_path: Path, text: str | None) -> None:
    saved = tmp_path / "validation.json"
    if text is not None:
        saved.write_text(text)
    done = run_cli("report", folder, "--validation", saved, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Write it again: `k2convert validate DEST --json > FILE`." in done.stderr
    assert not (tmp_path / "out").exists()
