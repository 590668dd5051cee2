"""The four charts: SQNR of the tensors, error by layer and expert, KL by position in the window, tokens per expert.

A chart is a drawing: lines, words and images in one coordinate system. Its units are those of the SVG's view box, y
downward: about the pixels of a telephone. The page has it as inline SVG, whose colors are variables, so that it follows
light and dark mode without a script. Pillow draws the same shapes for report.png, which a model card can show. A
plotting library would bring eight packages and save few lines.

The heat map shows gate, up and down on one color scale: layers are rows, experts are columns. Each is an image of one
pixel per cell, which the browser fits to the screen: the 69,120 cells of K2 need about 60 kB, those of K3 200 kB.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from io import BytesIO
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from k2convert.errors import counted
from k2convert.records.evaluation import EvaluationRow
from k2convert.report.content import mode_rows
from k2convert.report.figures import HeatMap, Report

WIDTH: Final = 400.0
SIZE: Final = 12.0  # of words
_MARGIN: Final = 12.0  # between the drawings of a PNG
_SCALE: Final = 4  # pixels of a unit while a PNG is drawn; the mean of 2 x 2 is written
_FILL_ALPHA: Final = 0.3

Color = Literal["ink", "muted", "line", "paper", "ours", "max", "third", "fourth", "warn"]
Point = tuple[float, float]

PALETTE: Final[dict[Color, tuple[str, str]]] = {  # light, dark
    "ink": ("#1b2430", "#e8edf2"),
    "muted": ("#5c6773", "#9aa7b4"),
    "line": ("#d5dbe1", "#37424d"),
    "paper": ("#ffffff", "#12171c"),
    "ours": ("#2563c9", "#6ea8ff"),
    "max": ("#c2571a", "#f09a5b"),
    "third": ("#18835a", "#4ec795"),
    "fourth": ("#7a4fb5", "#c3a3f2"),
    "warn": ("#b3261e", "#ff8a80"),
}

SHADES: Final = 128
"""Shades of the color map: more cannot be told apart, and the image would be larger."""
EMPTY: Final = SHADES  # a cell without a tensor
_VIRIDIS: Final = (
    (68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140), (40, 174, 128), (94, 201, 98),
    (173, 220, 48), (253, 231, 37),
)  # fmt: skip
"""Every 32nd color of the map viridis: perceptually uniform, and safe for color-blind readers."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points. With `is_filled` its inside has a light shade of the color."""

    points: Sequence[Point]
    color: Color
    width: float = 1.0
    is_filled: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """One line of text with its baseline at `y`."""

    x: float
    y: float
    text: str
    color: Color = "muted"
    anchor: Literal["start", "middle", "end"] = "start"
    size: float = SIZE


@dataclass(frozen=True, slots=True)
class Picture:
    """Cells of a heat map, uint8 [rows, columns], as width x height: shades of the color map, or EMPTY."""

    x: float
    y: float
    width: float
    height: float
    cells: NDArray[np.uint8]

    def image(self) -> Image.Image:
        """Return one pixel per cell; empty cells are transparent."""
        stops = np.linspace(0, len(_VIRIDIS) - 1, SHADES)
        channels = [np.interp(stops, range(len(_VIRIDIS)), channel) for channel in zip(*_VIRIDIS, strict=True)]
        shades = np.stack([*channels, np.full(SHADES, 255.0)], axis=-1).astype(np.uint8)
        image = Image.fromarray(self.cells).convert("P")
        image.putpalette(shades.tobytes() + bytes(4), "RGBA")
        return image


Shape = Line | Words | Picture


@dataclass(slots=True)
class Drawing:
    """Shapes on a sheet of WIDTH x `height`; `label` describes it to screen readers."""

    label: str
    height: float
    shapes: list[Shape] = field(default_factory=list[Shape])

    def add(self, *shapes: Shape) -> None:
        """Draw shapes over those that are there."""
        self.shapes += shapes


