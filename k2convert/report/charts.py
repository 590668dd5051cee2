"""The four charts: SQNR of the tensors, error by layer and expert, KL by position in the window, tokens per expert.

The heat map shows gate, up and down on one color scale: layers are rows, experts are columns. Each is an image of one
pixel per cell, which the browser fits to the screen: the 69,120 cells of K2 need about 60 kB, those of K3 200 kB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.errors import counted
from k2convert.records.evaluation import EvaluationRow
from k2convert.report.drawing import EMPTY, SHADES, SIZE, WIDTH, Area, Color, Drawing, Line, Picture, Point, Words
from k2convert.report.evaluated import mode_rows, tokens_by_expert
from k2convert.report.figures import HeatMap, Report
from k2convert.report.wording import ChartName, short_count

_LEFT: Final = 44.0  # of a plot: room for the numbers of the vertical axis
_RIGHT: Final = 16.0
_BELOW: Final = 36.0  # a plot: numbers and title of the horizontal axis
_ROW: Final = 17.0  # between lines of words
_TAIL_DB: Final = 0.5
_LARGEST_DRAWN: Final = 1e6  # of a divergence; a damaged document may state any
_MODE_STYLES: Final[tuple[tuple[Color, tuple[float, ...]], ...]] = (
    ("ours", ()), ("max", (7, 3)), ("third", (2, 3)), ("fourth", (10, 6)),
)  # fmt: skip
"""Color and dashes of each mode: no more modes are drawn."""

MIN_SPAN_DB: Final = 0.2  # of a color scale; a narrower one would show noise as differences


def draw_charts(report: Report) -> dict[ChartName, Drawing]:
    """Return the charts of which the figures are known, by name."""
    charts: dict[ChartName, Drawing] = {}
    if report.maps:
        charts["heat_map"] = draw_heat_maps(report.maps)
    if any(math.isfinite(tensor.sqnr_db) for tensor in report.tensors):
        charts["tensors"] = draw_tensors(report)
    if report.evaluation is not None:
        charts["positions"] = draw_positions(mode_rows(report.evaluation, report.ledger.recipe))
    if (record := report.ledger.calibration) is not None and (tokens := tokens_by_expert(record)):
        charts["tokens"] = draw_tokens(tokens)
    return charts


class Plot:
    """The axes of a chart: from data to the sheet, with numbers and titles. The vertical axis begins at 0."""

    def __init__(self, drawing: Drawing, *, top: float, x: tuple[float, float], y_max: float) -> None:
        self.drawing = drawing
        self.top = top + _ROW  # under the title of the vertical axis
        self.bottom = drawing.height - _BELOW
        self.x_range = x
        self.y_max = y_max or 1.0

    def x(self, value: float) -> float:
        """Return the horizontal place of a value."""
        low, high = self.x_range
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """Return the vertical place of a value."""
        return self.bottom - (self.bottom - self.top) * value / self.y_max

    def label(self, *, x: str, y: str, x_ticks: dict[float, str], whole: bool = False) -> None:
        """Draw numbers, grid and titles of both axes."""
        end = WIDTH - _RIGHT
        for value in ticks(0.0, self.y_max, 4, whole=whole):
            level = self.y(value)
            self.drawing.add(Line([(_LEFT, level), (end, level)], "line"))
            self.drawing.add(Words(_LEFT - 5, level + 4, short_count(value), anchor="end"))
        for value, text in x_ticks.items():
            place = self.x(value)
            self.drawing.add(Line([(place, self.bottom), (place, self.bottom + 4)], "muted"))
            self.drawing.add(Words(place, self.bottom + 16, text, anchor="middle"))
        self.drawing.add(Words((_LEFT + end) / 2, self.bottom + 32, x, anchor="middle"))
        self.drawing.add(Words(4, self.top - 8, y))

    def histogram(self, counts: NDArray[np.int64], edges: NDArray[np.float64], color: Color) -> None:
        """Draw the counts between edges as a filled outline."""
        outline: list[Point] = [(self.x(edges[0]), self.y(0.0))]
        for count, begin, end in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            outline += [(self.x(begin), self.y(count)), (self.x(end), self.y(count))]
        outline.append((self.x(edges[-1]), self.y(0.0)))
        self.drawing.add(Area(outline, color), Line(outline, color, 1.3))


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most about `most` + 1 round numbers in a range, or whole ones."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * rough)
    step = max(step, 1.0) if whole else step
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _edges(low: float, high: float, bins: int) -> NDArray[np.float64]:
    return np.linspace(low, high, bins + 1)


def _powers(low: int, high: int) -> dict[float, str]:
    """Return "512", "4k" or "1M" for some exponents of two in a range, and "0" below 1."""
    units = {power: min(power // 10, 2) for power in range(low, high + 1, 1 + (high - low) // 9)}
    return {
        float(power): f"{2 ** (power - 10 * unit):,}{('', 'k', 'M')[unit]}" if power >= 0 else "0"
        for power, unit in units.items()
    }


def draw_tensors(report: Report) -> Drawing:
    """Draw histograms of the tensors' SQNR: of rule `max`, if that is another rule, and of this conversion."""
    of_max = [] if report.rule == "max" else [t.sqnr_max_db for t in report.tensors]
    series: list[tuple[str, NDArray[np.float64], Color]] = []
    known: tuple[tuple[str, Sequence[float | None], Color], ...] = (
        ("max", of_max, "max"),
        (f"this: {report.rule}", [t.sqnr_db for t in report.tensors], "ours"),
    )
    for label, values, color in known:
        if finite := [value for value in values if value is not None and math.isfinite(value)]:
            series.append((label, np.array(finite), color))
    drawing = Drawing("Histogram of SQNR over the tensors", 230 + _ROW * len(series))
    everything = np.concatenate([values for _, values, _ in series])
    # A few broken tensors must not squeeze the rest: they are counted in the first bin, and the label says how many.
    low = max(float(everything.min()), min(float(np.percentile(v, 1)) for _, v, _ in series) - _TAIL_DB)
    high = float(everything.max())
    pad = 0.03 * max(high - low, 0.2)
    edges = _edges(low - pad, high + pad, 80)
    counts = [np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] for _, values, _ in series]
    plot = Plot(drawing, top=_ROW * len(series) + 4, x=(edges[0], edges[-1]), y_max=1.08 * max(c.max() for c in counts))
    beyond = sum(int((values < low).sum()) for _, values, _ in series)
    note = f"; {counted(beyond, 'value')} left of the chart" if beyond else ": further right is less error"
    numbers = ticks(edges[0], edges[-1], 6)
    plot.label(x=f"SQNR in dB{note}", y="tensors", x_ticks={v: f"{v:.6g}" for v in numbers}, whole=True)
    for i, (label, values, color) in enumerate(series):
        plot.histogram(counts[i], edges, color)
        drawing.add(Words(4, _ROW * i + SIZE, f"{label}, median {np.median(values):.2f} dB", color))
    return drawing


