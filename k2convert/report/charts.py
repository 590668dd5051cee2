"""Charts: errors of the tensors, block scales, tokens per expert, scaled channels, errors of layers, evaluations, maps.

Heat maps are SQNR by layer and expert, one map each for gate, up and down, side by side on one color scale. K2 has
60 layers x 384 experts, so a cell is a pixel or two: experts are rows, layers are columns. Each map is embedded as an
image of one pixel per cell, which the browser enlarges: 69,120 cells need about 100 kB.
"""

# matplotlib does not type its keyword arguments, so every call is "partially unknown".
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from k2convert.calibration.channels import MIN_TOKENS
from k2convert.errors import counted
from k2convert.quantize.formats.nvfp4 import decode_e4m3
from k2convert.records.calibration import GptqLayer, OutputErrors
from k2convert.records.evaluation import HISTOGRAM_EDGES, Divergence, EvaluationRow
from k2convert.report.calibrated import shrinkages_by_layer
from k2convert.report.drawing import COLOR_MAP, FONT_SIZE, LEFT, WIDTH, Palette, Sheet
from k2convert.report.figures import HeatMap, Report
from k2convert.report.wording import power_of_ten, power_of_two, short_count

_SMALLEST_NORMAL_LOG2 = -6.0
_LARGEST_LOG2 = float(np.log2(448))
_BINS_PER_DOUBLING = 4
_ZERO_LOG2 = -1.0  # where experts without tokens are drawn
_TAIL_DB = 0.5
_LEAST_ALPHA = 0.2  # of the bars with most shrinkage, which is the least correction
_LARGEST_DRAWN = 1e6  # of a divergence or an error; a damaged document may state any

MIN_SPAN_DB = 0.2  # a narrower scale would show noise as differences
MAP_ID = "map-"
_MAX_LABELLED_CELLS = 24 * 8
_LAYER_STEPS = (1, 2, 5, 10, 20, 50, 100, 1 << 20)
_EXPERT_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1 << 20)
_NO_CELL = 0
_EXACT_CELL = 0xFFFF

ModeRows = Sequence[tuple[str, EvaluationRow]]
"""Rows of an evaluation with the words for their modes."""
_MODE_STYLES: Final = (
    ("ours", "solid", "o"), ("max", (0, (5, 2)), "s"), ("good", (0, (1, 1.5)), "^"), ("mse", (0, (5, 2, 1, 2)), "D"),
)  # fmt: skip
"""Color, line and marker of each mode: no more modes are drawn."""