def css_palette() -> tuple[str, str]:
    """Return the declarations of the colors in light and in dark mode."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in PALETTE.items()) for i in range(2))
    return light, dark


def to_svg(drawing: Drawing) -> str:
    """Return the drawing as SVG in the page's colors."""
    parts = "".join(_svg(shape) for shape in drawing.shapes)
    box = f'viewBox="0 0 {WIDTH:g} {drawing.height:g}"'
    return f'<svg role="img" aria-label="{escape(drawing.label)}" {box} font-size="{SIZE:g}">{parts}</svg>'


def _svg(shape: Shape) -> str:
    match shape:
        case Line():
            fill = 'fill="none"'
            if shape.is_filled:
                fill = f'fill="var(--{shape.color})" fill-opacity="{_FILL_ALPHA}"'
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            stroke = f'stroke="var(--{shape.color})" stroke-width="{shape.width:g}"'
            return f'<polyline {stroke} {fill} points="{points}"/>'
        case Words():
            position = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" font-size="{shape.size:g}"'
            return f'<text fill="var(--{shape.color})" {position}>{escape(shape.text)}</text>'
        case Picture():
            target = BytesIO()
            shape.image().save(target, format="PNG", optimize=True)
            data = base64.b64encode(target.getvalue()).decode()
            position = f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"'
            way = "pixelated" if shape.width > shape.cells.shape[1] else "auto"  # smaller: no cell may be skipped
            style = f'preserveAspectRatio="none" image-rendering="{way}"'
            return f'<image {position} {style} href="data:image/png;base64,{data}"/>'


def to_png(columns: Sequence[Sequence[Drawing]]) -> bytes:
    """Return columns of drawings, from left to right, as one PNG on white."""
    width = _MARGIN + (WIDTH + _MARGIN) * len(columns)
    height = _MARGIN + max(sum(drawing.height + _MARGIN for drawing in column) for column in columns)
    image = Image.new("RGB", (int(_SCALE * width), int(_SCALE * height)), PALETTE["paper"][0])
    for i, column in enumerate(columns):
        top = _MARGIN
        for drawing in column:
            for shape in drawing.shapes:
                _paint(image, shape, left=_MARGIN + i * (WIDTH + _MARGIN), top=top)
            top += drawing.height + _MARGIN
    target = BytesIO()
    # 256 colors are enough for color map, lines and words, and take a third of the bytes.
    few = image.reduce(2).quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(target, format="PNG", optimize=True)
    return target.getvalue()


def _paint(image: Image.Image, shape: Shape, *, left: float, top: float) -> None:
    draw = ImageDraw.Draw(image, "RGBA")
    match shape:
        case Line():
            color = PALETTE[shape.color][0]
            points = [(_SCALE * (left + x), _SCALE * (top + y)) for x, y in shape.points]
            if shape.is_filled:
                draw.polygon(points, fill=f"{color}{int(255 * _FILL_ALPHA):02x}")
            draw.line(points, fill=color, width=round(_SCALE * shape.width), joint="curve")
        case Words():
            font = ImageFont.load_default(_SCALE * shape.size)
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
            position = (_SCALE * (left + shape.x), _SCALE * (top + shape.y))
            draw.text(position, shape.text, fill=PALETTE[shape.color][0], font=font, anchor=anchor)
        case Picture():
            position = (int(_SCALE * (left + shape.x)), int(_SCALE * (top + shape.y)))
            size = (int(_SCALE * shape.width), int(_SCALE * shape.height))
            cells = shape.image().convert("RGBA").resize(size, Image.Resampling.BOX)
            image.paste(cells, position, cells)


_LEFT: Final = 46.0  # of a plot: room for the numbers of the vertical axis
_RIGHT: Final = 16.0
_BELOW: Final = 36.0  # a plot: numbers and title of the horizontal axis
_ROW: Final = 17.0  # between lines of words
_TAIL_DB: Final = 0.5
_LARGEST_DRAWN: Final = 1e6  # of a divergence; a damaged document may state any
_MODE_STYLES: Final[tuple[tuple[Color, float], ...]] = (("ours", 3.0), ("max", 2.0), ("third", 1.4), ("fourth", 1.0))
"""Color and width of the line of each mode: no more modes are drawn."""

