"""Reports and cards on calibrated and pruned results: the same facts in page, Markdown, card and --json."""

import json
import math
import re
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import run
from PIL import Image
from pruned_makers import SCORES, convert_pruned, make_whole
from test_evaluated import as_read, model_card

from k2convert.check.results import validation_document
from k2convert.check.validate import validate_checkpoint
from k2convert.records.calibration import CalibrationRecord, GptqLayer, LayerCalibration, OutputErrors
from k2convert.records.document import encode
from k2convert.records.ledger import read_ledger
from k2convert.report import ReportFiles, write_report
from k2convert.report.calibrated import WARNING, calibrated_sections
from k2convert.report.charts import draw_layer_errors, draw_shrinkages, draw_tokens
from k2convert.report.content import figures_document, headline
from k2convert.report.drawing import LIGHT
from scripts.fixture_maker.damage import edit_json


def gptq_layer(number: int, *, shrinkages: tuple[float | None, ...]) -> GptqLayer:
    return GptqLayer(
        shrinkage=0.5 if number < 3 else None,
        down_ridges=tuple(1.5 if number > 1 and expert else None for expert in range(len(shrinkages))),
        down_shrinkages=shrinkages,
        fitted=OutputErrors(0.0009 * (number - 1), 0.0035 * number, 0.000333 * number),
        held_out=OutputErrors(0.001 * (number - 1), 0.0034567 * number, 0.0012345 * number),
    )


LAYERS = {
    1: gptq_layer(1, shrinkages=(0.5, 0.1, 0.5, None)),
    2: gptq_layer(2, shrinkages=(0.5, 0.5, 0.5, 0.5)),
    3: gptq_layer(3, shrinkages=(None,) * 4),
}
HELD_OUT = {number: layer.held_out for number, layer in LAYERS.items() if layer.held_out is not None}


def with_gptq(found: CalibrationRecord, *, layers: dict[int, GptqLayer] = LAYERS) -> CalibrationRecord:
    few = LayerCalibration((70, 65, 90, 2), (3,), {})
    measured = {number: replace(few, gptq=layer) for number, layer in layers.items()}
    return replace(found, held_out_windows=1, layers=measured)


