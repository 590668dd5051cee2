"""Evaluations in page, Markdown, card, picture and --json: the same figures, whatever a document holds."""

import html
import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_makers import evaluation_of, of_servers, token_scores, write_evaluation
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.hub.source_card import SourceCard
from k2convert.records.evaluation import HISTOGRAM_EDGES, Evaluation
from k2convert.records.ledger import read_ledger
from k2convert.report import ReportFiles, card_files, write_report
from k2convert.report.charts import draw_divergences, draw_layers, draw_positions
from k2convert.report.content import figures_document, headline
from k2convert.report.drawing import LIGHT
from k2convert.report.evaluated import mode_rows
from k2convert.report.wording import joined, with_error
from scripts.fixture_maker.damage import edit_json

CHARTS = ("Histogram of KL over the tokens", "KL by position in the window")
DRAW_LAYERS = (partial(draw_layers, is_routing=False), partial(draw_layers, is_routing=True))
LAYER_CHARTS = ("Relative error after each layer", "Share of the same experts by layer")


@pytest.fixture(scope="module")
def shown(
    local_result: Path, validation: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Evaluation, Path, ReportFiles]:
    """The conversion with an evaluation, and a report on it."""
    folder = Path(shutil.copytree(local_result, tmp_path_factory.mktemp("evaluated") / "out"))
    found = evaluation_of(folder)
    write_evaluation(folder, found)
    tensors = open_checkpoint(folder).tensors.values()
    return found, folder, write_report(folder=folder, out=folder.parent, validation=validation, tensors=tensors)


def as_read(text: str) -> str:
    """Text as it is read: without the escapes of HTML and Markdown, in one line."""
    return " ".join(html.unescape(re.sub(r"\\(?=[^\w\s])", "", text)).split())


def model_card(folder: Path) -> str:
    validation = validate_checkpoint(folder=folder, source=None)
    files = card_files(
        folder, repo="me/K2", base_model="moon/K2", source=SourceCard(), validation=validation, tensors=()
    )
    return files["README.md"].decode()


@pytest.mark.quick(1)
def test_page_markdown_card_and_json_have_the_same_figures(shown: tuple[Evaluation, Path, ReportFiles]) -> None:
    found, folder, files = shown
    page = files.page.read_text()
    markdown = files.markdown.read_text()
    for text in map(as_read, (page, markdown, model_card(folder))):
        assert "Measured on 1,542 tokens of emma.txt (6 windows of 257) against hf://moon/K2: KL " in text
        for row in found.rows:
            figures = row.figures
            for figure in (figures.divergence, figures.log_likelihood):
                assert with_error(figure.mean, figure.standard_error) in text
            for value in (figures.divergence.median, figures.divergence.p99, figures.divergence.p999):
                assert f"{value:.3g}" in text
            assert f"{100 * figures.top1_agreement:.2f} %" in text
            assert f"{figures.perplexity:.6g}" in text
        assert "/home/someone" not in text
    for text in map(as_read, (page, markdown)):
        assert "Hidden states after each layer" in text
        assert "␣the" in text
    for row in found.rows:
        for number, layer in enumerate(row.layers):
            assert f"| {layer.relative_error:.3g} |" in markdown
            assert number == 0 or f"{100 * (layer.routing_agreement or 0):.2f} %" in markdown
    assert all(f'aria-label="{label}"' in page for label in CHARTS + LAYER_CHARTS)
    assert figures_document(files.report)["evaluation"] == json.loads((folder / "evaluation.json").read_text())


def test_figures_are_those_of_the_tokens(shown: tuple[Evaluation, Path, ReportFiles]) -> None:
    """Computed again from the scores, in other words than the package's."""
    _, _, files = shown
    scores = token_scores(0.35)
    windows = scores.divergence.mean(axis=1)
    error = np.sqrt(((windows - windows.mean()) ** 2).sum() / (len(windows) - 1) / len(windows))
    tile = headline(files.report, None)[0]
    assert tile.value == f"{scores.divergence.mean():.3g}"
    assert f"± {error:.2g}, " in tile.detail
    text = as_read(files.markdown.read_text())
    assert f"| {np.exp(scores.loss.mean()):.6g} |" in text
    assert f"{(scores.reference_loss - scores.loss).mean():.4f} ± " in text


