"""report.html: one self-contained file for any screen, light or dark, without network; and report.png.

Jinja2 escapes every name and figure. Only our own style, script and charts are marked safe; the charts contain numbers
and no names from a checkpoint. The page's security policy allows only this script, by its hash, and no requests, so
even a name that was not escaped could not run.

The picture has the charts for a model card, on white, under the headline figures.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from io import BytesIO

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from k2convert.report.calibrated import channels_by_exponent, gptq_layers, tokens_by_expert
from k2convert.report.charts import (
    MAP_ID,
    draw_block_scales,
    draw_distribution,
    draw_divergences,
    draw_exponents,
    draw_heat_maps,
    draw_layer_errors,
    draw_layers,
    draw_positions,
    draw_shrinkages,
    draw_tokens,
    map_cells,
)
from k2convert.report.content import caution, headline, sections
from k2convert.report.drawing import DARK, LEFT, LIGHT, THEMED, Sheet, css_variables, to_rgb, to_svg
from k2convert.report.evaluated import is_routed, mode_rows
from k2convert.report.figures import Report

_MAP_IMAGE = re.compile(rf'<image (?=[^>]*id="{MAP_ID}(\w+))')


def render_page(report: Report) -> str:
    """Return the whole HTML document. The same report always gives the same text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)

    def with_code(text: str) -> Markup:
        parts = enumerate(text.split("`"))
        return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in parts)

    environment.filters["code"] = with_code
    # The digest is of exactly the text between the script tags. Our script contains no closing tag.
    script = _text("page.js")
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {css_variables(DARK)} }} }}"
    style = f":root {{ color-scheme: light dark; {css_variables(LIGHT)} }}\n{dark}\n{_text('page.css')}"
    recipe = report.ledger.recipe
    return environment.from_string(_text("page.html.jinja")).render(
        name=page_name(report),
        source_title=report.source_format.title,
        made_on=report.made_on,
        keywords=[recipe.rule, recipe.layout, recipe.activations],
        style=Markup(style),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        tiles=headline(report, report.checks),
        caution=caution(report),
        missing=report.missing,
        sections=list(sections(report)),
        charts=_charts(report),
        digests=(
            ("Shards, blake3", {name: shard.blake3 for name, shard in report.ledger.shards.items()}),
            ("Source headers, blake3", report.ledger.source.headers),
        ),
        recipe=json.dumps(recipe.document(), indent=2),
        cells=Markup(map_cells(report.maps)),
    )


def page_name(report: Report) -> str:
    """Return the title of the report: the source's repository if known, else the name of the result or the recipe."""
    return report.ledger.source.repo or report.name or report.ledger.recipe.name


def _text(name: str) -> str:
    return resources.files("k2convert.report").joinpath(name).read_text(encoding="utf-8")


def _charts(report: Report) -> dict[str, Markup]:
    """Return the charts by name, each with its description for screen readers."""
    found = {"block_scales": (draw_block_scales(report.total.scale_histogram, THEMED), "Histogram of block scales")}
    if report.has_distribution:
        found["distribution"] = draw_distribution(report, THEMED), "Histogram of SQNR over the tensors"
    if report.maps:
        found["heat_map"] = draw_heat_maps(report.maps, THEMED), "Heat maps of SQNR by layer and expert"
    if (record := report.ledger.calibration) is not None:
        if tokens := tokens_by_expert(record):
            figure = draw_tokens(tokens, THEMED, is_weighted=record.imatrix)
            found["tokens"] = figure, "Histogram of tokens by expert"
        if channels := channels_by_exponent(record):
            found["exponents"] = draw_exponents(channels, THEMED), "Channels by power of two"
        if record.held_out:
            figure = draw_layer_errors(record.held_out, THEMED)
            found["layer_errors"] = figure, "Error of the hidden states after each layer"
        if layers := gptq_layers(record):
            found["shrinkages"] = draw_shrinkages(layers, THEMED), "Experts of each layer by shrinkage of down"
    if report.evaluation is not None:
        rows = mode_rows(report.evaluation, report.ledger.recipe)
        found["divergences"] = draw_divergences(rows, THEMED), "Histogram of KL over the tokens"
        found["positions"] = draw_positions(rows, THEMED), "KL by position in the window"
        if any(row.layers for _, row in rows):
            found["hidden_errors"] = draw_layers(rows, THEMED, is_routing=False), "Relative error after each layer"
        if is_routed(rows):
            found["routing"] = draw_layers(rows, THEMED, is_routing=True), "Share of the same experts by layer"
    charts = {name: to_svg(figure, label=label) for name, (figure, label) in found.items()}
    if "heat_map" in charts:  # the keyboard reaches every map. A chart with parts to focus is a group, not one image
        label = r'role="img" tabindex="0" aria-describedby="readout" aria-label="SQNR of \1 by layer and expert'
        svg = _MAP_IMAGE.sub(rf'<image {label}: arrow keys go from cell to cell" ', charts["heat_map"])
        charts["heat_map"] = svg.replace('<svg role="img"', '<svg role="group"', 1)
    return {name: Markup(svg) for name, svg in charts.items()}


DPI = 150
_MARGIN = 24


def render_picture(report: Report) -> bytes | None:
    """Return a PNG of the charts, or None if no figures of single tensors are known."""
    if not report.has_picture:
        return None
    left = [draw_distribution(report, LIGHT), draw_block_scales(report.total.scale_histogram, LIGHT)]
    if (found := report.ledger.calibration) is not None and found.held_out:
        left.append(draw_layer_errors(found.held_out, LIGHT))
    if (evaluation := report.evaluation) is not None:
        left.append(draw_divergences(mode_rows(evaluation, report.ledger.recipe), LIGHT))
    columns = [_stacked(left), _stacked([draw_heat_maps(report.maps, LIGHT)])]
    height = max(len(column) for column in columns)
    pads = [((0, height - len(column)), (0, _MARGIN), (0, 0)) for column in columns]
    charts = np.hstack([np.pad(c, pad, constant_values=255) for c, pad in zip(columns, pads, strict=True)])
    sheet = Sheet(0.5, LIGHT, width=charts.shape[1] / DPI)
    words = ",  ".join(f"{tile.value} {tile.label}" for tile in headline(report, None)[:3])
    sheet.text(LEFT, 0.22, f"{report.source_format.title} to NVFP4, rule {report.rule}: {words}", bold=True)
    title = _stacked([sheet.figure])
    stacked = np.vstack([title[:, : charts.shape[1]], charts])
    framed = np.pad(stacked, ((_MARGIN, _MARGIN), (_MARGIN, _MARGIN), (0, 0)), constant_values=255)
    target = BytesIO()
    # 256 colors are enough for color map, lines and text, and take a third of the bytes.
    few = Image.fromarray(framed).quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(target, format="PNG", optimize=True)
    return target.getvalue()


def _stacked(figures: list[Figure]) -> NDArray[np.uint8]:
    return np.vstack([to_rgb(figure, dpi=DPI) for figure in figures])
