"""Charts of the calibration: tokens an expert, and channels by the power of two that scaled them."""

# matplotlib does not type its keyword arguments, so every call is "partially unknown".
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from k2convert.calibrate.columns import MIN_TOKENS
from k2convert.report.formatting import power_of_two, short_count
from k2convert.report.palette import Palette
from k2convert.report.sheet import FONT_SIZE, Sheet

_BINS_A_DOUBLING = 4
_ZERO_LOG2 = -1.0  # where experts without tokens are drawn


def draw_tokens(tokens: Sequence[int], *, is_weighted: bool, palette: Palette, is_narrow: bool) -> Figure:
    """Draw the number of experts by the tokens that they saw.

    If errors were weighted, there is a limit below which an expert has too few.
    """
    width, height, left = (3.6, 2.8, 0.66) if is_narrow else (9.5, 2.9, 0.66)
    sheet = Sheet(width, height, palette)
    axes = sheet.axes(left, 0.34, width - left - 0.1, height - 0.34 - 0.5)
    counts = np.array(tokens, dtype=np.float64)
    logs = np.where(counts > 0, np.log2(np.maximum(counts, 1)), _ZERO_LOG2)
    low = np.floor(min(float(logs.min()), np.log2(MIN_TOKENS) - 1))
    high = max(float(np.ceil(logs.max())), np.log2(MIN_TOKENS)) + 0.5
    edges = np.arange(low, high + 1 / _BINS_A_DOUBLING, 1 / _BINS_A_DOUBLING)
    axes.stairs(np.histogram(logs, edges)[0], edges, fill=True, color=palette.ours, linewidth=0)
    limit = float(np.log2(MIN_TOKENS))
    if is_weighted:
        axes.axvspan(edges[0], limit, color=palette.warn, alpha=0.1, linewidth=0)
        axes.axvline(limit, color=palette.warn, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xlim(edges[0], edges[-1])
    step = 2 if high - low > (8 if is_narrow else 16) else 1
    ticks = [tick for tick in range(int(np.ceil(low)), int(high) + 1) if tick >= 0 and tick % step == 0]
    has_zero = bool((counts == 0).any())
    if has_zero:
        axes.set_xticks([_ZERO_LOG2 + 0.5 / _BINS_A_DOUBLING, *ticks], ["0", *map(_tokens, ticks)])
    else:
        axes.set_xticks(ticks, [*map(_tokens, ticks)])
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(short_count))
    axes.set_ylabel("experts")
    axes.set_xlabel("tokens that the expert saw")
    if is_weighted:
        place = left + (width - left - 0.1) * (limit - edges[0]) / (edges[-1] - edges[0])
        text = f"{MIN_TOKENS} tokens" if is_narrow else f"from {MIN_TOKENS} tokens on, the importance is as measured"
        shift, align = (-0.05, "right") if place > width / 2 else (0.05, "left")
        sheet.text(place + shift, 0.27, text, color=palette.warn, align=align)
    return sheet.figure


def _tokens(log2: int) -> str:
    return f"{2**log2}" if log2 < 10 else f"{2 ** (log2 - 10):,}k"


def draw_exponents(channels: Mapping[int, int], *, palette: Palette, is_narrow: bool) -> Figure:
    """Draw the number of channels by the power of two in the norm."""
    width, height, left = (3.6, 2.6, 0.66) if is_narrow else (9.5, 2.7, 0.66)
    sheet = Sheet(width, height, palette)
    axes = sheet.axes(left, 0.2, width - left - 0.1, height - 0.2 - 0.5)
    most = max(map(abs, channels), default=1) or 1
    exponents = list(range(-most, most + 1))
    counts = [channels.get(exponent, 0) for exponent in exponents]
    colors = [palette.ours if exponent else palette.muted for exponent in exponents]
    axes.bar(exponents, counts, color=colors, width=0.8)
    axes.set_yscale("log")
    axes.set_ylim(0.7, max(counts) * 3)
    for exponent, count in zip(exponents, counts, strict=True):
        if count:
            text = short_count(count) if is_narrow else f"{count:,}"
            axes.text(exponent, count * 1.15, text, ha="center", fontsize=FONT_SIZE - 1, color=palette.muted)
    axes.set_xticks(exponents, [power_of_two(exponent) if exponent else "not scaled" for exponent in exponents])
    if is_narrow:
        axes.set_xticks(exponents, [power_of_two(exponent) for exponent in exponents])
    axes.yaxis.set_major_formatter(FuncFormatter(short_count))
    axes.minorticks_off()
    axes.set_ylabel("channels")
    axes.set_xlabel("power of two in the norm")
    return sheet.figure