MIN_SPAN_DB: Final = 0.2  # of a color scale; a narrower one would show noise as differences


Curve = tuple[str, Line]
"""A line of a chart, with its points in the units of the axes, after the words that explain it."""


def draw_charts(report: Report) -> list[Drawing]:
    """Return the charts of which the figures are known."""
    charts: list[Drawing] = []
    if report.maps:
        charts.append(draw_heat_maps(report.maps))
    if any(math.isfinite(tensor.sqnr_db) for tensor in report.tensors):
        charts.append(draw_tensors(report))
    if report.evaluation is not None:
        charts.append(draw_positions(mode_rows(report.evaluation, report.ledger.recipe)))
    if (record := report.ledger.calibration) is not None:
        tokens = [count for layer in record.layers.values() for count in layer.tokens]
        if tokens:
            charts.append(draw_tokens(tokens))
    return charts


def _titled(title: str, height: float) -> Drawing:
    drawing = Drawing(title, height)
    drawing.add(Words(4, SIZE, title, "ink", size=13))
    return drawing


def _plot(
    title: str, curves: Sequence[Curve], *, x: str, y: str, x_range: tuple[float, float], x_ticks: Mapping[float, str]
) -> Drawing:
    """Draw curves over axes with titles `x` and `y`, numbers and grid. The vertical axis begins at 0."""
    top = 42 + _ROW * len(curves)
    drawing = _titled(title, top + 208)
    bottom = drawing.height - _BELOW
    end = WIDTH - _RIGHT
    low, high = x_range
    y_max = 1.08 * max((height for _, line in curves for _, height in line.points), default=0.0) or 1.0
    if any(line.is_filled for _, line in curves):
        y_max = max(y_max, 4.0)  # counts have whole numbers beside them

    def across(value: float) -> float:
        return _LEFT + (end - _LEFT) * (value - low) / (high - low)

    def up(value: float) -> float:
        return bottom - (bottom - top) * value / y_max

    for value in ticks(0.0, y_max, 4):
        drawing.add(Line([(_LEFT, up(value)), (end, up(value))], "line"))
        drawing.add(Words(_LEFT - 5, up(value) + 4, f"{value:g}", anchor="end"))
    for value, text in x_ticks.items():
        drawing.add(Line([(across(value), bottom), (across(value), bottom + 4)], "muted"))
        drawing.add(Words(across(value), bottom + 16, text, anchor="middle"))
    drawing.add(Words((_LEFT + end) / 2, bottom + 32, x, anchor="middle"), Words(4, top - 8, y))
    for i, (label, line) in enumerate(curves):
        level = _ROW * (i + 1) + SIZE + 2
        drawing.add(Line([(4, level - 4), (30, level - 4)], line.color, line.width))
        drawing.add(Words(36, level, label, line.color))
        drawing.add(replace(line, points=[(across(value), up(height)) for value, height in line.points]))
    return drawing