@pytest.mark.parametrize("declared", ["w4a4", "w4a16"])
@pytest.mark.usefixtures("quick_pictures")
def test_the_mode_that_the_result_declares_comes_first(records_only: Path, declared: str) -> None:
    found = evaluation_of(records_only)
    edit_json(records_only / "k2convert.json", lambda ledger: ledger["recipe"].update(activations=declared))
    fp8 = replace(found.rows[0], model=replace(found.rows[0].model, kv_cache="fp8"))
    write_evaluation(records_only, replace(found, rows=(fp8, *found.rows)))
    files = write_report(folder=records_only)
    (row,) = (row for row in found.rows if row.model.activations == declared)
    tile = headline(files.report, None)[0]
    assert (tile.value, tile.label) == (f"{row.figures.divergence.mean:.3g}", "KL divergence")
    assert f"of the next token, {declared.upper()}, from hf://moon/K2" in tile.detail
    assert f"|  | {declared.upper()} | W4A" in files.markdown.read_text()
    assert "W4A16, FP8 KV cache" in files.markdown.read_text()


def test_charts_have_every_figure(local_result: Path) -> None:
    rows = mode_rows(evaluation_of(local_result), read_ledger(local_result).recipe)
    assert [mode for mode, _ in rows] == ["W4A4", "W4A16"]
    errors, routing, positions = (
        {line.get_label(): line for line in draw(rows, LIGHT).axes[0].lines} for draw in (*DRAW_LAYERS, draw_positions)
    )
    for mode, row in rows:
        assert list(errors[mode].get_ydata()) == [layer.relative_error for layer in row.layers]
        assert list(errors[mode].get_xdata()) == list(range(len(row.layers)))
        shares = list(routing[mode].get_ydata())
        assert np.isnan(shares[0])
        assert shares[1:] == [100 * (layer.routing_agreement or 0) for layer in row.layers[1:]]
        assert list(positions[mode].get_ydata()) == [part.mean for part in row.figures.divergence.by_position]
    assert len({(line.get_marker(), line.get_linestyle()) for line in errors.values()}) == 2  # not by color alone
    areas = [patch.get_data() for patch in draw_divergences(rows, LIGHT).axes[0].patches]  # type: ignore[attr-defined]
    for (_, row), (shares, edges, _) in zip(rows, areas[::2], strict=True):
        counts = np.array(row.figures.divergence.histogram)
        assert np.allclose(shares, 100 * counts / counts.sum())
        assert np.allclose(10 ** edges[1:-1], HISTOGRAM_EDGES)


def test_titles_of_axes_are_whole_and_beside_the_numbers(local_result: Path) -> None:
    rows = mode_rows(evaluation_of(local_result), read_ledger(local_result).recipe)
    for draw in (draw_divergences, draw_positions, *DRAW_LAYERS):
        figure = draw(rows, LIGHT)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        axis = figure.axes[0].yaxis
        title = axis.label.get_window_extent()
        numbers = [label.get_window_extent().x0 for label in axis.get_ticklabels() if label.get_text()]
        assert 0 <= title.x0 < title.x1 <= min(numbers), draw


def test_the_picture_has_the_distribution(shown: tuple[Evaluation, Path, ReportFiles], reported: ReportFiles) -> None:
    assert shown[2].picture is not None
    assert reported.picture is not None
    with Image.open(shown[2].picture) as ours, Image.open(reported.picture) as other:
        assert ours.width == other.width
        assert ours.height > other.height + 100


@pytest.mark.usefixtures("quick_pictures")
def test_an_evaluation_of_servers_is_not_shown(records_only: Path) -> None:
    write_evaluation(records_only, of_servers())
    assert "evaluation" not in figures_document(write_report(folder=records_only).report)


def test_without_an_evaluation_nothing_is_said_of_one(reported: ReportFiles) -> None:
    for path in (reported.page, reported.markdown):
        assert "valuation of the whole" not in path.read_text()
    assert "evaluation" not in figures_document(reported.report)


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    write_evaluation(folder, evaluation_of(folder))
    edit_json(folder / "evaluation.json", change)
    return folder


def numbers(document: Any, value: float) -> Any:
    """The document with another value for every number of the figures."""
    if isinstance(document, dict):
        return {key: part if "share" in key else numbers(part, value) for key, part in document.items()}
    if isinstance(document, list):
        return [numbers(part, value) for part in document]
    return value if isinstance(document, float) else document


HUGE = (1e308, 0.0, 1e-308, 123456789.125)


