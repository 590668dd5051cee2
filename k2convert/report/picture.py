"""report.png: the charts for a model card, on white, under the headline figures."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from k2convert.report import content
from k2convert.report.charts import draw_distribution, has_distribution
from k2convert.report.feedback_charts import draw_layer_errors
from k2convert.report.figures import Report
from k2convert.report.heat_map import draw_heat_maps
from k2convert.report.palette import LIGHT
from k2convert.report.sheet import Sheet, to_rgb

DPI = 150
_MARGIN = 24


def render_picture(report: Report) -> bytes | None:
    """Return a PNG of the charts, or None if no figures of single tensors are known."""
    if not report.maps or not has_distribution(report):
        return None
    figures = [
        _draw_title(report),
        draw_distribution(report, palette=LIGHT, is_narrow=False),
        draw_heat_maps(report.maps, palette=LIGHT, is_narrow=False),
    ]
    if (found := report.provenance.calibration) is not None and found.held_out:
        figures.append(draw_layer_errors(found.held_out, palette=LIGHT, is_narrow=False))
    stacked = np.vstack([to_rgb(figure, dpi=DPI) for figure in figures])
    framed = np.pad(stacked, ((_MARGIN, _MARGIN), (_MARGIN, _MARGIN), (0, 0)), constant_values=255)
    target = BytesIO()
    # 256 colors are enough for color map, lines and text, and take a third of the bytes.
    few = Image.fromarray(framed).quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(target, format="PNG", optimize=True)
    return target.getvalue()


def _draw_title(report: Report) -> Figure:
    sheet = Sheet(9.5, 0.5, LIGHT)
    words = [f"{tile.value} {tile.label}" for tile in content.headline(report, None)[:3]]
    sheet.text(0.66, 0.22, f"INT4 to NVFP4, rule {report.rule}: " + ",  ".join(words), weight="bold")
    return sheet.figure