def draw_tokens(tokens: Sequence[int]) -> Drawing:
    """Draw the number of experts by the tokens that the calibration routed to them, four columns per doubling."""
    drawing = Drawing("Histogram of tokens by expert", 230)
    counts = np.array(tokens, dtype=np.float64)
    logs = np.where(counts > 0, np.log2(np.maximum(counts, 1)), -1.0)  # experts without tokens are left of 1
    low = math.floor(logs.min())
    high = max(math.floor(logs.max()) + 1, low + 2)
    edges = _edges(low, high, 4 * (high - low))
    experts = np.histogram(logs, edges)[0]
    plot = Plot(drawing, top=0.0, x=(low, high), y_max=1.08 * experts.max())
    title = "tokens that the expert saw in the calibration"
    plot.label(x=title, y="experts", x_ticks=_powers(low, high), whole=True)
    plot.histogram(experts, edges, "ours")
    return drawing


def draw_positions(rows: Sequence[tuple[str, EvaluationRow]]) -> Drawing:
    """Draw the mean divergence by position in the window; a point is in the middle of its positions."""
    drawn = rows[: len(_MODE_STYLES)]
    drawing = Drawing("KL by position in the window", 230 + _ROW * len(drawn))
    lines = [
        [
            (math.log2(max((1.0 + part.first) * max(part.stop, 1), 1.0)) / 2, min(part.mean, _LARGEST_DRAWN))
            for part in row.figures.divergence.by_position
        ]
        for _, row in drawn
    ]
    points = [point for line in lines for point in line] or [(0.0, 0.0)]
    low = math.floor(min(x for x, _ in points))
    high = max(math.ceil(max(x for x, _ in points)), low + 1)
    plot = Plot(drawing, top=_ROW * len(drawn) + 4, x=(low, high), y_max=1.08 * max(y for _, y in points))
    plot.label(x="position in the window, in tokens", y="mean KL in nats", x_ticks=_powers(low, high))
    for i, ((mode, _), line, (color, dash)) in enumerate(zip(drawn, lines, _MODE_STYLES, strict=False)):
        level = _ROW * i + SIZE
        drawing.add(Line([(4, level - 4), (30, level - 4)], color, 2, dash), Words(36, level, mode, color))
        drawing.add(Line([(plot.x(x), plot.y(y)) for x, y in line], color, 2, dash))
    return drawing