@pytest.fixture(scope="module")
def imatrix(cut: Path, statistics: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of `run --statistics`."""
    folder = tmp_path_factory.mktemp("calibrated") / "out"
    assert run("run", cut, folder, "--rule", "imatrix", "--statistics", statistics, "--quiet") == 0
    return folder


def relabelled(folder: Path, out: Path, calibration: CalibrationRecord) -> Path:
    """A copy of a result whose ledger says that it was calibrated otherwise."""
    shutil.copytree(folder, out, dirs_exist_ok=True)
    (out / "k2convert.json").write_bytes(encode(replace(read_ledger(folder), calibration=calibration)))
    return out


def calibration_of(folder: Path) -> CalibrationRecord:
    found = read_ledger(folder).calibration
    assert found is not None
    return found


@pytest.fixture(scope="module")
def fed_back(imatrix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return relabelled(imatrix, tmp_path_factory.mktemp("fed-back"), with_gptq(calibration_of(imatrix)))


@pytest.fixture(scope="module")
def not_held_out(imatrix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {number: replace(layer, held_out=None) for number, layer in LAYERS.items()}
    found = replace(with_gptq(calibration_of(imatrix), layers=layers), windows=1, held_out_windows=0)
    return relabelled(imatrix, tmp_path_factory.mktemp("not-held-out"), found)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruned")
    return convert_pruned(make_whole(folder / "source"), folder / "out")


@pytest.fixture(scope="module")
def shares_known(pruned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(pruned, tmp_path_factory.mktemp("shares") / "out"))
    edit_json(folder / "k2convert.json", lambda found: found["pruning"].update(left_out=SHARES))
    return folder


SHARES = {"1": {"score": 0.125, "router_weight": 0.2}, "2": {"score": 0.25, "router_weight": 0.4}}


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """The front matter of the card, and its text."""
    _, matter, body = model_card(folder).split("---\n", 2)
    return yaml.safe_load(matter), as_read(body)


@lru_cache
def written(folder: Path) -> ReportFiles:
    """A report on a result. Read it only."""
    return write_report(folder=folder, out=folder.parent / f"report on {folder.name}")


EVERYWHERE = {
    "imatrix": (
        "Calibrated on 8,192 tokens of emma.txt and notes of",
        "2 of 4 experts saw fewer than 64 tokens",
        "of 256 channels",
        "weighted SQNR",
    ),
    "fed_back": (
        "Rule gptq, layer by layer",
        "Down was corrected for what earlier rounding left over in 6 of 12 experts.",
        "gate and up of 1 of 3 layers, down of 5 of 12 experts",
        "squared error of 0.0037, on 1 of 5 windows that were kept out of the fit",
        "they would have 0.0104",
        "3 of 3 MoE layers",
    ),
    "not_held_out": ("The error of the outputs: no held-out figure: only one window.",),
    "pruned": (
        "Pruned experts",
        "2 of 4 routed experts are kept in each of 2 MoE layers; 50.0 % were left out.",
        f"Chosen by {SCORES}.",
        "The list came without scores, so it is not known which share of them was left out.",
        as_read(WARNING),
    ),
    "shares_known": (
        "Left out of the saliency: 18.8 % on average, at most 25.0 % (layer 2)",
        "Left out of the router's weight: 30.0 % on average, at most 40.0 % (layer 2)",
    ),
}
"""What page, Markdown and card all say about each result."""
NOWHERE = {
    "imatrix": ("Rule gptq", "Pruned", "hidden states after"),
    "fed_back": ("0.000999", "Pruned"),  # the error on the windows that were fitted to
    "not_held_out": ("relative squared error",),
    "pruned": ("Calibration",),
    "shares_known": ("came without scores",),
}
ROWS = {
    "imatrix": ("| 1 | 62 |", "| 2, 3 |"),
    "fed_back": (
        "| 1 | 0.00123 | 0.00346 | 0 | 0.5 | 0 of 4 | 0.1: 1, 0.5: 2 | 3 |",
        "| 3 | 0.0037 | 0.0104 | 0.002 | no correction | 3 of 4 | none | 0, 1, 2, 3 |",
    ),
    "not_held_out": ("| 1 | not measured | | |",),
    "pruned": (),
    "shares_known": ("| layer | saliency left out | router's weight left out |", "| 2 | 25.0 % | 40.0 % |"),
}
"""Rows of the tables by layer, in the Markdown."""
CHARTS = {
    "imatrix": ("Histogram of tokens by expert", "Channels by power of two"),
    "fed_back": ("Error of the hidden states after each layer", "Experts of each layer by shrinkage of down"),
    "not_held_out": ("Experts of each layer by shrinkage of down",),
    "pruned": (),
    "shares_known": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EVERYWHERE))
def test_page_markdown_card_and_json_say_the_same(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    files = written(folder)
    page = files.page.read_text()
    markdown = files.markdown.read_text()
    _, body = card(folder)
    for text in (as_read(page), as_read(markdown), body):
        for words in EVERYWHERE[name]:
            assert words in text
        for words in NOWHERE[name]:
            assert words not in text
    assert all(row in as_read(markdown) for row in ROWS[name])
    assert all(page.count(f'role="img" aria-label="{label}"') == 1 for label in CHARTS[name])
    assert "<novels>" not in page + markdown
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    document = json.loads(json.dumps(figures_document(files.report)))
    ledger = json.loads((folder / "k2convert.json").read_text())
    for part in ("calibration", "pruning"):
        assert document.get(part) == ledger.get(part)


def test_calibrated_results_lead_with_what_they_make_small(imatrix: Path, fed_back: Path) -> None:
    before = written(imatrix)
    after = written(fed_back)
    assert [tile.label for tile in headline(before.report, None)[:2]] == ["weighted SQNR", "SQNR"]
    first = headline(after.report, None)[0]
    assert (first.value, first.label) == ("0.0037", "error of the outputs")
    assert "on 1 of 5 windows" in first.detail
    assert "0.0104 by rule mse" in first.detail
    assert before.picture is not None
    assert after.picture is not None
    with Image.open(after.picture) as ours, Image.open(before.picture) as other:
        assert ours.width == other.width
        assert ours.height > other.height + 100  # the errors after each layer


def test_a_long_list_of_experts_is_cut(imatrix: Path) -> None:
    many = replace(LAYERS[3], down_shrinkages=(None,) * 20, down_ridges=(None,) * 20)
    layer = LayerCalibration((0,) * 20, tuple(range(20)), {}, gptq=many)
    sections = list(calibrated_sections(replace(calibration_of(imatrix), layers={3: layer})))
    assert all("10, 11 and 8 more" in str(section.tables[0].rows[0]) for section in sections)


@pytest.mark.parametrize("tokens", [(0, 0), (63, 64), (5, 100_000, 3_000_000)])
def test_every_expert_is_in_the_chart(tokens: tuple[int, ...]) -> None:
    figure = draw_tokens(tokens, LIGHT, is_weighted=True)
    (stairs,) = (patch for patch in figure.axes[0].patches if hasattr(patch, "get_data"))
    values, edges, _ = stairs.get_data()  # type: ignore[attr-defined]
    assert sum(values) == len(tokens)
    assert sum(count for count, end in zip(values, edges[1:], strict=True) if end <= 6) == sum(t < 64 for t in tokens)


def test_every_error_and_every_expert_is_in_the_charts() -> None:
    lines = {line.get_label(): line for line in draw_layer_errors(HELD_OUT, LIGHT).axes[0].lines}
    assert len(lines) == 3
    for label, key in (("this: gptq", "gptq_error"), ("with rule mse in the layer", "mse_error")):
        assert list(lines[label].get_xdata()) == [1, 2, 3]
        assert list(lines[label].get_ydata()) == [getattr(errors, key) for errors in HELD_OUT.values()]
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines.values()}) == 3  # not by color alone
    inherited = list(lines["from earlier layers alone"].get_ydata())
    assert math.isnan(inherited[0])
    assert inherited[1:] == [0.001, 0.002]
    figure = draw_shrinkages(LAYERS, LIGHT)
    assert [text.get_text() for text in figure.texts] == ["shrinkage of the correction of down"]
    bars = figure.axes[0].containers
    heights = {bar.get_label(): [patch.get_height() for patch in bar] for bar in bars}
    assert heights == {"0.1": [1, 0, 0], "0.5": [2, 4, 0], "no correction": [1, 0, 4]}


def test_inspect_says_what_is_kept(pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: object) -> str:
        assert run(*words) == 0
        return capsys.readouterr().out

    found = " ".join(shown("inspect", pruned).split())
    assert f"keeps 2 of 4 experts per layer, chosen by {SCORES}" in found
    assert "a pruned or a small model" not in found
    document = json.loads(shown("inspect", pruned, "--json"))
    assert document["experts_per_layer"] == 2
    assert document["pruning"] == {"kept": 2, "of": 4, "chosen_by": SCORES}
    whole = json.loads(shown("inspect", pruned.parent / "source", "--json"))
    assert whole["pruning"] is None
    assert any("a pruned or a small model" in oddity for oddity in whole["oddities"])


@pytest.mark.usefixtures("quick_pictures")
def test_measured_router_weights_are_shown_layer_by_layer(shares_known: Path, tmp_path: Path) -> None:
    layer = {"layer": 2, "errors": [], "failures": [], "router_unchanged": True}
    layer["pruning"] = {"num_source_experts": 4, "router_weight_left_out": 0.3}
    document = validation_document(validate_checkpoint(folder=shares_known, source=None))
    document["layers"] = {"hidden_states": "text: eval.txt", "layers": [layer]}
    files = write_report(folder=shares_known, out=tmp_path, validation=document)
    for text in (as_read(files.page.read_text()), as_read(files.markdown.read_text())):
        assert "router's weight, text: eval.txt: 30.0 % on average, at most 30.0 % (layer 2)" in text
    assert "| 1 | 12.5 % | 20.0 % | |" in as_read(files.markdown.read_text())
    assert "| 2 | 25.0 % | 40.0 % | 30.0 % |" in as_read(files.markdown.read_text())


@pytest.mark.usefixtures("quick_pictures")
def test_a_report_on_an_unfinished_job_says_what_is_kept(pruned: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pruned, tmp_path / "copy"))
    (folder / "k2convert.json").unlink()
    assert "2 of 4 routed experts are kept" in write_report(folder=folder).page.read_text()


@pytest.mark.parametrize(("scores", "is_reap"), [(SCORES, True), (None, False), ("reaping by hand", False)])
@pytest.mark.usefixtures("quick_pictures")
def test_the_word_reap_is_for_scores_of_reap(pruned: Path, tmp_path: Path, scores: str | None, is_reap: bool) -> None:
    folder = Path(shutil.copytree(pruned, tmp_path / "copy"))
    edit_json(folder / "k2convert.json", lambda found: found["pruning"].update(chosen_by=scores))
    matter, body = card(folder)
    assert matter["base_model_relation"] == "quantized"
    assert {"pruned", "nvfp4"} <= set(matter["tags"])
    assert ("reap" in matter["tags"]) == is_reap
    assert "with 2 of its 4 experts per layer, and with its routed experts converted to NVFP4" in body
    assert (f"Chosen by {scores}." if scores else "The list does not say by whose scores.") in body
    assert "smaller than the INT4 source only by the experts that were left out" in body