def draw_distribution(report: Report, palette: Palette) -> Figure:
    """Draw histograms of the tensors' SQNR: of this conversion and of `max`."""
    sheet = Sheet(3.1, palette)
    known = (
        ("max", [] if report.rule == "max" else [t.sqnr_max_db for t in report.tensors], palette["max"]),
        (f"this: {report.rule}", [t.sqnr_db for t in report.tensors], palette["ours"]),
    )
    finite = [(label, [v for v in values if v is not None and np.isfinite(v)], color) for label, values, color in known]
    series = [(label, np.array(values), color) for label, values, color in finite if values]
    axes = sheet.plot(0.22 * len(series) + 0.08)
    everything = np.concatenate([values for _, values, _ in series])
    # A few broken tensors must not squeeze the rest: they are counted in the first bin, and the label says how many.
    low = max(float(everything.min()), min(float(np.percentile(v, 1)) for _, v, _ in series) - _TAIL_DB)
    high = float(everything.max())
    pad = 0.03 * max(high - low, 0.2)
    edges = np.linspace(low - pad, high + pad, 101)
    for i, (label, values, color) in enumerate(series):
        counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
        axes.stairs(counts, edges, fill=True, color=color, alpha=0.3, linewidth=0)
        axes.stairs(counts, edges, color=color, linewidth=1.2)
        sheet.text(LEFT, 0.16 + 0.22 * i, f"{label}: median {np.median(values):.2f} dB", color=color, bold=True)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, axes.get_ylim()[1] * 1.2)
    level = axes.get_ylim()[1] * 0.93
    style = {"arrowstyle": "<->", "color": palette["muted"], "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
    for left, right in pairwise(float(np.median(values)) for _, values, _ in series):
        if right - left >= 0.2 * (edges[-1] - edges[0]):
            axes.annotate("", xy=(left, level), xytext=(right, level), arrowprops=style)
            size = FONT_SIZE - 1
            middle = (left + right) / 2
            text = f"{right - left:.2f} dB"
            axes.text(middle, level * 0.985, text, ha="center", va="top", fontsize=size, color=palette["muted"])
    _count_axis(axes, "tensors")
    beyond = sum(int((values < low).sum()) for _, values, _ in series)
    note = f"; {counted(beyond, 'value')} left of the chart" if beyond else ": further right means less error"
    axes.set_xlabel(f"SQNR of a tensor, dB{note}")
    return sheet.figure


def draw_block_scales(counts: Mapping[int, int], palette: Palette) -> Figure:
    """Draw the number of blocks by E4M3 block scale, with the limits of what every engine reads."""
    sheet = Sheet(2.9, palette)
    axes = sheet.plot(0.34)
    logs = np.log2([*decode_e4m3(np.arange(1, 0x7F, dtype=np.uint8)), 480.0])  # NaN's byte, as if it were a number
    middles = (logs[1:] + logs[:-1]) / 2
    edges = [logs[0] - (middles[0] - logs[0]), *middles]
    axes.stairs([counts.get(byte, 0) for byte in range(1, 0x7F)], edges, fill=True, color=palette["ours"], linewidth=0)
    axes.set_ylim(0.7, max(counts.values(), default=1) * 2.2)
    axes.set_xlim(-9.6, 9.2)
    _warn_below(axes, _SMALLEST_NORMAL_LOG2, palette)
    axes.axvline(_LARGEST_LOG2, color=palette["warn"], linewidth=1.0, linestyle=(0, (4, 3)))
    ticks = list(range(-9, 10, 3))
    axes.set_xticks(ticks, [power_of_two(t) for t in ticks])
    axes.set_xlabel("block scale (E4M3)")
    _count_axis(axes, "blocks", is_log=True)
    sheet.label(axes, _SMALLEST_NORMAL_LOG2, "subnormal", align="right")
    sheet.label(axes, _SMALLEST_NORMAL_LOG2, "2⁻⁶, the smallest normal", align="left")
    sheet.label(axes, _LARGEST_LOG2, "448", align="right")
    return sheet.figure


def _warn_below(axes: Axes, limit: float, palette: Palette) -> None:
    axes.axvspan(axes.get_xlim()[0], limit, color=palette["warn"], alpha=0.1, linewidth=0)
    axes.axvline(limit, color=palette["warn"], linewidth=1.0, linestyle=(0, (4, 3)))


def _count_axis(axes: Axes, label: str, *, is_log: bool = False) -> None:
    if is_log:
        axes.set_yscale("log")
        axes.minorticks_off()
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(short_count))
    axes.set_ylabel(label)


def draw_tokens(tokens: Sequence[int], palette: Palette, *, is_weighted: bool) -> Figure:
    """Draw the number of experts by the tokens that they saw and, if errors were weighted, how many they need."""
    sheet = Sheet(2.9, palette)
    axes = sheet.plot(0.34)
    counts = np.array(tokens, dtype=np.float64)
    logs = np.where(counts > 0, np.log2(np.maximum(counts, 1)), _ZERO_LOG2)
    limit = float(np.log2(MIN_TOKENS))
    low = np.floor(min(float(logs.min()), limit - 1))
    high = max(float(np.ceil(logs.max())), limit) + 0.5
    edges = np.arange(low, high + 1 / _BINS_PER_DOUBLING, 1 / _BINS_PER_DOUBLING)
    axes.stairs(np.histogram(logs, edges)[0], edges, fill=True, color=palette["ours"], linewidth=0)
    axes.set_xlim(edges[0], edges[-1])
    step = 2 if high - low > 8 else 1
    ticks = [tick for tick in range(max(int(np.ceil(low)), 0), int(high) + 1) if tick % step == 0]
    zero = {_ZERO_LOG2 + 0.5 / _BINS_PER_DOUBLING: "0"} if (counts == 0).any() else {}
    named = zero | {tick: f"{2**tick}" if tick < 10 else f"{2 ** (tick - 10):,}k" for tick in ticks}
    axes.set_xticks(list(named), list(named.values()))
    axes.set_xlabel("tokens that the expert saw")
    _count_axis(axes, "experts")
    if is_weighted:
        _warn_below(axes, limit, palette)
        sheet.label(axes, limit, f"{MIN_TOKENS} tokens", align="right" if limit > (low + high) / 2 else "left")
    return sheet.figure


