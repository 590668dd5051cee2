"""A drawing: lines, areas, words and images in one coordinate system, as inline SVG or as pixels.

The page's SVG has classes for colors, so it follows light and dark mode without a script. Pillow draws the same shapes
for report.png, which a model card can show. A plotting library would bring eight packages and save few lines.
Coordinates are in units of the SVG's view box, y downward: about the pixels of a telephone.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

WIDTH: Final = 400.0
SIZE: Final = 12.0  # of words
_SCALE: Final = 4  # pixels of a unit while a PNG is drawn; the mean of 2 x 2 is written
_AREA_ALPHA: Final = 0.3

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


def _palette() -> bytes:
    """Return the colors of the cells, RGBA: all shades, then a transparent one."""
    places = np.linspace(0, len(_VIRIDIS) - 1, SHADES)
    channels = [np.interp(places, range(len(_VIRIDIS)), channel) for channel in zip(*_VIRIDIS, strict=True)]
    shades = np.stack([*channels, np.full(SHADES, 255.0)], axis=-1)
    return shades.astype(np.uint8).tobytes() + bytes(4)


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points; `dash` are lengths on and off, empty for a solid line."""

    points: Sequence[Point]
    color: Color
    width: float = 1.0
    dash: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Area:
    """A polygon, filled with a light shade of a color."""

    points: Sequence[Point]
    color: Color


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
        image = Image.fromarray(self.cells).convert("P")
        image.putpalette(_palette(), "RGBA")
        return image


@dataclass(slots=True)
class Drawing:
    """Shapes on a sheet of WIDTH x `height`; `label` describes it to screen readers."""

    label: str
    height: float
    shapes: list[Line | Area | Words | Picture] = field(default_factory=list[Line | Area | Words | Picture])

    def add(self, *shapes: Line | Area | Words | Picture) -> None:
        """Draw shapes over those that are there."""
        self.shapes += shapes


def css_palette() -> tuple[str, str, str]:
    """Return the declarations of the colors in light and dark mode, and the rules of the classes that charts use."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in PALETTE.items()) for i in range(2))
    return light, dark, " ".join(f".f-{c} {{ fill: var(--{c}) }} .s-{c} {{ stroke: var(--{c}) }}" for c in PALETTE)


def to_svg(drawing: Drawing) -> str:
    """Return the drawing as SVG in the page's colors."""
    parts = "".join(_svg(shape) for shape in drawing.shapes)
    box = f'viewBox="0 0 {WIDTH:g} {drawing.height:g}"'
    return f'<svg role="img" aria-label="{escape(drawing.label)}" {box} font-size="{SIZE:g}">{parts}</svg>'


def _svg(shape: Line | Area | Words | Picture) -> str:
    match shape:
        case Line():
            dash = f' stroke-dasharray="{" ".join(f"{part:g}" for part in shape.dash)}"' if shape.dash else ""
            style = f'class="s-{shape.color}" fill="none" stroke-width="{shape.width:g}"{dash}'
            return f'<polyline {style} points="{_pairs(shape.points)}"/>'
        case Area():
            return f'<polygon class="f-{shape.color}" fill-opacity="{_AREA_ALPHA}" points="{_pairs(shape.points)}"/>'
        case Words():
            place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" font-size="{shape.size:g}"'
            return f'<text class="f-{shape.color}" {place}>{escape(shape.text)}</text>'
        case Picture():
            target = BytesIO()
            shape.image().save(target, format="PNG", optimize=True)
            data = base64.b64encode(target.getvalue()).decode()
            place = f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"'
            way = "pixelated" if shape.width > shape.cells.shape[1] else "auto"  # smaller: no cell may be skipped
            style = f'preserveAspectRatio="none" image-rendering="{way}"'
            return f'<image {place} {style} href="data:image/png;base64,{data}"/>'


def _pairs(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def to_png(columns: Sequence[Sequence[Drawing]]) -> bytes:
    """Return columns of drawings, from left to right, as one PNG on white."""
    margin = 12.0
    width = margin + (WIDTH + margin) * len(columns)
    height = margin + max(sum(drawing.height + margin for drawing in column) for column in columns)
    image = Image.new("RGB", (int(_SCALE * width), int(_SCALE * height)), PALETTE["paper"][0])
    for i, column in enumerate(columns):
        top = margin
        for drawing in column:
            _paint(image, drawing, left=margin + i * (WIDTH + margin), top=top)
            top += drawing.height + margin
    target = BytesIO()
    # 256 colors are enough for color map, lines and words, and take a third of the bytes.
    few = image.reduce(2).quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(target, format="PNG", optimize=True)
    return target.getvalue()


def _paint(image: Image.Image, drawing: Drawing, *, left: float, top: float) -> None:
    draw = ImageDraw.Draw(image, "RGBA")

    def scaled(points: Iterable[Point]) -> list[Point]:
        return [(_SCALE * (left + x), _SCALE * (top + y)) for x, y in points]

    for shape in drawing.shapes:
        match shape:
            case Line():
                for piece in _dashes(shape.points, shape.dash):
                    color = PALETTE[shape.color][0]
                    draw.line(scaled(piece), fill=color, width=round(_SCALE * shape.width), joint="curve")
            case Area():
                draw.polygon(scaled(shape.points), fill=f"{PALETTE[shape.color][0]}{int(255 * _AREA_ALPHA):02x}")
            case Words():
                font = ImageFont.load_default(_SCALE * shape.size)
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
                (place,) = scaled([(shape.x, shape.y)])
                draw.text(place, shape.text, fill=PALETTE[shape.color][0], font=font, anchor=anchor)
            case Picture():
                ((x, y),) = scaled([(shape.x, shape.y)])
                size = int(_SCALE * shape.width), int(_SCALE * shape.height)
                cells = shape.image().convert("RGBA").resize(size, Image.Resampling.BOX)
                image.paste(cells, (int(x), int(y)), cells)


def _dashes(points: Sequence[Point], dash: tuple[float, ...]) -> Iterable[list[Point]]:
    """Yield the pieces of a dashed line; a dash ends where the line bends."""
    if not dash:
        yield list(points)
        return
    begin = 0.0
    for (x0, y0), (x1, y1) in pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        while begin < length:
            ends = begin / length, min(begin + dash[0], length) / length
            yield [(x0 + (x1 - x0) * share, y0 + (y1 - y0) * share) for share in ends]
            begin += sum(dash)
        begin -= length
