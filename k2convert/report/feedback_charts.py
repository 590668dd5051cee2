"""Charts of rule `feedback`: the error after each layer, and the experts by shrinkage."""

# matplotlib does not type its keyword arguments, so every call is "partially unknown".
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from k2convert.records.calibration import FeedbackLayer, OutputErrors
from k2convert.report.feedback import shrinkages_by_layer
from k2convert.report.formatting import short_count
from k2convert.report.palette import Palette
from k2convert.report.sheet import FONT_SIZE, Sheet

_LEAST_ALPHA = 0.2  # of the bars with most shrinkage, which is the least feedback


def draw_layer_errors(layers: Mapping[int, OutputErrors], *, palette: Palette, is_narrow: bool) -> Figure:
    """Draw the held-out error after each MoE layer: as converted, by rule `optimal` there, from earlier layers alone.

    The scale is logarithmic, so an error of zero is not drawn. The first MoE layer inherits none.
    """
    width, height, left, top = (3.6, 3.1, 0.86, 0.72) if is_narrow else (9.5, 3.0, 0.86, 0.34)
    sheet = Sheet(width, height, palette)
    axes = sheet.axes(left, top, width - left - 0.1, height - top - 0.5)
    numbers = list(layers)
    for label, key, color, style, marker in (
        ("with rule optimal in the layer", "optimal_error", palette.optimal, (0, (5, 2)), "s"),
        ("this: feedback", "feedback_error", palette.ours, "solid", "o"),
        ("from earlier layers alone", "inherited_error", palette.muted, (0, (1, 1.5)), "^"),
    ):
        errors = np.array([getattr(layer, key) for layer in layers.values()], dtype=np.float64)
        drawn = np.where(errors > 0, errors, np.nan)
        axes.plot(numbers, drawn, color=color, linestyle=style, linewidth=1.3, marker=marker, markersize=3, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain_number))
    axes.minorticks_off()
    axes.set_ylabel("relative error")
    axes.set_xlabel("after MoE layer" if is_narrow else "after MoE layer; lower means closer to the INT4 model")
    _finish(axes, numbers, palette, columns=1 if is_narrow else 3)
    return sheet.figure


def draw_shrinkages(layers: Mapping[int, FeedbackLayer], *, palette: Palette, is_narrow: bool) -> Figure:
    """Draw the number of experts of each MoE layer by the shrinkage of their down projection."""
    width, height, left, top = (3.6, 2.9, 0.66, 0.56) if is_narrow else (9.5, 2.7, 0.66, 0.34)
    sheet = Sheet(width, height, palette)
    axes = sheet.axes(left, top, width - left - 0.1, height - top - 0.5)
    numbers, found = list(layers), shrinkages_by_layer(layers)
    shades = np.linspace(1.0, _LEAST_ALPHA, max(len(found.keys() - {None}), 2)).tolist()
    bottom = np.zeros(len(numbers))
    for (shrinkage, counts), shade in zip(found.items(), [*shades, 1.0], strict=False):
        label, color, alpha = (
            ("no feedback", palette.warn, 1.0) if shrinkage is None else (f"{shrinkage:g}", palette.ours, shade)
        )
        axes.bar(numbers, counts, bottom=bottom, color=color, alpha=alpha, width=0.8, linewidth=0, label=label)
        bottom += np.array(counts)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(short_count))
    axes.set_ylabel("experts")
    axes.set_xlabel("MoE layer" if is_narrow else "MoE layer; experts by the shrinkage of their down projection")
    _finish(axes, numbers, palette, columns=3 if is_narrow else 6)
    return sheet.figure


def _plain_number(value: float, _position: object = None) -> str:
    return f"{value:g}"


def _finish(axes: Axes, numbers: list[int], palette: Palette, *, columns: int) -> None:
    """Show whole layers on the axis, and the legend above it."""
    axes.set_xlim(min(numbers) - 0.6, max(numbers) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=FONT_SIZE,
        labelcolor=palette.muted,
        borderpad=0.1,
        borderaxespad=0.2,
        labelspacing=0.25,
    )