def draw_exponents(channels: Mapping[int, int], palette: Palette) -> Figure:
    """Draw the number of channels by the power of two in the norm."""
    sheet = Sheet(2.7, palette)
    axes = sheet.plot(0.2)
    most = max(map(abs, channels), default=1) or 1
    counts = {exponent: channels.get(exponent, 0) for exponent in range(-most, most + 1)}
    colors = [palette["ours"] if exponent else palette["muted"] for exponent in counts]
    axes.bar(list(counts), list(counts.values()), color=colors, width=0.8)
    axes.set_ylim(0.7, max(counts.values()) * 3)
    for exponent, count in counts.items():
        if count:
            text = short_count(count)
            size = FONT_SIZE - 1
            axes.text(exponent, count * 1.15, text, ha="center", fontsize=size, color=palette["muted"])
    axes.set_xticks(list(counts), [power_of_two(exponent) for exponent in counts])
    axes.set_xlabel("power of two in the norm; 1: not scaled")
    _count_axis(axes, "channels", is_log=True)
    return sheet.figure


def draw_layer_errors(layers: Mapping[int, OutputErrors], palette: Palette) -> Figure:
    """Draw the held-out error after each MoE layer: as converted, by rule `mse` there, from earlier layers alone.

    The scale is logarithmic, so an error of zero is not drawn. The first MoE layer inherits none.
    """
    sheet = Sheet(3.2, palette)
    axes = sheet.plot(0.76)
    for label, key, color, style, marker in (
        ("with rule mse in the layer", "mse_error", palette["mse"], (0, (5, 2)), "s"),
        ("this: gptq", "gptq_error", palette["ours"], "solid", "o"),
        ("from earlier layers alone", "inherited_error", palette["muted"], (0, (1, 1.5)), "^"),
    ):
        errors = np.array([getattr(layer, key) for layer in layers.values()], dtype=np.float64)
        drawn = np.where(errors > 0, errors, np.nan)
        axes.plot(
            list(layers), drawn, label=label, color=color, linestyle=style, linewidth=1.3, marker=marker, markersize=3
        )
    _error_axis(axes)
    _layer_axis(axes, list(layers), "MoE layer")
    _legend(axes, palette, columns=1)
    return sheet.figure


def _error_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    axes.set_ylabel("relative error")


def draw_shrinkages(layers: Mapping[int, GptqLayer], palette: Palette) -> Figure:
    """Draw the number of experts of each MoE layer by the shrinkage of their down projection."""
    sheet = Sheet(3.2, palette)
    axes = sheet.plot(0.76)
    found = shrinkages_by_layer(layers)
    bottom = np.zeros(len(layers))
    shades = np.linspace(1.0, _LEAST_ALPHA, max(len(found.keys() - {None}), 2)).tolist()
    for (shrinkage, counts), shade in zip(found.items(), [*shades, 1.0], strict=False):
        label, color, alpha = (
            ("no correction", palette["warn"], 1.0) if shrinkage is None else (f"{shrinkage:g}", palette["ours"], shade)
        )
        axes.bar(list(layers), counts, bottom=bottom, color=color, alpha=alpha, width=0.8, linewidth=0, label=label)
        bottom += np.array(counts)
    _count_axis(axes, "experts")
    _layer_axis(axes, list(layers), "MoE layer")
    _legend(axes, palette, columns=4)
    sheet.text(LEFT, 0.16, "shrinkage of the correction of down", bold=True)
    return sheet.figure


