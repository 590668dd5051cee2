"""What inspect, report and model card say of a pruned result: how many experts, by whose scores, and the warning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pruned_makers import convert_pruned, make_whole

from k2convert.checkpoint.index import open_checkpoint
from k2convert.cli.app import main
from k2convert.hub.source_card import SourceCard
from k2convert.job.card import card_files
from k2convert.report import ReportFiles, write_report
from k2convert.report.document import figures_document
from k2convert.report.pruning import WARNING
from k2convert.validate.results import ValidationReport, validation_document
from k2convert.validate.validation import validate_checkpoint
from scripts.fixture_maker.damage import edit_json

KEEPS = "keeps 2 of 4 experts per layer, chosen by REAP saliency on <novels> | of 1813"


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruned")
    return convert_pruned(make_whole(folder / "source"), folder / "out")


@pytest.fixture(scope="module")
def validated(pruned: Path) -> ValidationReport:
    return validate_checkpoint(folder=pruned, source=open_checkpoint(pruned.parent / "source"))


@pytest.fixture(scope="module")
def reported(pruned: Path, tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    return write_report(folder=pruned, out=tmp_path_factory.mktemp("reported"))


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_inspect_says_what_is_kept(pruned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = " ".join(shown(capsys, "inspect", pruned).split())
    assert KEEPS in found
    assert "a pruned or a small model" not in found
    document = json.loads(shown(capsys, "inspect", pruned, "--json"))
    assert document["experts_per_layer"] == 2
    assert document["pruning"] == {"kept": 2, "of": 4, "chosen_by": KEEPS.partition("by ")[2]}
    whole = json.loads(shown(capsys, "inspect", pruned.parent / "source", "--json"))
    assert whole["pruning"] is None
    assert any("a pruned or a small model" in oddity for oddity in whole["oddities"])


def test_page_and_markdown_say_what_is_kept_with_the_warning(reported: ReportFiles) -> None:
    page, text = reported.page.read_text(), reported.markdown.read_text()
    assert "Pruned experts" in page
    assert "### Pruned experts" in text
    for found in (page.replace("&#39;", "'"), text.replace("\\", "")):
        assert "2 of 4 routed experts are kept in each of 2 MoE layers; 50.0 % were left out." in found
        assert WARNING in found
        assert "Only leaving out experts saves space" in found
        assert "2 of 4 per layer, chosen by REAP saliency on &lt;novels" in found
        assert "<novels>" not in found
    assert figures_document(reported.report)["pruning"] == {"kept": 2, "of": 4, "chosen_by": KEEPS.partition("by ")[2]}


def test_the_shares_left_out_are_in_report_and_card_layer_by_layer(
    pruned: Path, validated: ValidationReport, tmp_path: Path
) -> None:
    ledger = pruned / "k2convert.json"
    before = ledger.read_bytes()
    shares = {"1": {"score": 0.125, "router_weight": 0.2}, "2": {"score": 0.25, "router_weight": 0.4}}
    layer = {"layer": 2, "errors": [], "failures": [], "router_unchanged": True}
    document = validation_document(validated) | {
        "layers": {
            "hidden_states": "text: eval.txt",
            "layers": [layer | {"pruning": {"num_source_experts": 4, "router_weight_left_out": 0.3}}],
        }
    }
    try:
        edit_json(ledger, lambda found: found["pruning"].update(left_out=shares))
        files = write_report(folder=pruned, out=tmp_path, validation=document)
        _, body = card(pruned, validated)
    finally:
        ledger.write_bytes(before)
    page, text = files.page.read_text().replace("&#39;", "'"), files.markdown.read_text()
    for found in (page, text, body):
        assert "Left out of the saliency: 18.8 % on average, at most 25.0 % (layer 2)" in found
        assert "Left out of the router's weight: 30.0 % on average, at most 40.0 % (layer 2)" in found
    for found in (page, text):
        assert "Left out of the router's weight, text: eval.txt: 30.0 % on average, at most 30.0 % (layer 2)" in found
    assert "| layer | saliency left out | router's weight left out | router's weight, in validate, left out |" in text
    assert "| 1 | 12.5 % | 20.0 % |  |" in text
    assert "| 2 | 25.0 % | 40.0 % | 30.0 % |" in text
    assert "| layer | saliency left out | router's weight left out |" in body
    assert "| 2 | 25.0 % | 40.0 % |" in body
    left_out = figures_document(files.report)["pruning"]["left_out"]
    assert left_out == shares


def test_a_list_without_scores_says_so(pruned: Path, validated: ValidationReport, reported: ReportFiles) -> None:
    for found in (reported.page.read_text(), reported.markdown.read_text(), card(pruned, validated)[1]):
        assert "The list came without scores, so it is not known which share of them was left out." in found


def test_a_report_on_all_experts_says_nothing_of_pruning(pruned: Path, tmp_path: Path) -> None:
    ledger = pruned / "k2convert.json"
    before = ledger.read_bytes()
    try:
        edit_json(ledger, lambda found: found.pop("pruning"))
        files = write_report(folder=pruned, out=tmp_path)
    finally:
        ledger.write_bytes(before)
    assert "Pruned" not in files.page.read_text() + files.markdown.read_text()
    assert "It does not save space" in files.page.read_text()
    assert "pruning" not in figures_document(files.report)


def test_a_report_on_an_unfinished_job_says_what_is_kept(pruned: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pruned, tmp_path / "copy"))
    (folder / "k2convert.json").unlink()
    assert "2 of 4 routed experts are kept" in write_report(folder=folder).page.read_text()


def card(folder: Path, validated: ValidationReport) -> tuple[dict[str, Any], str]:
    """The front matter of the card, and its text in one line."""
    files = card_files(
        folder, repo="me/K2", base_model="moon/K2", source=SourceCard(), validation=validated, tensors=()
    )
    _, matter, body = files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(matter), " ".join(body.split())


def test_the_card_says_what_is_kept_with_the_warning(pruned: Path, validated: ValidationReport) -> None:
    matter, body = card(pruned, validated)
    assert matter["base_model_relation"] == "quantized"
    assert {"pruned", "reap", "nvfp4"} <= set(matter["tags"])
    assert "with 2 of its 4 experts per layer, and with its routed experts converted to NVFP4" in body
    assert "Kept: 2 of 4 routed experts in each layer, chosen by REAP saliency on &lt;novels\\> \\| of 1813." in body
    assert f"**Measure it before you use it.** {WARNING}" in body
    assert "smaller than the INT4 source only by the 2 of 4 experts per layer that were left out" in body
    assert "19 of 19 rules" in body


@pytest.mark.parametrize("scores", [None, "reaping by hand"])
def test_the_word_reap_is_for_scores_of_reap(pruned: Path, validated: ValidationReport, scores: str | None) -> None:
    ledger = pruned / "k2convert.json"
    before = ledger.read_bytes()
    try:
        edit_json(ledger, lambda found: found["pruning"].update(chosen_by=scores))
        matter, body = card(pruned, validated)
    finally:
        ledger.write_bytes(before)
    assert "pruned" in matter["tags"]
    assert "reap" not in matter["tags"]
    assert (f"chosen by {scores}" if scores else "the list does not say by whose scores") in body
