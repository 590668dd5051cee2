"""The report on a result with statistics: texts, tokens an expert, experts that fell back, scaled channels."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from statistics_makers import random_statistics

from k2convert.calibrate.statistics import open_statistics
from k2convert.checkpoint.index import open_checkpoint
from k2convert.hub.source_card import read_source_card
from k2convert.job.card import card_files
from k2convert.job.places import Destination, Source
from k2convert.job.prepare import choose_recipe, prepare
from k2convert.job.run import execute
from k2convert.records.calibration import CalibrationRecord, FeedbackLayer, LayerCalibration, OutputErrors
from k2convert.records.ledger import read_ledger
from k2convert.report import ReportFiles, feedback, write_report
from k2convert.report.calibration import layer_rows, sentences
from k2convert.report.calibration_charts import draw_tokens
from k2convert.report.content import headline
from k2convert.report.document import figures_document
from k2convert.report.feedback_charts import draw_layer_errors, draw_shrinkages
from k2convert.report.palette import LIGHT
from k2convert.validate.validation import validate_checkpoint


@pytest.fixture(scope="module")
def calibrated(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """A report on a result of `run --statistics`."""
    folder, source = tmp_path_factory.mktemp("calibrated"), open_checkpoint(cut)
    statistics = random_statistics(folder / "cut.stats", cut)
    job = prepare(
        source=Source(source),
        destination=Destination(folder / "out"),
        recipe=choose_recipe(source, None, {"rule": "weighted"}),
        statistics=open_statistics(statistics),
        device="cpu",
    )
    execute(job)
    return write_report(folder=folder / "out", out=folder / "report")


def test_page_and_markdown_say_what_it_was_calibrated_with(calibrated: ReportFiles) -> None:
    page, text = calibrated.page.read_text(), calibrated.markdown.read_text()
    for found in (page, text):
        assert "Calibrated on 8,192 tokens of emma.txt and notes of" in found
        assert "2 of 4 experts saw fewer than 64 tokens" in found
        assert "of 256 channels" in found
        assert "This is exact" in found
        assert "weighted SQNR" in found
        assert "norm scaling makes smaller" in found
    assert 'aria-label="Histogram of tokens by expert"' in page
    assert 'aria-label="Channels by power of two"' in page
    assert "### Calibration" in text
    assert "| 1 | 62 |" in text
    assert "| 2, 3 |" in text


def test_json_has_the_figures(calibrated: ReportFiles) -> None:
    document = json.loads(json.dumps(figures_document(calibrated.report)))
    assert document["totals"]["total"]["weighted_sqnr_db"] > 0
    found = document["calibration"]
    assert (found["experts"], found["least_tokens"], found["fallback_experts"]) == (4, 62, {"1": [2, 3]})
    assert sum(found["channels"].values()) == 256


def record(*, tokens: tuple[int, ...], weighted: bool = True, norm_scaling: bool = False) -> CalibrationRecord:
    exponents = {0: 60, 1: 4} if norm_scaling else {}
    few = tuple(expert for expert, count in enumerate(tokens) if count < 64)
    return CalibrationRecord(
        statistics="0" * 64,
        texts=(("a.txt", "1" * 64),),
        tokens=64,
        window=64,
        windows=1,
        dropped_windows=0,
        seed=0,
        weighted=weighted,
        norm_scaling=norm_scaling,
        exponents_digest="2" * 64 if norm_scaling else None,
        layers={1: LayerCalibration(tokens, few if weighted else (), exponents)},
    )


def test_sentences_say_only_what_was_done() -> None:
    weighted = " ".join(sentences(record(tokens=(64, 70))))
    assert ", in 1 window of up to 64 tokens." in weighted
    assert "Each of the 2 experts saw at least 64 tokens." in weighted
    assert "Norm scaling" not in weighted
    scaled = " ".join(sentences(record(tokens=(1,), weighted=False, norm_scaling=True)))
    assert "importance" not in scaled
    assert "multiplied 4 of 64 channels (6.2 %)" in scaled


def test_a_long_list_of_experts_is_cut() -> None:
    (row,) = layer_rows(record(tokens=(0,) * 20))
    assert row[4].endswith("10, 11 and 8 more")


@pytest.mark.parametrize("tokens", [(0, 0), (63, 64), (5, 100_000, 3_000_000)])
@pytest.mark.parametrize("is_narrow", [True, False])
def test_every_expert_is_in_the_chart(tokens: tuple[int, ...], is_narrow: bool) -> None:
    figure = draw_tokens(tokens, is_weighted=True, palette=LIGHT, is_narrow=is_narrow)
    (stairs,) = (patch for patch in figure.axes[0].patches if hasattr(patch, "get_data"))
    values, edges, _ = stairs.get_data()  # type: ignore[attr-defined]
    assert sum(values) == len(tokens)
    assert sum(count for count, end in zip(values, edges[1:], strict=True) if end <= 6) == sum(t < 64 for t in tokens)


def feedback_layer(number: int, *, shrinkages: tuple[float | None, ...]) -> FeedbackLayer:
    return FeedbackLayer(
        ridge=0.15 if number > 1 else None,
        ridge_gain=0.412 if number > 1 else 0.0,
        shrinkage=0.5 if number < 3 else None,
        down_ridges=tuple(1.5 if number > 1 and expert else None for expert in range(len(shrinkages))),
        down_shrinkages=shrinkages,
        fitted=OutputErrors(0.0009 * (number - 1), 0.0035 * number, 0.000333 * number),
        held_out=OutputErrors(0.001 * (number - 1), 0.0034567 * number, 0.0012345 * number),
    )


LAYERS = {
    1: feedback_layer(1, shrinkages=(0.5, 0.1, 0.5, None)),
    2: feedback_layer(2, shrinkages=(0.5, 0.5, 0.5, 0.5)),
    3: feedback_layer(3, shrinkages=(None,) * 4),
}


HELD_OUT = {number: layer.held_out for number, layer in LAYERS.items() if layer.held_out is not None}


def with_feedback(found: CalibrationRecord) -> CalibrationRecord:
    few = LayerCalibration((70, 65, 90, 2), (3,), {})
    layers = {number: replace(few, feedback=layer) for number, layer in LAYERS.items()}
    return replace(found, feedback=True, held_out_windows=1, layers=layers)


@pytest.fixture(scope="module")
def fed_back(calibrated: ReportFiles, tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    """A report on the same result, with a ledger of rule feedback."""
    folder = calibrated.page.parent.parent / "out"
    out = tmp_path_factory.mktemp("fed-back")
    ledger = read_ledger(folder)
    assert ledger.calibration is not None
    changed = replace(ledger, calibration=with_feedback(ledger.calibration))
    shutil.copytree(folder, out, dirs_exist_ok=True)
    (out / "k2convert.json").write_bytes(changed.to_bytes())
    return write_report(folder=out, out=out / "report")


def test_page_and_markdown_have_the_figures_of_feedback(fed_back: ReportFiles) -> None:
    page, text = fed_back.page.read_text(), fed_back.markdown.read_text().replace("\\", "")
    assert "### Rule feedback" in text
    assert "<h2>Rule feedback, layer by layer</h2>" in page
    for found in (page, text):
        assert "Rule feedback converted the layers in order." in found
        assert "2 of 3 layers corrected gate and up for errors of earlier layers. 6 of 12 experts corrected" in found
        assert "gate and up of 1 of 3 layers, down of 5 of 12 experts" in found
        assert "smaller than with rule optimal in 3 of 3 layers" in found
        assert "its errors of weights are larger than those of rule optimal" in found
    assert "| 1 | 0.00123 | 0.00346 | 0 | none |  | 0.5 | 0 of 4 | 0.1: 1, 0.5: 2 | 3 |" in text
    assert "| 3 | 0.0037 | 0.0104 | 0.002 | 0.15 | 41.2 % | no feedback | 3 of 4 | none | 0, 1, 2, 3 |" in text
    for cell in ("0.00123", "41.2 %", "no feedback", "0.1: 1, 0.5: 2", "0, 1, 2, 3"):
        assert f">{cell}</td>" in page


def test_charts_of_feedback_can_be_read_out(fed_back: ReportFiles, calibrated: ReportFiles) -> None:
    page, before = fed_back.page.read_text(), calibrated.page.read_text()
    for label in ("Error of the hidden states after each layer", "Experts of each layer by shrinkage"):
        assert page.count(f'role="img" aria-label="{label}"') == 2  # wide and narrow
        assert label not in before
    charts = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    (wide, narrow) = (chart for chart in charts if "hidden states after each layer" in chart[:200])
    for chart in (wide, narrow):
        for name in ("with rule optimal in the layer", "this: feedback", "from earlier layers alone"):
            assert f">{name}<" in chart
        for color in ("optimal", "ours", "muted"):
            assert f"var(--{color})" in chart
    assert "Rule feedback" not in before
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_picture_has_the_errors_of_feedback(fed_back: ReportFiles, calibrated: ReportFiles) -> None:
    assert fed_back.picture is not None
    assert calibrated.picture is not None
    with Image.open(fed_back.picture) as ours, Image.open(calibrated.picture) as before:
        assert ours.width == before.width
        assert ours.height > before.height + 300


def test_json_has_every_expert_of_feedback(fed_back: ReportFiles, calibrated: ReportFiles) -> None:
    document = json.loads(json.dumps(figures_document(fed_back.report)))
    found = document["calibration"]["feedback"]
    assert found["1"]["down_shrinkages"] == [0.5, 0.1, 0.5, None]
    assert FeedbackLayer.from_dict(found["3"]) == LAYERS[3]
    assert "feedback" not in figures_document(calibrated.report)["calibration"]


def test_the_card_has_the_error_of_the_last_layer(fed_back: ReportFiles) -> None:
    folder = fed_back.page.parent.parent
    validation = validate_checkpoint(folder=folder, source=None)
    files = card_files(
        folder, repo="me/out", base_model=None, source=read_source_card(""), validation=validation, tensors=()
    )
    card = files["README.md"].decode()
    for program in ("vllm serve me/out", "sglang.launch_server --model-path me/out", "trtllm-serve me/out"):
        assert program in card
    assert "relative squared error of **0.0037**, on 1 of 5 windows that were kept out of the fit." in card
    assert "they would have 0.0104." in card
    assert "after 3 of 3 MoE layers." in card
    assert "In 5 of 12 experts, down was rounded without feedback" in card
    assert "0.000999" not in card, "the error on the windows that were fitted to"


def test_calibrated_results_lead_with_what_they_make_small(calibrated: ReportFiles, fed_back: ReportFiles) -> None:
    weighted, outputs = headline(calibrated.report, None), headline(fed_back.report, None)
    assert [tile.label for tile in weighted[:2]] == ["weighted SQNR", "SQNR"]
    assert (outputs[0].value, outputs[0].label) == ("0.0037", "error of the outputs")
    assert outputs[0].detail == (
        "after the last MoE layer, on 1 of 5 windows that were kept out of the fit; 0.0104 by rule optimal there"
    )
    assert "SQNR of its weights is expected to be a little lower" in calibrated.page.read_text()
    assert "0.000999" not in fed_back.page.read_text()


def test_without_a_held_out_figure_none_is_shown(calibrated: ReportFiles, tmp_path: Path) -> None:
    folder = calibrated.page.parent.parent / "out"
    ledger = read_ledger(folder)
    assert ledger.calibration is not None
    found = with_feedback(ledger.calibration)
    layers = {n: replace(found.layers[n], feedback=replace(LAYERS[n], held_out=None)) for n in LAYERS}
    found = replace(found, windows=1, held_out_windows=0, layers=layers)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "k2convert.json").write_bytes(replace(ledger, calibration=found).to_bytes())
    files = write_report(folder=tmp_path, out=tmp_path / "report")
    page = files.page.read_text()
    assert "The error of the outputs: no held-out figure: only one window." in page
    assert "Error of the hidden states after each layer" not in page
    assert "Experts of each layer by shrinkage" in page
    assert "| 1 | not measured |  |  |" in files.markdown.read_text()


def test_the_report_warns_of_layers_that_are_worse_than_rule_optimal() -> None:
    worse = replace(LAYERS[2], held_out=OutputErrors(0.0, 0.001, 0.002))
    kept = record(tokens=(70, 65, 90, 2))
    layer = replace(kept.layers[1], feedback=worse)
    found = replace(kept, feedback=True, held_out_windows=1, layers={2: layer})
    assert feedback.sentences(found)[-1].startswith("Warning: In 1 of 1 layers, the error of the outputs is larger")


def test_feedback_for_everyone_is_one_sentence_less() -> None:
    kept = record(tokens=(70, 65, 90, 2))
    assert feedback.sentences(kept) == ()
    assert feedback.layer_rows(kept) == []
    layer = replace(kept.layers[1], feedback=LAYERS[2])
    words = " ".join(feedback.sentences(replace(kept, feedback=True, layers={2: layer})))
    assert "without feedback" not in words
    many = replace(LAYERS[3], down_shrinkages=(None,) * 20, down_ridges=(None,) * 20)
    (row,) = feedback.layer_rows(replace(kept, feedback=True, layers={3: replace(layer, feedback=many)}))
    assert row[-1].endswith("10, 11 and 8 more")


@pytest.mark.parametrize("is_narrow", [True, False])
def test_every_error_and_every_expert_is_in_the_charts(is_narrow: bool) -> None:
    lines = {
        line.get_label(): line for line in draw_layer_errors(HELD_OUT, palette=LIGHT, is_narrow=is_narrow).axes[0].lines
    }
    assert len(lines) == 3
    for label, key in (("this: feedback", "feedback_error"), ("with rule optimal in the layer", "optimal_error")):
        assert list(lines[label].get_xdata()) == [1, 2, 3]
        assert list(lines[label].get_ydata()) == [getattr(errors, key) for errors in HELD_OUT.values()]
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines.values()}) == 3  # not by color alone
    inherited = list(lines["from earlier layers alone"].get_ydata())
    assert math.isnan(inherited[0])
    assert inherited[1:] == [0.001, 0.002]
    bars = draw_shrinkages(LAYERS, palette=LIGHT, is_narrow=is_narrow).axes[0].containers
    heights = {bar.get_label(): [patch.get_height() for patch in bar] for bar in bars}
    assert heights == {"0.1": [1, 0, 0], "0.5": [2, 4, 0], "no feedback": [1, 0, 4]}
