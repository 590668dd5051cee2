"""report.png: the charts for a model card, on white, under the headline figures."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from k2convert.report.charts import draw_block_scales, draw_distribution, draw_layer_errors, has_distribution
from k2convert.report.content import headline
from k2convert.report.drawing import LEFT, LIGHT, Sheet, to_rgb
from k2convert.report.figures import Report
from k2convert.report.heat_map import draw_heat_maps

DPI = 150
_MARGIN = 24


def render_picture(report: Report) -> bytes | None:
    """Return a PNG of the charts, or None if no figures of single tensors are known."""
    if not report.maps or not has_distribution(report):
        return None
    left = [draw_distribution(report, LIGHT), draw_block_scales(report.total.scale_histogram, LIGHT)]
    if (found := report.ledger.calibration) is not None and found.held_out:
        left.append(draw_layer_errors(found.held_out, LIGHT))
    columns = [_stacked(left), _stacked([draw_heat_maps(report.maps, LIGHT)])]
    height = max(len(column) for column in columns)
    charts = np.hstack([_padded(column, bottom=height - len(column), right=_MARGIN) for column in columns])
    title = _stacked([_draw_title(report, width=charts.shape[1] / DPI)])
    stacked = np.vstack([title[:, : charts.shape[1]], charts])
    framed = np.pad(stacked, ((_MARGIN, _MARGIN), (_MARGIN, _MARGIN), (0, 0)), constant_values=255)
    target = BytesIO()
    # 256 colors are enough for color map, lines and text, and take a third of the bytes.
    few = Image.fromarray(framed).quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(target, format="PNG", optimize=True)
    return target.getvalue()


def _stacked(figures: list[Figure]) -> NDArray[np.uint8]:
    return np.vstack([to_rgb(figure, dpi=DPI) for figure in figures])


def _padded(pixels: NDArray[np.uint8], *, bottom: int, right: int) -> NDArray[np.uint8]:
    return np.pad(pixels, ((0, bottom), (0, right), (0, 0)), constant_values=255)


def _draw_title(report: Report, *, width: float) -> Figure:
    sheet = Sheet(0.5, LIGHT, width=width)
    words = [f"{tile.value} {tile.label}" for tile in headline(report, None)[:3]]
    sheet.text(LEFT, 0.22, f"INT4 to NVFP4, rule {report.rule}: " + ",  ".join(words), bold=True)
    return sheet.figure
