"""Heat maps: SQNR by layer and expert, one map each for gate, up and down, side by side on one color scale.

K2 has 60 layers x 384 experts, so a cell is a pixel or two: experts are rows, layers are columns. Each map is embedded
as an image of one pixel per cell, which the browser enlarges: 69,120 cells need about 100 kB.
"""

# matplotlib does not type its keyword arguments, so every call is "partially unknown".
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from k2convert.report.drawing import COLOR_MAP, WIDTH, Palette, Sheet
from k2convert.report.figures import HeatMap

MIN_SPAN_DB = 0.2  # a narrower scale would show noise as differences
MAP_ID = "map-"
_MAX_LABELLED_CELLS = 24 * 8
_LAYER_STEPS = (1, 2, 5, 10, 20, 50, 100, 1 << 20)
_EXPERT_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1 << 20)
_NO_CELL = 0
_EXACT_CELL = 0xFFFF


@dataclass(frozen=True, slots=True)
class ColorScale:
    """The values in dB at the ends of the color map. Values beyond an end get its color."""

    low: float
    high: float
    is_clipped_below: bool
    is_clipped_above: bool


def color_scale(maps: tuple[HeatMap, ...]) -> ColorScale:
    """Return the scale of all maps: the middle 99 % of the finite values, so one outlier does not hide the rest."""
    values = np.concatenate([m.values.ravel() for m in maps])
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return ColorScale(0.0, 1.0, False, False)
    low, high = (float(v) for v in np.percentile(finite, [0.5, 99.5] if finite.size >= 1000 else [0, 100]))
    if high - low < MIN_SPAN_DB:
        middle = (low + high) / 2
        low = middle - MIN_SPAN_DB / 2
        high = middle + MIN_SPAN_DB / 2
    return ColorScale(low, high, bool(finite.min() < low), bool(finite.max() > high))


def draw_heat_maps(maps: tuple[HeatMap, ...], palette: Palette) -> Figure:
    """Draw all maps with their color scale."""
    left = 0.56
    gap = 0.12
    title = 0.28
    bottom = 0.42
    bar = 0.5
    has_values = maps[0].values.size <= _MAX_LABELLED_CELLS
    per_row = 0.19 if has_values else 0.0175
    height = float(np.clip(per_row * maps[0].num_experts, 1.8, 6.8))
    sheet = Sheet(bar + title + height + bottom, palette)
    scale = color_scale(maps)
    each = (WIDTH - left - 0.05 - gap * (len(maps) - 1)) / len(maps)
    for i, found in enumerate(maps):
        start = left + i * (each + gap)
        axes = sheet.axes(start, bar + title, each, height)
        _draw_map(axes, found, scale, palette)
        sheet.text(start, bar + title - 0.07, found.projection, bold=True)
        _label(axes.set_yticks, range(found.num_experts), most=16, steps=_EXPERT_STEPS)
        _label(axes.set_xticks, found.layers, most=5, steps=_LAYER_STEPS)
        if i > 0:
            axes.set_yticklabels([])
        if has_values:
            _write_values(axes, found.values.T, scale)
    sheet.figure.axes[0].set_ylabel("expert")
    sheet.text((left + WIDTH) / 2, bar + title + height + 0.36, "layer", align="center", color=palette.muted)
    _draw_scale(sheet, scale, left=left, top=0.24, width=2.6)
    return sheet.figure


def _draw_map(axes: Axes, found: HeatMap, scale: ColorScale, palette: Palette) -> None:
    axes.set_facecolor(palette.empty)
    values = found.values.T
    shown = np.ma.masked_invalid(np.where(np.isposinf(values), scale.high, values))
    image = axes.imshow(
        shown, cmap=COLOR_MAP, vmin=scale.low, vmax=scale.high, aspect="auto", interpolation="none", origin="upper"
    )
    image.set_gid(f"{MAP_ID}{found.projection}")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2)


def _label(
    set_ticks: Callable[[Sequence[int], Sequence[str]], object],
    numbers: Sequence[int],
    *,
    most: int,
    steps: Sequence[int],
) -> None:
    """Label all numbers, or the multiples of a round step: at most `most`."""
    step = next(s for s in steps if len(numbers) <= most * s)
    rows = [i for i, number in enumerate(numbers) if number % step == 0]
    set_ticks(rows, [str(numbers[i]) for i in rows])


def _write_values(axes: Axes, values: NDArray[np.float64], scale: ColorScale) -> None:
    norm = Normalize(scale.low, scale.high, clip=True)
    colors = colormaps[COLOR_MAP]
    for row, column in np.argwhere(~np.isnan(values)):
        value = float(values[row, column])
        red, green, blue, _ = colors(float(norm(min(value, scale.high))))
        is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        text = "exact" if np.isinf(value) else f"{value:.2f}" if values.shape[1] <= 4 else f"{value:.1f}"
        color = "#10151a" if is_light else "#f4f7fa"
        axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=color)


def _draw_scale(sheet: Sheet, scale: ColorScale, *, left: float, top: float, width: float) -> None:
    axes = sheet.axes(left, top, width, 0.1)
    ramp = np.linspace(0.0, 1.0, 256)[None, :]
    axes.imshow(ramp, cmap=COLOR_MAP, aspect="auto", extent=(scale.low, scale.high, 0.0, 1.0), interpolation="none")
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    low = f"{'≤ ' if scale.is_clipped_below else ''}{scale.low:.2f}"
    high = f"{'≥ ' if scale.is_clipped_above else ''}{scale.high:.2f}"
    axes.set_xticks([scale.low, scale.high], [low, high])
    axes.tick_params(axis="x", length=0, pad=2)
    for label, align in zip(axes.get_xticklabels(), ("left", "right"), strict=True):
        label.set_horizontalalignment(align)
    sheet.text(left, top - 0.06, "SQNR, dB: darker means more error", color=sheet.palette.muted)


def map_cells(maps: tuple[HeatMap, ...]) -> str:
    """Return the maps' values for the page's script: only digits, base64 and the three projections' names."""
    document = {
        found.projection: {
            "layers": list(found.layers),
            "experts": found.num_experts,
            "values": base64.b64encode(_encode_values(found.values)).decode(),
        }
        for found in maps
    }
    return json.dumps(document, separators=(",", ":"))


def _encode_values(values: NDArray[np.float64]) -> bytes:
    hundredths = np.clip(np.rint(100 * np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)), 1, _EXACT_CELL - 1)
    cells = np.where(np.isposinf(values), _EXACT_CELL, hundredths)
    return np.where(np.isnan(values), _NO_CELL, cells).astype("<u2").tobytes()
