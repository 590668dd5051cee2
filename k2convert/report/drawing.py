"""The paper of the charts: colors by meaning, a figure laid out in inches, and its conversion to SVG or pixels.

Charts are drawn by matplotlib as SVG: they are sharp at any size, their text is text, their colors follow light and
dark mode, and the page shows them without a script. plotly was the alternative, but its library adds 4.5 MB to every
report, several times the size of all figures of a trillion weights. Each chart is drawn once, as wide as a phone's
screen: the page enlarges it on wider screens, up to twice.
"""

# matplotlib does not type its keyword arguments, so every call is "partially unknown".
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Mapping
from io import StringIO

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from numpy.typing import NDArray

WIDTH = 4.9  # inches of every chart; 353 of the SVG's units, about the pixels of a phone's width
LEFT, RIGHT = 0.74, 0.1  # of a plot's axes
FONT_SIZE = 9.5
_LABEL = 0.15  # from the left edge to the right side of a vertical axis's title
COLOR_MAP = "viridis"  # perceptually uniform, safe for color-blind readers, and distinct from both backgrounds
_PROLOGUE = re.compile(r"^.*?(?=<svg )", re.DOTALL)
_GROUP_ID = re.compile(r'<g id="[^"]*"')
_SIZE = re.compile(r'(<svg [^>]*?) (?:width|height)="[^"]*pt"')
_METADATA = re.compile(r"<metadata>.*?</metadata>|<style .*?</style>", re.DOTALL)


Palette = Mapping[str, str]
"""One color per meaning. `paper` is the background, `empty` is a map's cell without a tensor."""

_COLORS = {  # light, dark
    "ink": ("#1b2430", "#e8edf2"),
    "muted": ("#5c6773", "#9aa7b4"),
    "line": ("#d5dbe1", "#37424d"),
    "paper": ("#ffffff", "#12171c"),
    "empty": ("#e9edf0", "#232b33"),
    "ours": ("#2563c9", "#6ea8ff"),
    "max": ("#c2571a", "#f09a5b"),
    "good": ("#18835a", "#4ec795"),
    "mse": ("#7a4fb5", "#c3a3f2"),
    "warn": ("#b3261e", "#ff8a80"),
}
LIGHT, DARK = ({name: pair[i] for name, pair in _COLORS.items()} for i in range(2))
# Colors that nothing else uses. The SVG backend writes them, then they are replaced by variables.
THEMED = {name: f"#0a0b{i:02x}" for i, name in enumerate(_COLORS)}

_VARIABLES = {color: f"var(--{name})" for name, color in THEMED.items()}
_THEMED_COLOR = re.compile("|".join(_VARIABLES))


def css_variables(palette: Palette) -> str:
    """Return the declarations of a palette's variables, for a CSS rule."""
    return " ".join(f"--{name}: {color};" for name, color in palette.items())


class Sheet:
    """One figure as wide as every chart. All lengths are in inches; `top` is measured from the upper edge."""

    def __init__(self, height: float, palette: Palette, *, width: float = WIDTH) -> None:
        self.palette = palette
        self.width = width
        self.height = height
        self.figure = Figure(figsize=(width, height), facecolor="none")

    def plot(self, top: float) -> Axes:
        """Add the axes of a chart below `top`, with space for the labels of both axes."""
        width = self.width - LEFT - RIGHT
        axes = self.axes(LEFT, top, width, self.height - top - 0.5)
        axes.yaxis.set_label_coords((_LABEL - LEFT) / width, 0.5)  # where no label of a tick pushes it off the figure
        return axes

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add plain axes with their upper left corner at (left, top)."""
        bottom = self.height - top - height
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(place)
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_color(self.palette["line"])
        axes.tick_params(colors=self.palette["muted"], which="both", labelsize=FONT_SIZE - 1, width=0.6)
        axes.xaxis.label.set(color=self.palette["muted"], fontsize=FONT_SIZE)
        axes.yaxis.label.set(color=self.palette["muted"], fontsize=FONT_SIZE)
        return axes

    def text(
        self, left: float, top: float, text: str, *, color: str = "", align: str = "left", bold: bool = False
    ) -> None:
        """Add one line of text with its baseline at `top`."""
        self.figure.text(
            left / self.width,
            1 - top / self.height,
            text,
            color=color or self.palette["ink"],
            ha=align,
            va="baseline",
            fontsize=FONT_SIZE,
            fontweight="bold" if bold else "normal",
        )

    def label(self, axes: Axes, value: float, text: str, *, align: str) -> None:
        """Write a warning above a plot, next to the horizontal position of `value`."""
        low, high = axes.get_xlim()
        place = LEFT + (self.width - LEFT - RIGHT) * (value - low) / (high - low)
        self.text(place + (0.05 if align == "left" else -0.05), 0.27, text, color=self.palette["warn"], align=align)


def to_svg(figure: Figure, *, label: str) -> str:
    """Return the figure as inline SVG in the page's colors. The same figure always gives the same text.

    `label` describes the chart to screen readers, and makes its ids unique on the page.
    """
    target = StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": label, "svg.image_inline": True}):
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None})
    svg = _METADATA.sub("", _PROLOGUE.sub("", target.getvalue(), count=1))
    svg = _GROUP_ID.sub("<g", _SIZE.sub(r"\1", _SIZE.sub(r"\1", svg, count=1), count=1))
    svg = _THEMED_COLOR.sub(lambda match: _VARIABLES[match[0]], svg)  # variables follow light and dark mode
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def to_rgb(figure: Figure, *, dpi: int) -> NDArray[np.uint8]:
    """Return the figure as pixels on white, uint8 [height, width, 3]."""
    figure.set_facecolor("white")
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3]
