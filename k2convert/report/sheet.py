"""A figure laid out in inches from its top left corner, and its way into a page or a picture.

Charts are matplotlib's, drawn as SVG: they stay sharp at any size, their text is text, their colours can follow the
page from light to dark, and the page needs no script to show them. plotly was the alternative; its library alone is
4.5 MB in every report, several times all figures of a trillion weights. Each chart is drawn twice, wide and narrow,
because one drawing scaled to a telephone cannot be read.
"""

# matplotlib leaves its keyword arguments untyped, which makes every call of it "partially unknown".
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from io import StringIO

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from numpy.typing import NDArray

from k2convert.report.palette import Palette, with_variables

FONT_SIZE = 9.0
_PROLOGUE = re.compile(r"^.*?(?=<svg )", re.DOTALL)
_GROUP_ID = re.compile(r'<g id="[^"]*"')
_SIZE = re.compile(r'(<svg [^>]*?) (?:width|height)="[^"]*pt"')
_METADATA = re.compile(r"<metadata>.*?</metadata>|<style .*?</style>", re.DOTALL)


class Sheet:
    """One figure; every measure is in inches, `top` downwards from the upper edge."""

    def __init__(self, width: float, height: float, palette: Palette) -> None:
        self.palette = palette
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), facecolor="none")

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes with their upper left corner at (left, top), in this project's plain dress."""
        bottom = self.height - top - height
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(place)
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_color(self.palette.line)
        axes.tick_params(colors=self.palette.muted, which="both", labelsize=FONT_SIZE - 1, width=0.6)
        axes.xaxis.label.set(color=self.palette.muted, fontsize=FONT_SIZE)
        axes.yaxis.label.set(color=self.palette.muted, fontsize=FONT_SIZE)
        return axes

    def text(
        self, left: float, top: float, text: str, *, colour: str = "", align: str = "left", weight: str = "normal"
    ) -> None:
        """One line of text on the baseline `top`."""
        self.figure.text(
            left / self.width,
            1 - top / self.height,
            text,
            color=colour or self.palette.ink,
            ha=align,
            va="baseline",
            fontsize=FONT_SIZE,
            fontweight=weight,
        )


def to_svg(figure: Figure, *, name: str, label: str) -> str:
    """The figure as an inline SVG that follows the page's colours; the same figure always gives the same text.

    `name` keeps the ids of several charts on one page apart, `label` says to a screen reader what is drawn.
    """
    target = StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "svg.image_inline": True}):
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None})
    svg = _METADATA.sub("", _PROLOGUE.sub("", target.getvalue(), count=1))
    svg = _GROUP_ID.sub("<g", _SIZE.sub(r"\1", _SIZE.sub(r"\1", svg, count=1), count=1))
    return with_variables(svg).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def to_rgb(figure: Figure, *, dpi: int) -> NDArray[np.uint8]:
    """The figure as pixels on white, [height, width, 3]."""
    figure.set_facecolor("white")
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3]