def draw_divergences(rows: ModeRows, palette: Palette) -> Figure:
    """Draw histograms of the tokens' divergence, one for each mode, on a logarithmic scale."""
    sheet = Sheet(3.1, palette)
    drawn = rows[: len(_MODE_STYLES)]
    axes = sheet.plot(0.22 * len(drawn) + 0.08)
    step = float(np.log10(HISTOGRAM_EDGES[1] / HISTOGRAM_EDGES[0]))
    logs = np.log10(HISTOGRAM_EDGES)
    edges = np.array([logs[0] - step, *logs, logs[-1] + step])
    used: list[int] = []
    for i, ((mode, row), (color, line, _)) in enumerate(zip(drawn, _MODE_STYLES, strict=False)):
        found = row.figures.divergence
        ink = palette[color]
        shares = 100 * np.array(found.histogram, dtype=np.float64) / max(sum(found.histogram), 1)
        used += np.flatnonzero(shares).tolist()
        axes.stairs(shares, edges, fill=True, color=ink, alpha=0.3, linewidth=0)
        axes.stairs(shares, edges, color=ink, linewidth=1.2, linestyle=line)
        sheet.text(LEFT, 0.16 + 0.22 * i, f"{mode}: median {found.median:.3g}", color=ink, bold=True)
    first = min(used, default=0)
    last = max(used, default=len(edges) - 2)
    axes.set_xlim(edges[first], edges[last + 1])
    axes.set_ylim(bottom=0)
    ticks = range(int(np.ceil(edges[first])), int(np.floor(edges[last + 1])) + 1)
    shown = ticks[:: 2 if len(ticks) > 5 else 1]
    axes.set_xticks(list(shown), [power_of_ten(tick) for tick in shown])
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_ylabel("% of tokens")
    axes.set_xlabel("KL of a token, in nats: further left is better")
    return sheet.figure


def draw_positions(rows: ModeRows, palette: Palette) -> Figure:
    """Draw the mean divergence by position in the window; a point is in the middle of its positions."""

    def by_position(row: EvaluationRow) -> tuple[list[float], list[float]]:
        found: Divergence = row.figures.divergence
        middles = [((1.0 + part.first) * max(part.stop, 1)) ** 0.5 for part in found.by_position]
        return middles, [part.mean for part in found.by_position]

    sheet = Sheet(2.9, palette)
    axes = sheet.plot(0.32)
    _draw_modes(axes, rows, by_position, palette)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(short_count))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylabel("mean KL")
    axes.set_xlabel("position in the window")
    return sheet.figure


def draw_layers(rows: ModeRows, palette: Palette, *, is_routing: bool) -> Figure:
    """Draw the relative error of the hidden states after each layer; the scale is logarithmic, so zero is not drawn.

    With `is_routing`, draw the share of the reference's choices of experts that each mode makes too.
    """

    def by_layer(row: EvaluationRow) -> tuple[list[float], list[float]]:
        errors = [layer.relative_error if layer.relative_error > 0 else np.nan for layer in row.layers]
        shares = [layer.routing_agreement for layer in row.layers]
        agreements = [np.nan if share is None else 100 * share for share in shares]
        return list(map(float, range(len(row.layers)))), agreements if is_routing else errors

    sheet = Sheet(3.0, palette)
    axes = sheet.plot(0.32)
    _draw_modes(axes, rows, by_layer, palette)
    if is_routing:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylabel("% of choices")
    else:
        _error_axis(axes)
    label = "layer: the same experts are chosen" if is_routing else "layer"
    _layer_axis(axes, range(max(len(row.layers) for _, row in rows)), label)
    return sheet.figure


def _draw_modes(
    axes: Axes, rows: ModeRows, points: Callable[[EvaluationRow], tuple[list[float], list[float]]], palette: Palette
) -> None:
    for (mode, row), (color, line, marker) in zip(rows, _MODE_STYLES, strict=False):
        places, values = points(row)
        axes.plot(
            places, np.minimum(values, _LARGEST_DRAWN), label=mode, color=palette[color], linestyle=line,
            linewidth=1.3, marker=marker, markersize=3,
        )  # fmt: skip
    _legend(axes, palette, columns=2)


def _layer_axis(axes: Axes, numbers: Sequence[int], label: str) -> None:
    axes.set_xlabel(label)
    axes.set_xlim(min(numbers) - 0.6, max(numbers) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


def _legend(axes: Axes, palette: Palette, *, columns: int) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, frameon=False, fontsize=FONT_SIZE,
        labelcolor=palette["muted"], borderpad=0.1, borderaxespad=0.2, labelspacing=0.25,
    )  # fmt: skip


