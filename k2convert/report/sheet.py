"""A figure laid out in inches from its top left corner, and its conversion to SVG or pixels.

Charts are drawn by matplotlib as SVG: they are sharp at any size, their text is text, their colors follow light and
dark mode, and the page shows them without a script. plotly was the alternative, but its library adds 4.5 MB to every
report, several times the size of all figures of a trillion weights. Each chart is drawn twice, wide and narrow: a wide
chart scaled to a phone cannot be read.
"""

# matplotlib does not type its keyword arguments, so every call is "partially unknown".
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
    """One figure. All lengths are in inches; `top` is measured from the upper edge."""

    def __init__(self, width: float, height: float, palette: Palette) -> None:
        self.palette = palette
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), facecolor="none")

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add plain axes with their upper left corner at (left, top)."""
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
        self, left: float, top: float, text: str, *, color: str = "", align: str = "left", weight: str = "normal"
    ) -> None:
        """Add one line of text with its baseline at `top`."""
        self.figure.text(
            left / self.width,
            1 - top / self.height,
            text,
            color=color or self.palette.ink,
            ha=align,
            va="baseline",
            fontsize=FONT_SIZE,
            fontweight=weight,
        )


def to_svg(figure: Figure, *, name: str, label: str) -> str:
    """Return the figure as inline SVG in the page's colors. The same figure always gives the same text.

    `name` makes the ids of a chart unique on the page, `label` describes the chart to screen readers.
    """
    target = StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "svg.image_inline": True}):
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None})
    svg = _METADATA.sub("", _PROLOGUE.sub("", target.getvalue(), count=1))
    svg = _GROUP_ID.sub("<g", _SIZE.sub(r"\1", _SIZE.sub(r"\1", svg, count=1), count=1))
    return with_variables(svg).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def to_rgb(figure: Figure, *, dpi: int) -> NDArray[np.uint8]:
    """Return the figure as pixels on white, uint8 [height, width, 3]."""
    figure.set_facecolor("white")
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3]
