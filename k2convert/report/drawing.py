"""A drawing: lines, words and images in one coordinate system, as inline SVG or as pixels.

The page's SVG names its colors as variables, so it follows light and dark mode without a script. Pillow draws the same
shapes for report.png, which a model card can show. A plotting library would bring eight packages and save few lines.
Coordinates are in units of the SVG's view box, y downward: about the pixels of a telephone.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

WIDTH: Final = 400.0
SIZE: Final = 12.0  # of words
_MARGIN: Final = 12.0  # between the drawings of a PNG
_SCALE: Final = 4  # pixels of a unit while a PNG is drawn; the mean of 2 x 2 is written
_FILL_ALPHA: Final = 0.3

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


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points. With `is_filled` its inside has a light shade of the color."""

    points: Sequence[Point]
    color: Color
    width: float = 1.0
    is_filled: bool = False


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
        stops = np.linspace(0, len(_VIRIDIS) - 1, SHADES)
        channels = [np.interp(stops, range(len(_VIRIDIS)), channel) for channel in zip(*_VIRIDIS, strict=True)]
        shades = np.stack([*channels, np.full(SHADES, 255.0)], axis=-1).astype(np.uint8)
        image = Image.fromarray(self.cells).convert("P")
        image.putpalette(shades.tobytes() + bytes(4), "RGBA")
        return image


Shape = Line | Words | Picture


@dataclass(slots=True)
class Drawing:
    """Shapes on a sheet of WIDTH x `height`; `label` describes it to screen readers."""

    label: str
    height: float
    shapes: list[Shape] = field(default_factory=list[Shape])

    def add(self, *shapes: Shape) -> None:
        """Draw shapes over those that are there."""
        self.shapes += shapes


def css_palette() -> tuple[str, str]:
    """Return the declarations of the colors in light and in dark mode."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in PALETTE.items()) for i in range(2))
    return light, dark


def to_svg(drawing: Drawing) -> str:
    """Return the drawing as SVG in the page's colors."""
    parts = "".join(_svg(shape) for shape in drawing.shapes)
    box = f'viewBox="0 0 {WIDTH:g} {drawing.height:g}"'
    return f'<svg role="img" aria-label="{escape(drawing.label)}" {box} font-size="{SIZE:g}">{parts}</svg>'


def _svg(shape: Shape) -> str:
    match shape:
        case Line():
            fill = 'fill="none"'
            if shape.is_filled:
                fill = f'fill="var(--{shape.color})" fill-opacity="{_FILL_ALPHA}"'
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            stroke = f'stroke="var(--{shape.color})" stroke-width="{shape.width:g}"'
            return f'<polyline {stroke} {fill} points="{points}"/>'
        case Words():
            position = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" font-size="{shape.size:g}"'
            return f'<text fill="var(--{shape.color})" {position}>{escape(shape.text)}</text>'
        case Picture():
            target = BytesIO()
            shape.image().save(target, format="PNG", optimize=True)
            data = base64.b64encode(target.getvalue()).decode()
            position = f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"'
            way = "pixelated" if shape.width > shape.cells.shape[1] else "auto"  # smaller: no cell may be skipped
            style = f'preserveAspectRatio="none" image-rendering="{way}"'
            return f'<image {position} {style} href="data:image/png;base64,{data}"/>'


def to_png(columns: Sequence[Sequence[Drawing]]) -> bytes:
    """Return columns of drawings, from left to right, as one PNG on white."""
    width = _MARGIN + (WIDTH + _MARGIN) * len(columns)
    height = _MARGIN + max(sum(drawing.height + _MARGIN for drawing in column) for column in columns)
    image = Image.new("RGB", (int(_SCALE * width), int(_SCALE * height)), PALETTE["paper"][0])
    for i, column in enumerate(columns):
        top = _MARGIN
        for drawing in column:
            for shape in drawing.shapes:
                _paint(image, shape, left=_MARGIN + i * (WIDTH + _MARGIN), top=top)
            top += drawing.height + _MARGIN
    target = BytesIO()
    # 256 colors are enough for color map, lines and words, and take a third of the bytes.
    few = image.reduce(2).quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(target, format="PNG", optimize=True)
    return target.getvalue()


def _paint(image: Image.Image, shape: Shape, *, left: float, top: float) -> None:
    draw = ImageDraw.Draw(image, "RGBA")
    match shape:
        case Line():
            color = PALETTE[shape.color][0]
            points = [(_SCALE * (left + x), _SCALE * (top + y)) for x, y in shape.points]
            if shape.is_filled:
                draw.polygon(points, fill=f"{color}{int(255 * _FILL_ALPHA):02x}")
            draw.line(points, fill=color, width=round(_SCALE * shape.width), joint="curve")
        case Words():
            font = ImageFont.load_default(_SCALE * shape.size)
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
            position = (_SCALE * (left + shape.x), _SCALE * (top + shape.y))
            draw.text(position, shape.text, fill=PALETTE[shape.color][0], font=font, anchor=anchor)
        case Picture():
            position = (int(_SCALE * (left + shape.x)), int(_SCALE * (top + shape.y)))
            size = (int(_SCALE * shape.width), int(_SCALE * shape.height))
            cells = shape.image().convert("RGBA").resize(size, Image.Resampling.BOX)
            image.paste(cells, position, cells)
