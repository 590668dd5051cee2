"""Heat maps: SQNR by layer and expert, one map each for gate, up and down on one color scale.

K2 has 60 layers x 384 experts, so a cell is a pixel or two. On a wide page experts are columns and the maps are
stacked. On a narrow page experts are rows and the maps are in one line. Each map is embedded as an image of one pixel
per cell, which the browser enlarges: 69,120 cells take about 100 kB.
"""

# matplotlib does not type its keyword arguments, so every call is "partially unknown".
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from k2convert.report.figures import HeatMap
from k2convert.report.palette import COLOR_MAP, Palette
from k2convert.report.sheet import Sheet

MIN_SPAN_DB = 0.2  # a narrower scale would show noise as differences
MAP_ID = "map-"
_MAX_LABELLED_CELLS = 24 * 8
_LAYER_STEPS = (1, 2, 5, 10, 20, 50, 100, 1 << 20)
_EXPERT_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1 << 20)

SetTicks = Callable[[Sequence[int], Sequence[str]], object]


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
    low, high = (float(v) for v in np.percentile(finite, [0.5, 99.5]))
    if finite.size < 1000:
        low, high = float(finite.min()), float(finite.max())
    if high - low < MIN_SPAN_DB:
        middle = (low + high) / 2
        low, high = middle - MIN_SPAN_DB / 2, middle + MIN_SPAN_DB / 2
    return ColorScale(low, high, bool(finite.min() < low), bool(finite.max() > high))


def draw_heat_maps(maps: tuple[HeatMap, ...], *, palette: Palette, is_narrow: bool) -> Figure:
    """Draw all maps with their color scale; `is_narrow` for a phone."""
    return _draw_narrow(maps, palette) if is_narrow else _draw_wide(maps, palette)


def _draw_wide(maps: tuple[HeatMap, ...], palette: Palette) -> Figure:
    width, left, right, title, bottom, bar = 9.5, 0.66, 0.05, 0.26, 0.42, 0.5
    height = float(np.clip(0.042 * len(maps[0].layers), 0.6, 2.6))
    sheet = Sheet(width, bar + len(maps) * (title + height) + bottom, palette)
    scale = color_scale(maps)
    top = bar
    for i, found in enumerate(maps):
        axes = sheet.axes(left, top + title, width - left - right, height)
        _draw_map(axes, found.values, scale, palette, found.projection)
        sheet.text(left, top + title - 0.07, found.projection, weight="bold")
        _label_layers(axes.set_yticks, found, most=8)
        _label_experts(axes.set_xticks, found, most=16)
        axes.set_ylabel("layer")
        if i < len(maps) - 1:
            axes.set_xticklabels([])
        if found.values.size <= _MAX_LABELLED_CELLS:
            _write_values(axes, found.values, scale)
        top += title + height
    sheet.text(left + (width - left - right) / 2, top + 0.36, "expert", align="center", color=palette.muted)
    _draw_scale(sheet, scale, left=left, top=0.24, width=3.0)
    return sheet.figure


def _draw_narrow(maps: tuple[HeatMap, ...], palette: Palette) -> Figure:
    width, left, gap, title, bottom, bar = 3.6, 0.5, 0.1, 0.26, 0.42, 0.5
    height = float(np.clip(0.0145 * maps[0].num_experts, 1.8, 5.6))
    sheet = Sheet(width, bar + title + height + bottom, palette)
    scale = color_scale(maps)
    each = (width - left - 0.05 - gap * (len(maps) - 1)) / len(maps)
    for i, found in enumerate(maps):
        start = left + i * (each + gap)
        axes = sheet.axes(start, bar + title, each, height)
        _draw_map(axes, found.values.T, scale, palette, f"{found.projection}-turned")
        sheet.text(start, bar + title - 0.07, found.projection, weight="bold")
        _label_experts(axes.set_yticks, found, most=12)
        _label_layers(axes.set_xticks, found, most=4)
        if i > 0:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel("expert")
    sheet.text((left + width) / 2, bar + title + height + 0.36, "layer", align="center", color=palette.muted)
    _draw_scale(sheet, scale, left=left, top=0.24, width=2.2)
    return sheet.figure


def _draw_map(axes: Axes, values: NDArray[np.float64], scale: ColorScale, palette: Palette, name: str) -> None:
    axes.set_facecolor(palette.empty)
    shown = np.ma.masked_invalid(np.where(np.isposinf(values), scale.high, values))
    image = axes.imshow(
        shown, cmap=COLOR_MAP, vmin=scale.low, vmax=scale.high, aspect="auto", interpolation="none", origin="upper"
    )
    image.set_gid(f"{MAP_ID}{name}")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2)


def _label_layers(set_ticks: SetTicks, found: HeatMap, *, most: int) -> None:
    rows = _spaced(found.layers, most, _LAYER_STEPS)
    set_ticks(rows, [str(found.layers[i]) for i in rows])


def _label_experts(set_ticks: SetTicks, found: HeatMap, *, most: int) -> None:
    rows = _spaced(range(found.num_experts), most, _EXPERT_STEPS)
    set_ticks(rows, [str(i) for i in rows])


def _spaced(numbers: Sequence[int], most: int, steps: Sequence[int]) -> list[int]:
    """Return the positions of the numbers to label: all, or the multiples of a round step, at most `most`."""
    step = next(s for s in steps if len(numbers) <= most * s)
    return [i for i, number in enumerate(numbers) if number % step == 0]


def _write_values(axes: Axes, values: NDArray[np.float64], scale: ColorScale) -> None:
    norm, colors = Normalize(scale.low, scale.high, clip=True), colormaps[COLOR_MAP]
    decimals = 2 if values.shape[1] <= 16 else 1
    for row, column in np.argwhere(~np.isnan(values)):
        value = float(values[row, column])
        red, green, blue, _ = colors(float(norm(min(value, scale.high))))
        is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        text = "exact" if np.isinf(value) else f"{value:.{decimals}f}"
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
