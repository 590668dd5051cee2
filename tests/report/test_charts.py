"""The four charts: every figure is in them, and those of K2 and K3 are small."""

import base64
import json
import math
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_makers import evaluation_of
from PIL import Image
from report_makers import TOKENS

from k2convert.records.document import seal
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.ledger import read_ledger
from k2convert.report import ReportFiles, write_report
from k2convert.report.charts import color_scale, draw_heat_maps, draw_positions, draw_tokens, ticks
from k2convert.report.content import mode_rows
from k2convert.report.drawing import Drawing, Line, Picture, to_svg
from k2convert.report.figures import HeatMap

NUM_WEIGHTS = 2048 * 7168
NUM_BLOCKS = NUM_WEIGHTS // 16


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
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 6
    assert low - 1e-9 <= found[0] < found[-1] <= high * (1 + 1e-9)
    assert all(float(f"{value:.2g}") == pytest.approx(value) for value in np.diff(found))


def metrics(random: np.random.Generator, shape: list[int], layer: int) -> dict[str, Any]:
    """A tensor as the conversion would have measured it, with a few that came out badly."""
    sqnr = 22.6 + 0.05 * np.sin(layer / 9) + random.normal(0, 0.02) - 2.0 * (random.random() < 0.0005)
    error = 14680.0 / 10 ** (sqnr / 10)
    return {
        "num_weights": NUM_WEIGHTS, "num_blocks": NUM_BLOCKS, "energy": 14680.0, "squared_error": error,
        "num_nonzero": NUM_WEIGHTS * 7 // 8, "equal_nonzero": NUM_WEIGHTS // 64, "equal_blocks": NUM_BLOCKS // 100,
        "num_codes": NUM_WEIGHTS, "max_error_steps": 1.1, "recoverable_codes": NUM_WEIGHTS * 19 // 20,
        "num_five_or_seven": NUM_WEIGHTS // 9, "num_minus_eight": 0, "blocks_outside_normal": 0,
        "scale_spread_exceeded": 0, "min_scale_byte": 80, "max_scale_byte": 79 + len(shape),
        "scale_histogram": {str(80 + i): count for i, count in enumerate(shape)}, "sampled_blocks": NUM_BLOCKS // 64,
        "sampled_error_achieved": error / 64, "sampled_error_max": error / 32,
    }  # fmt: skip


def synthetic_records(result: Path, folder: Path, *, layers: int, experts: int) -> Path:
    """The journal of a conversion of a whole model."""
    job = json.loads((result / ".k2convert/job.json").read_text())
    digest = fingerprint_digest(job["fingerprint"])
    random = np.random.default_rng(0)
    weights = np.exp(-(((np.arange(46) - 32) / 6.0) ** 2))
    shape = (weights / weights.sum() * NUM_BLOCKS).astype(int).tolist()
    (folder / ".k2convert/shards").mkdir(parents=True)
    shards: dict[str, int] = {}
    for layer in range(1, layers + 1):
        name = f"model-{layer:05d}-of-{layers:06d}.safetensors"
        shards[name] = 9_800_000_000
        projections = [
            {
                "module": f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj",
                "role": "experts",
                "global_scale": 2.0**-12,
                "metrics": metrics(random, shape, layer),
            }
            for expert in range(experts)
            for projection in ("gate", "up", "down")
        ]
        record = {
            "shard": name, "fingerprint": digest, "blake3": "0", "file_bytes": shards[name], "num_tensors": 4617,
            "source_headers": {}, "projections": projections,
        }  # fmt: skip
        (folder / f".k2convert/shards/{name}.json").write_bytes(seal(record))
    (folder / ".k2convert/job.json").write_text(json.dumps(job | {"shards": shards}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "experts"), [(60, 384), (92, 896)], ids=["K2", "K3"])
def test_a_whole_model_is_reported_in_less_than_a_megabyte(
    local_result: Path, tmp_path: Path, layers: int, experts: int
) -> None:
    folder = synthetic_records(local_result, tmp_path / "whole", layers=layers, experts=experts)
    files = write_report(folder=folder, out=tmp_path / "out")
    assert [heat_map.values.shape for heat_map in files.report.maps] == [(layers, experts)] * 3
    assert len(files.report.tensors) == 3 * layers * experts
    assert files.page.stat().st_size < 1_000_000
    assert files.picture.stat().st_size < 1_000_000
    assert files.markdown.stat().st_size < 20_000