@pytest.mark.slow
@pytest.mark.parametrize("value", HUGE)
def test_absurd_numbers_are_shown(records_only: Path, value: float) -> None:
    def change(document: dict[str, Any]) -> None:
        for row in document["rows"]:
            shares = {key: row["figures"][key] for key in ("top1_agreement", "left_top5")}
            row["figures"] = numbers(row["figures"], value) | shares
            row["figures"]["divergence"]["histogram"] = [0] * 37 + [(1 << 63) - 1]
            row["figures"]["divergence"]["by_position"] = [
                {"first": (1 << 62), "stop": 3, "mean": value},
                {"first": 0, "stop": 0, "mean": value},
            ]
            row["layers"] = [{"relative_error": value, "routing_agreement": None}] * 1000
            row["worst"] = [one | {"divergence": value, "window": 1 << 62} for one in row["worst"]]
        document["text"] |= {"tokens": (1 << 63) - 1, "windows": 0, "window": 1 << 60, "dropped": 1 << 61}

    folder = edited(records_only, change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = write_report(folder=folder)
    text = files.markdown.read_text()
    assert f"{value:.3g}" in text
    assert files.report.evaluation is not None
    assert files.page.stat().st_size < 2_000_000
    assert not re.search(r"\bnan\b", text + files.page.read_text())


HOSTILE = (
    "</td></table><script>alert(1)</script><img src=x onerror=alert(2)>"
    "|`$\\frac{1}{0}$`{{ 7*7 }}\x1b[2J\u202e\u2028\n# x"
)


def test_hostile_names_and_tokens_are_shown_and_do_nothing(records_only: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["reference"]["name"] = f"hf://{HOSTILE}"
        document["text"]["texts"] = [[HOSTILE, "0" * 64]] * 1000
        for row in document["rows"]:
            row["model"]["name"] = HOSTILE
            token = dict.fromkeys(("before", "token", "reference_token", "model_token"), HOSTILE)
            row["worst"] = [one | token for one in row["worst"]]

    files = write_report(folder=edited(records_only, change))
    page = files.page.read_text()
    markdown = files.markdown.read_text()
    assert page.count("<script") == 2
    assert "<img" not in page
    assert "\\x1b[2J" in html.unescape(page)
    assert "and 988 more" in page
    for text in (page, markdown):
        assert not {"\x1b", "\u202e", "\u2028"} & set(text)
    assert not re.search(r"(?<!\\)<(?!/?br)", markdown)
    assert "\n# x" not in markdown
    blocks = [block.splitlines() for block in markdown.split("\n\n") if block.startswith("|")]
    for rows in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


@pytest.mark.usefixtures("quick_pictures")
def test_a_long_token_is_cut(records_only: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        for row in document["rows"]:
            row["worst"] = [one | {"before": "abc " * 1000, "token": " " * 9000} for one in row["worst"]]

    text = write_report(folder=edited(records_only, change)).markdown.read_text()
    assert f"| …{('abc ' * 1000)[-60:]} | {'␣' * 40}… |" in text


@pytest.mark.usefixtures("quick_pictures")
def test_a_stale_or_damaged_evaluation_is_not_shown(records_only: Path) -> None:
    def other(document: dict[str, Any]) -> None:
        document["rows"][1]["model"]["weights"] = "0" * 64

    for change, words in (
        (other, "measures other weights than this result has. Delete the file, or run"),
        (lambda document: document.pop("rows"), "rows is missing. Delete the file, or run"),
    ):
        files = write_report(folder=edited(records_only, change))
        assert files.report.evaluation is None
        for path in (files.page, files.markdown):
            text = path.read_text()
            assert "valuation of the whole" not in text
            assert f"evaluation.json is not shown: {words}" in text
            assert str(records_only.parent) not in text
        assert "evaluation" not in figures_document(files.report)


@pytest.mark.parametrize(("count", "shown"), [(0, ""), (1, "a"), (2, "a and b"), (3, "a, b and c")])
def test_names_are_listed_in_words(count: int, shown: str) -> None:
    assert joined(["a", "b", "c"][:count]) == shown


@pytest.mark.parametrize(
    ("mean", "error", "shown"),
    [
        (0.0123, 0.00041, "0.01230 ± 0.00041"),
        (0.0123, None, "0.0123"),
        (0.0, 0.0, "0"),
        (-1.5, 12.0, "-2 ± 12"),
        (1e300, 1e-3, "1e+300 ± 0.001"),
        (1.0, 1e-300, "1 ± 1e-300"),
    ],
)
def test_an_error_has_two_digits(mean: float, error: float | None, shown: str) -> None:
    assert with_error(mean, error) == shown
