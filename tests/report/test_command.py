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
    assert Path(document["files"]["html"]).parent == tmp_path / "new" / "folder"
    assert "skipped" in Path(document["files"]["html"]).read_text()


def test_broken_contract_is_shown(folder: Path, run_cli: Any, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    flip(broken / "model-00003-of-000005.safetensors", -1)
    done = run_cli("report", broken, code=0)
    assert "the contract failed by rule 19. Do not publish or serve this result" in done.stderr.splitlines()[-1]
    page = (broken / "report.html").read_text()
    assert "1 broken" in page
    assert '<td class="bad">fail</td>' in page