def color_scale(maps: tuple[HeatMap, ...]) -> dict[float, str]:
    """Return the two ends of the color map in dB, with their labels. Values beyond an end get its color.

    Between them is the middle 99 % of all maps' finite values, so one outlier does not hide the rest.
    """
    values = np.concatenate([m.values.ravel() for m in maps])
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return {0.0: "0.00", 1.0: "1.00"}
    low, high = (float(v) for v in np.percentile(finite, [0.5, 99.5] if finite.size >= 1000 else [0, 100]))
    if high - low < MIN_SPAN_DB:
        middle = (low + high) / 2
        low = middle - MIN_SPAN_DB / 2
        high = middle + MIN_SPAN_DB / 2
    low_sign = "≤ " if finite.min() < low else ""
    high_sign = "≥ " if finite.max() > high else ""
    return {low: f"{low_sign}{low:.2f}", high: f"{high_sign}{high:.2f}"}


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
    low, high = scale
    each = (WIDTH - left - 0.05 - gap * (len(maps) - 1)) / len(maps)
    for i, found in enumerate(maps):
        start = left + i * (each + gap)
        axes = sheet.axes(start, bar + title, each, height)
        axes.set_facecolor(palette["empty"])
        shown = np.ma.masked_invalid(np.where(np.isposinf(found.values.T), high, found.values.T))
        image = axes.imshow(
            shown, cmap=COLOR_MAP, vmin=low, vmax=high, aspect="auto", interpolation="none", origin="upper"
        )
        image.set_gid(f"{MAP_ID}{found.projection}")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=2)
        sheet.text(start, bar + title - 0.07, found.projection, bold=True)
        _label(axes.set_yticks, range(found.num_experts), most=16, steps=_EXPERT_STEPS)
        _label(axes.set_xticks, found.layers, most=5, steps=_LAYER_STEPS)
        if i > 0:
            axes.set_yticklabels([])
        if has_values:
            _write_values(axes, found.values.T, low, high)
    sheet.figure.axes[0].set_ylabel("expert")
    sheet.text((left + WIDTH) / 2, bar + title + height + 0.36, "layer", align="center", color=palette["muted"])
    _draw_scale(sheet, scale, left=left, top=0.24, width=2.6)
    return sheet.figure


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


def _write_values(axes: Axes, values: NDArray[np.float64], low: float, high: float) -> None:
    norm = Normalize(low, high, clip=True)
    colors = colormaps[COLOR_MAP]
    for row, column in np.argwhere(~np.isnan(values)):
        value = float(values[row, column])
        red, green, blue, _ = colors(float(norm(min(value, high))))
        is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        digits = 2 if values.shape[1] <= 4 else 1
        text = "exact" if np.isinf(value) else f"{value:.{digits}f}"
        color = "#10151a" if is_light else "#f4f7fa"
        axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=color)


def _draw_scale(sheet: Sheet, scale: Mapping[float, str], *, left: float, top: float, width: float) -> None:
    axes = sheet.axes(left, top, width, 0.1)
    low, high = scale
    ramp = np.linspace(0.0, 1.0, 256)[None, :]
    axes.imshow(ramp, cmap=COLOR_MAP, aspect="auto", extent=(low, high, 0.0, 1.0), interpolation="none")
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_xticks(list(scale), list(scale.values()))
    axes.tick_params(axis="x", length=0, pad=2)
    for label, align in zip(axes.get_xticklabels(), ("left", "right"), strict=True):
        label.set_horizontalalignment(align)
    sheet.text(left, top - 0.06, "SQNR, dB: darker means more error", color=sheet.palette["muted"])


def map_cells(maps: tuple[HeatMap, ...]) -> str:
    """Return the maps' values for the page's script: only digits, base64 and the three projections' names."""
    document: dict[str, object] = {}
    for found in maps:
        hundredths = np.rint(100 * np.nan_to_num(found.values, nan=0.0, posinf=0.0, neginf=0.0))
        cells = np.where(np.isposinf(found.values), _EXACT_CELL, np.clip(hundredths, 1, _EXACT_CELL - 1))
        values = np.where(np.isnan(found.values), _NO_CELL, cells).astype("<u2").tobytes()
        document[found.projection] = {
            "layers": list(found.layers),
            "experts": found.num_experts,
            "values": base64.b64encode(values).decode(),
        }
    return json.dumps(document, separators=(",", ":"))
