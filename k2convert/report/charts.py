"""Charts: the distribution of the tensors' errors, and the block scales that were used."""

# matplotlib does not type its keyword arguments, so every call is "partially unknown".
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from k2convert.report.figures import Report, TensorFigures, scale_value
from k2convert.report.formatting import power_of_two, short_count
from k2convert.report.palette import Palette
from k2convert.report.sheet import FONT_SIZE, Sheet

SMALLEST_NORMAL_LOG2 = -6
LARGEST = 448.0
_RANGE_LOG2 = (-9.6, 9.2)
_TAIL_DB = 0.5

Series = tuple[str, NDArray[np.float64], str]
"""Label, SQNR of every tensor, color."""


def has_distribution(report: Report) -> bool:
    """Return whether any tensor has a finite SQNR."""
    return any(np.isfinite(t.sqnr_db) for t in report.tensors)


def draw_distribution(report: Report, *, palette: Palette, is_narrow: bool) -> Figure:
    """Draw histograms of the tensors' SQNR: of this conversion, of `plain`, and of the bound."""
    width, height, left = (3.6, 2.9, 0.66) if is_narrow else (9.5, 3.0, 0.66)
    rows = 3 if is_narrow else 1
    top = 0.22 * rows + 0.08
    sheet = Sheet(width, height, palette)
    axes = sheet.axes(left, top, width - left - 0.1, height - top - 0.48)
    series = _series(report.tensors, report.rule, palette)
    everything = np.concatenate([values for _, values, _ in series])
    # A few broken tensors must not squeeze the rest: they are counted in the first bin, and the label says how many.
    low = max(float(everything.min()), min(float(np.percentile(v, 1)) for _, v, _ in series) - _TAIL_DB)
    high = float(everything.max())
    pad = 0.03 * max(high - low, 0.2)
    edges = np.linspace(low - pad, high + pad, 71 if is_narrow else 161)
    for i, (label, values, color) in enumerate(series):
        counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
        axes.stairs(counts, edges, fill=True, color=color, alpha=0.3, linewidth=0)
        axes.stairs(counts, edges, color=color, linewidth=1.2)
        median = f"{label}: median {statistics.median(values.tolist()):.2f} dB"
        if is_narrow:
            sheet.text(left, 0.16 + 0.22 * i, median, color=color, weight="bold")
        else:
            sheet.text(left + 3.0 * i, 0.16, median, color=color, weight="bold")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, axes.get_ylim()[1] * 1.2)
    _mark_gaps(axes, series, palette, share=0.25 if is_narrow else 0.1)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(_whole))
    axes.set_ylabel("tensors")
    beyond = sum(int((values < low).sum()) for _, values, _ in series)
    note = f"; {beyond:,} further left" if beyond else "" if is_narrow else ": further right means less error"
    axes.set_xlabel(f"SQNR of a tensor, dB{note}")
    return sheet.figure


def _series(tensors: Sequence[TensorFigures], rule: str, palette: Palette) -> list[Series]:
    ours = [t.sqnr_db for t in tensors]
    plain = [t.sqnr_plain_db for t in tensors if t.sqnr_plain_db is not None]
    bound = [t.sqnr_bound_db for t in tensors if t.sqnr_bound_db is not None]
    listed = [("plain", plain if rule != "plain" else [], palette.plain), (f"this: {rule}", ours, palette.ours)]
    listed.append(("bound", bound, palette.bound))
    arrays = [(label, np.array([v for v in values if np.isfinite(v)]), color) for label, values, color in listed]
    return [(label, values, color) for label, values, color in arrays if values.size]


def _mark_gaps(axes: Axes, series: Sequence[Series], palette: Palette, *, share: float) -> None:
    """Draw arrows between adjacent medians that differ by more than `share` of the axis."""
    low, high = axes.get_xlim()
    level = axes.get_ylim()[1] * 0.93
    medians = [statistics.median(values.tolist()) for _, values, _ in series]
    for left, right in pairwise(medians):
        if right - left < share * (high - low):
            continue
        style = {"arrowstyle": "<->", "color": palette.muted, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=(left, level), xytext=(right, level), arrowprops=style)
        text = f"{right - left:.2f} dB"
        middle = (left + right) / 2
        axes.text(middle, level * 0.985, text, ha="center", va="top", fontsize=FONT_SIZE - 1, color=palette.muted)


def draw_block_scales(histogram: Sequence[tuple[int, int]], *, palette: Palette, is_narrow: bool) -> Figure:
    """Draw the number of blocks by E4M3 block scale, with the limits of what every engine reads."""
    width, height, left = (3.6, 2.8, 0.66) if is_narrow else (9.5, 2.9, 0.66)
    sheet = Sheet(width, height, palette)
    axes = sheet.axes(left, 0.34, width - left - 0.1, height - 0.34 - 0.5)
    counts = dict(histogram)
    logs = np.log2([scale_value(byte) for byte in range(1, 0x80)])
    middles = (logs[1:] + logs[:-1]) / 2
    edges = [logs[0] - (middles[0] - logs[0]), *middles]
    axes.stairs([counts.get(byte, 0) for byte in range(1, 0x7F)], edges, fill=True, color=palette.ours, linewidth=0)
    most = max(counts.values(), default=1)
    axes.set_yscale("log")
    axes.set_ylim(0.7, most * 2.2)
    axes.set_xlim(*_RANGE_LOG2)
    axes.axvspan(_RANGE_LOG2[0], SMALLEST_NORMAL_LOG2, color=palette.warn, alpha=0.1, linewidth=0)
    for limit in (float(SMALLEST_NORMAL_LOG2), float(np.log2(LARGEST))):
        axes.axvline(limit, color=palette.warn, linewidth=1.0, linestyle=(0, (4, 3)))
    ticks = list(range(-9, 10, 3))
    axes.set_xticks(ticks, [power_of_two(t) for t in ticks])
    axes.set_ylabel("blocks")
    axes.set_xlabel("block scale (E4M3)")
    axes.yaxis.set_major_formatter(FuncFormatter(short_count))
    axes.minorticks_off()
    low, high = _RANGE_LOG2
    for value, text, align in (
        (SMALLEST_NORMAL_LOG2 - 0.1, "subnormal" if is_narrow else "subnormal: zero on Hopper", "right"),
        (SMALLEST_NORMAL_LOG2 + 0.1, "2⁻⁶" if is_narrow else "2⁻⁶, the smallest normal", "left"),
        (float(np.log2(LARGEST)), "448" if is_narrow else "448, the largest", "right"),
    ):
        place = left + (width - left - 0.1) * (value - low) / (high - low)
        sheet.text(place, 0.27, text, color=palette.warn, align=align)
    return sheet.figure


def _whole(value: float, _position: object = None) -> str:
    return f"{value:,.0f}"