def color_scale(maps: Sequence[HeatMap]) -> tuple[float, float]:
    """Return the two ends of the color scale in dB. Values beyond an end get its color.

    Between them is the middle 99 % of all maps' finite values, so one outlier does not hide the rest.
    """
    values = np.concatenate([m.values.ravel() for m in maps])
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return 0.0, 1.0
    low, high = (float(v) for v in np.percentile(finite, [0.5, 99.5] if finite.size >= 1000 else [0, 100]))
    middle = (low + high) / 2
    half = max(high - low, MIN_SPAN_DB) / 2
    return middle - half, middle + half


def draw_heat_maps(maps: Sequence[HeatMap]) -> Drawing:
    """Draw the maps of gate, up and down below each other, with their color scale."""
    width = WIDTH - _LEFT - _RIGHT
    num_layers, num_experts = maps[0].values.shape
    height = float(np.clip(1.7 * num_layers, 60, 150))
    top = 46.0
    drawing = Drawing("Heat maps of SQNR by layer and expert", top + (height + _ROW + 8) * len(maps) + _BELOW)
    low, high = color_scale(maps)
    ramp = _shades(np.linspace(low, high, SHADES)[None, :], low, high)
    drawing.add(Words(_LEFT, SIZE, "SQNR in dB: darker is more error"), Picture(_LEFT, 18, width / 2, 8, ramp))
    drawing.add(Words(_LEFT, 39, f"{low:.2f}"), Words(_LEFT + width / 2, 39, f"{high:.2f}", anchor="end"))
    for projection in maps:
        drawing.add(Words(_LEFT, top + SIZE + 2, projection.projection, "ink"), Words(4, top + SIZE + 2, "layer"))
        top += _ROW + 3
        drawing.add(Picture(_LEFT, top, width, height, _shades(projection.values, low, high)))
        for row in _numbered(num_layers, 5):
            level = top + (row + 0.5) * height / num_layers + 4
            drawing.add(Words(_LEFT - 5, level, str(projection.layers[row]), anchor="end"))
        top += height + 5
    for expert in _numbered(num_experts, 8):
        drawing.add(Words(_LEFT + (expert + 0.5) * width / num_experts, top + 10, str(expert), anchor="middle"))
    drawing.add(Words(_LEFT + width / 2, top + 27, "expert", anchor="middle"))
    return drawing


def _numbered(count: int, most: int) -> list[int]:
    """Return which of `count` rows or columns have their number beside them."""
    return [int(index) for index in ticks(0, max(count - 1, 1), most, whole=True) if index < count]


def _shades(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """Return the cells of values in dB. An exact tensor has the last shade."""
    shares = np.nan_to_num((values - low) / (high - low), nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1)
    return np.where(np.isnan(values), EMPTY, np.rint((SHADES - 1) * shares)).astype(np.uint8)
