"""Colors of the charts by meaning: fixed colors for a picture, CSS variables for the page."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

COLOR_MAP = "viridis"  # perceptually uniform, safe for color-blind readers, and distinct from both backgrounds


@dataclass(frozen=True, slots=True)
class Palette:
    """One color per meaning. `paper` is the background, `empty` is a map's cell without a tensor."""

    ink: str
    muted: str
    line: str
    paper: str
    empty: str
    ours: str
    plain: str
    bound: str
    optimal: str
    warn: str


LIGHT = Palette(
    ink="#1b2430",
    muted="#5c6773",
    line="#d5dbe1",
    paper="#ffffff",
    empty="#e9edf0",
    ours="#2563c9",
    plain="#c2571a",
    bound="#18835a",
    optimal="#7a4fb5",
    warn="#b3261e",
)
DARK = Palette(
    ink="#e8edf2",
    muted="#9aa7b4",
    line="#37424d",
    paper="#12171c",
    empty="#232b33",
    ours="#6ea8ff",
    plain="#f09a5b",
    bound="#4ec795",
    optimal="#c3a3f2",
    warn="#ff8a80",
)
# Colors that nothing else uses. The SVG backend writes them, then they are replaced by variables.
THEMED = Palette(*(f"#0a0b{i:02x}" for i in range(len(fields(Palette)))))

_VARIABLES = {getattr(THEMED, field.name): f"var(--{field.name})" for field in fields(Palette)}
_THEMED_COLOR = re.compile("|".join(_VARIABLES))


def with_variables(svg: str) -> str:
    """Replace the themed colors of an SVG by CSS variables, so that it follows light and dark mode."""
    return _THEMED_COLOR.sub(lambda match: _VARIABLES[match[0]], svg)


def css_variables(palette: Palette) -> str:
    """Return the declarations of a palette's variables, for a CSS rule."""
    return " ".join(f"--{field.name}: {getattr(palette, field.name)};" for field in fields(palette))
