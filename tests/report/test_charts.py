"""The four charts: every figure is in them, and those of K2 and K3 are small."""

import base64
import math
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from evaluation_makers import evaluation_of
from PIL import Image
from report_makers import TOKENS

from k2convert.records.ledger import read_ledger
from k2convert.report import ReportFiles
from k2convert.report.charts import (
    Drawing,
    Line,
    Picture,
    color_scale,
    draw_heat_maps,
    draw_positions,
    draw_tokens,
    ticks,
    to_svg,
)
from k2convert.report.content import mode_rows
from k2convert.report.figures import HeatMap, collect_report, heat_maps
from k2convert.report.render import render_report


def curves(drawing: Drawing) -> list[Line]:
    """The lines of figures: those of the grid have other colors, those of the legend are left of the plot."""
    lines = [s for s in drawing.shapes if isinstance(s, Line) and s.color not in ("line", "muted")]
    return [line for line in lines if line.points[0][0] > 10]


def test_a_report_has_the_charts_of_what_was_measured(reported: ReportFiles, evaluated: ReportFiles) -> None:
    first = ["Error by layer and expert", "SQNR of the tensors"]
    for files, labels in (
        (reported, first),
        (evaluated, [*first, "KL by position in the window", "Tokens per expert"]),
    ):
        assert re.findall(r'<svg role="img" aria-label="([^"]*)"', files.page.read_text()) == labels


def test_heat_maps_have_a_pixel_for_every_tensor(reported: ReportFiles) -> None:
    maps = reported.report.maps
    drawing = draw_heat_maps(maps)
    pictures = [shape for shape in drawing.shapes if isinstance(shape, Picture)][1:]  # the first is the color scale
    low, high = color_scale(maps)
    for heat_map, picture in zip(maps, pictures, strict=True):
        assert np.array_equal(picture.cells, np.rint(127 * (heat_map.values - low) / (high - low)))
    images = re.findall(r'href="data:image/png;base64,([^"]*)"', to_svg(drawing))
    shown = Image.open(BytesIO(base64.b64decode(images[1]))).convert("RGB")
    assert shown.size == maps[0].values.shape[::-1]
    darkest = np.unravel_index(maps[0].values.argmin(), maps[0].values.shape)
    assert np.asarray(shown).sum(axis=2)[darkest] == np.asarray(shown).sum(axis=2).min()


def test_exact_and_absent_tensors_differ_in_the_map() -> None:
    heat_map = HeatMap("gate", (1,), np.array([[math.inf, math.nan, 20.0, 22.0]]))
    cells = next(s.cells for s in reversed(draw_heat_maps((heat_map,)).shapes) if isinstance(s, Picture))
    assert cells.tolist() == [[127, 128, 0, 127]]
    images = re.findall(r'href="data:image/png;base64,([^"]*)"', to_svg(draw_heat_maps((heat_map,))))
    alpha = np.asarray(Image.open(BytesIO(base64.b64decode(images[1]))).convert("RGBA"))[0, :, 3]
    assert alpha.tolist() == [255, 0, 255, 255]


def test_one_outlier_does_not_hide_the_rest_of_the_map() -> None:
    values = 22.6 + 0.05 * np.random.default_rng(0).standard_normal((60, 384))
    values[3, 7] = 5.0
    low, high = color_scale((HeatMap("gate", tuple(range(60)), values),))
    assert 22.4 < low < high < 22.8


@pytest.mark.parametrize("tokens", [(0, 0), (63, 64), (5, 100_000, 3_000_000), TOKENS])
def test_every_expert_is_in_the_chart_of_tokens(tokens: tuple[int, ...]) -> None:
    (outline,) = curves(draw_tokens(tokens))
    floor = outline.points[0][1]
    heights = [floor - y for _, y in outline.points[1:-1:2]]
    peak = max(heights)
    tallest = max(np.histogram(np.log2(np.maximum(tokens, 0.5)), np.arange(-1, 23, 0.25))[0])
    assert sum(heights) / peak * tallest == pytest.approx(len(tokens))


def test_kl_by_position_has_every_figure_and_modes_differ_by_more_than_color(local_result: Path) -> None:
    rows = mode_rows(evaluation_of(local_result), read_ledger(local_result).recipe)
    drawn = curves(draw_positions(rows))
    assert len({line.width for line in drawn}) == len(rows) == 2
    means = [[part.mean for part in row.figures.divergence.by_position] for _, row in rows]
    floor = next(s for s in draw_positions(rows).shapes if isinstance(s, Line) and s.color == "line").points[0][1]
    heights = [[floor - y for _, y in line.points] for line in drawn]
    scale = heights[0][0] / means[0][0]
    for shown, mean in zip(heights, means, strict=True):
        assert shown == pytest.approx([scale * value for value in mean])


@pytest.mark.parametrize(("low", "high"), [(0, 1), (19.66, 22.7), (0, 1e-9), (0, 1e6), (-3, 7)])
def test_ticks_are_round_and_few(low: float, high: float) -> None:
    values = ticks(low, high, 5)
    assert 2 <= len(values) <= 6
    assert low - 1e-9 <= values[0] < values[-1] <= high * (1 + 1e-9)
    assert all(float(f"{value:.2g}") == pytest.approx(value) for value in np.diff(values))


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "experts"), [(60, 384), (92, 896)], ids=["K2", "K3"])
def test_a_whole_model_is_reported_in_less_than_a_megabyte(local_result: Path, layers: int, experts: int) -> None:
    report = collect_report(folder=local_result)
    noise = np.random.default_rng(0).normal(0, 0.02, (layers, experts, 3))
    tensors = tuple(
        replace(
            report.tensors[0],
            module=f"model.layers.{layer + 1}.mlp.experts.{expert}.{projection}_proj",
            layer=layer + 1,
            expert=expert,
            projection=projection,
            sqnr_db=float(22.6 + 0.05 * np.sin(layer / 9) + noise[layer, expert, i]),
        )
        for layer in range(layers)
        for expert in range(experts)
        for i, projection in enumerate(("gate", "up", "down"))
    )
    maps = heat_maps(tensors)
    assert [heat_map.values.shape for heat_map in maps] == [(layers, experts)] * 3
    files = render_report(replace(report, tensors=tensors, maps=maps))
    assert max(len(data) for data in files.values()) < 1_000_000
    assert len(files["report.md"]) < 20_000