def _histogram(label: str, values: NDArray[np.float64], edges: NDArray[np.float64], color: Color) -> Curve:
    """Return the outline of the counts between edges; values beyond the ends are in the first or last count."""
    counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    heights = [0, *np.repeat(counts, 2).tolist(), 0]
    return label, Line(list(zip(np.repeat(edges, 2).tolist(), heights, strict=True)), color, 1.3, is_filled=True)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most about `most` + 1 round numbers in a range."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.999 * rough)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _power_ticks(low: int, high: int) -> dict[float, str]:
    """Return "512" or "4k" for some exponents of two in a range, and "0" below 1."""
    labels: dict[float, str] = {}
    for power in range(low, high + 1, 1 + (high - low) // 9):
        if power < 0:
            labels[power] = "0"
        elif power < 10:
            labels[power] = str(2**power)
        else:
            labels[power] = f"{2 ** (power - 10)}k"
    return labels


def _finite(values: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([value for value in values if value is not None and math.isfinite(value)])


def draw_tensors(report: Report) -> Drawing:
    """Draw histograms of the tensors' SQNR: of rule `max`, if that is another rule, and of this conversion."""
    ours = _finite(tensor.sqnr_db for tensor in report.tensors)
    of_max = _finite(tensor.sqnr_max_db for tensor in report.tensors if report.rule != "max")
    everything = np.concatenate([ours, of_max])
    # A few broken tensors must not squeeze the rest: they are counted in the first bin, and the label says how many.
    usual = min(float(np.percentile(values, 1)) for values in (ours, of_max) if values.size)
    low = max(float(everything.min()), usual - _TAIL_DB)
    high = float(everything.max())
    pad = 0.03 * max(high - low, 0.2)
    edges = np.linspace(low - pad, high + pad, 81)
    beyond = int((everything < low).sum())
    curves = [_histogram(f"this result ({report.rule}): median {np.median(ours):.2f} dB", ours, edges, "ours")]
    if of_max.size:
        curves.insert(0, _histogram(f"max: median {np.median(of_max):.2f} dB", of_max, edges, "max"))
    return _plot(
        "SQNR of the tensors",
        curves,
        x=f"SQNR in dB: {counted(beyond, 'value')} left of the chart" if beyond else "SQNR in dB: more is better",
        y="tensors",
        x_range=(edges[0], edges[-1]),
        x_ticks={value: f"{value:.6g}" for value in ticks(edges[0], edges[-1], 6)},
    )


def draw_tokens(tokens: Sequence[int]) -> Drawing:
    """Draw the number of experts by the tokens that the calibration routed to them, four columns per doubling."""
    counts = np.array(tokens, dtype=np.float64)
    logs: NDArray[np.float64] = np.where(
        counts > 0, np.log2(np.maximum(counts, 1)), -1.0
    )  # experts without tokens are left of 1
    low = math.floor(logs.min())
    high = max(math.floor(logs.max()) + 1, low + 2)
    edges = np.linspace(float(low), float(high), 4 * (high - low) + 1)
    label = f"median expert: {np.median(counts):,.0f} tokens"
    return _plot(
        "Tokens per expert",
        [_histogram(label, logs, edges, "ours")],
        x="tokens routed to the expert in the calibration",
        y="experts",
        x_range=(low, high),
        x_ticks=_power_ticks(low, high),
    )


def draw_positions(rows: Sequence[tuple[str, EvaluationRow]]) -> Drawing:
    """Draw the mean divergence by position in the window; a point is in the middle of its positions."""
    curves: list[Curve] = []
    for (mode, row), (color, width) in zip(rows, _MODE_STYLES, strict=False):
        means = row.figures.divergence.by_position
        middles = [math.log2(max((1.0 + part.first) * max(part.stop, 1), 1.0)) / 2 for part in means]
        heights = [min(part.mean, _LARGEST_DRAWN) for part in means]
        curves.append((mode, Line(list(zip(middles, heights, strict=True)), color, width)))
    logs = [log for _, line in curves for log, _ in line.points] or [0.0]
    low = math.floor(min(logs))
    high = max(math.ceil(max(logs)), low + 1)
    return _plot(
        "KL by position in the window",
        curves,
        x="position in the window, in tokens",
        y="mean KL in nats",
        x_range=(low, high),
        x_ticks=_power_ticks(low, high),
    )


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
    top = 64.0
    drawing = _titled("Error by layer and expert", top + (height + _ROW + 8) * len(maps) + _BELOW)
    low, high = color_scale(maps)
    ramp = _shades(np.linspace(low, high, SHADES)[None, :], low, high)
    drawing.add(Words(4, 31, "SQNR in dB: darker is more error"), Picture(_LEFT, 37, width / 2, 8, ramp))
    drawing.add(Words(_LEFT, 57, f"{low:.2f}"), Words(_LEFT + width / 2, 57, f"{high:.2f}", anchor="end"))
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
    return [int(index) for index in ticks(0, max(count - 1, most), most) if index < count]


def _shades(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """Return the cells of values in dB. An exact tensor has the last shade."""
    shares = np.nan_to_num((values - low) / (high - low), nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1)
    return np.where(np.isnan(values), EMPTY, np.rint((SHADES - 1) * shares)).astype(np.uint8)
