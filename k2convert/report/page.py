"""report.html: one self-contained file for any screen, light or dark, without network.

Jinja2 escapes every name and figure. Only our own style, script and charts are marked safe; the charts contain numbers
and no names from a checkpoint. The page's security policy allows only this script, by its hash, and no requests, so
even a name that was not escaped could not run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from importlib import resources

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from k2convert.fit.needs import COLUMNS
from k2convert.report import calibration as calibration_words
from k2convert.report import content, feedback, pruning
from k2convert.report.calibration_charts import draw_exponents, draw_tokens
from k2convert.report.charts import draw_block_scales, draw_distribution, has_distribution
from k2convert.report.checks import LAYER_COLUMNS, Checks
from k2convert.report.feedback_charts import draw_layer_errors, draw_shrinkages
from k2convert.report.figures import HeatMap, Report
from k2convert.report.heat_map import MAP_ID, color_scale, draw_heat_maps
from k2convert.report.palette import DARK, LIGHT, THEMED, css_variables
from k2convert.report.sheet import to_svg

_NO_CELL, _EXACT_CELL = 0, 0xFFFF
_MAP_IMAGE = re.compile(rf'<image (?=[^>]*id="{MAP_ID}(\w+))')


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart, drawn for a wide and for a narrow page."""

    wide: Markup
    narrow: Markup


def _with_code(text: str) -> Markup:
    """Return a sentence with what is between backticks as code."""
    parts = text.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def render_page(report: Report, checks: Checks | None) -> str:
    """Return the whole HTML document. The same report always gives the same text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["code"] = _with_code
    template = environment.from_string(_text("page.html.jinja"))
    # The digest is of exactly the text between the script tags. Our script contains no closing tag.
    script = _text("page.js")
    calibration, pruned = report.provenance.calibration, report.provenance.pruning
    pruning_columns, pruning_rows = pruning.layer_table(pruned, checks) if pruned else ([], [])
    return template.render(
        name=page_name(report),
        made_on=report.made_on,
        rule=report.rule,
        keywords=_keywords(report),
        style=Markup(_style()),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        tiles=content.headline(report, checks),
        caution=content.caution(report),
        missing=report.missing,
        num_tensors=f"{len(report.tensors):,}",
        charts=_charts(report),
        span=_span(report.maps),
        counts=content.counts(report.total),
        calibration=calibration,
        calibration_sentences=calibration_words.sentences(calibration) if calibration else (),
        calibration_columns=calibration_words.LAYER_COLUMNS,
        calibration_rows=calibration_words.layer_rows(calibration) if calibration else [],
        feedback_sentences=feedback.sentences(calibration) if calibration else (),
        feedback_columns=feedback.LAYER_COLUMNS,
        feedback_rows=feedback.layer_rows(calibration) if calibration else [],
        pruning_sentences=pruning.sentences(pruned, checks) if pruned else (),
        pruning_columns=pruning_columns,
        pruning_rows=pruning_rows,
        role_columns=content.role_columns(report),
        role_rows=content.role_rows(report),
        worst=list(zip(report.worst, content.worst_rows(report.worst), strict=True)),
        worst_columns=content.WORST_COLUMNS,
        needs=report.needs,
        needs_columns=COLUMNS,
        checks=checks,
        layer_columns=LAYER_COLUMNS,
        made_by=content.made_by(report),
        digests=(
            ("Shards, blake3", report.provenance.shards),
            ("Source headers, blake3", report.provenance.source_headers),
        ),
        recipe=json.dumps(report.provenance.recipe, indent=2),
        cells=Markup(_cells(report.maps)),
    )


def page_name(report: Report) -> str:
    """Return the title of the report: the source's repository if known, else the name of the result or the recipe."""
    return report.provenance.repo or report.name or str(report.provenance.recipe.get("name", "unnamed recipe"))


def _keywords(report: Report) -> list[str]:
    recipe = report.provenance.recipe
    words = [recipe.get(key) for key in ("rule", "layout", "activations")]
    return [str(word) for word in words if word]


def _text(name: str) -> str:
    return resources.files("k2convert.report").joinpath(name).read_text(encoding="utf-8")


def _style() -> str:
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {css_variables(DARK)} }} }}"
    return f":root {{ color-scheme: light dark; {css_variables(LIGHT)} }}\n{dark}\n{_text('page.css')}"


def _charts(report: Report) -> dict[str, Chart | None]:
    def both(name: str, label: str, wide: Figure, narrow: Figure) -> Chart:
        return Chart(
            wide=Markup(to_svg(wide, name=f"{name}-wide", label=label)),
            narrow=Markup(to_svg(narrow, name=f"{name}-narrow", label=label)),
        )

    heat, distribution = (
        [draw_heat_maps(report.maps, palette=THEMED, is_narrow=n) for n in (False, True)] if report.maps else None,
        [draw_distribution(report, palette=THEMED, is_narrow=n) for n in (False, True)]
        if has_distribution(report)
        else None,
    )
    calibration = report.provenance.calibration
    tokens = [] if calibration is None else calibration_words.tokens_by_expert(calibration)
    is_weighted = calibration is not None and calibration.weighted
    channels = {} if calibration is None else calibration_words.channels_by_exponent(calibration)
    experts, scaled = (
        [draw_tokens(tokens, is_weighted=is_weighted, palette=THEMED, is_narrow=n) for n in (False, True)]
        if tokens
        else None,
        [draw_exponents(channels, palette=THEMED, is_narrow=n) for n in (False, True)] if any(channels) else None,
    )
    layers, held_out = feedback.layers_of(calibration), {} if calibration is None else calibration.held_out
    errors, shrinkages = (
        [draw_layer_errors(held_out, palette=THEMED, is_narrow=n) for n in (False, True)] if held_out else None,
        [draw_shrinkages(layers, palette=THEMED, is_narrow=n) for n in (False, True)] if layers else None,
    )
    scales = [draw_block_scales(report.total.scale_histogram, palette=THEMED, is_narrow=n) for n in (False, True)]
    return {
        "heat_map": _focusable(both("heat-map", "Heat maps of SQNR by layer and expert", *heat)) if heat else None,
        "distribution": both("distribution", "Histogram of SQNR over the tensors", *distribution)
        if distribution
        else None,
        "tokens": both("tokens", "Histogram of tokens by expert", *experts) if experts else None,
        "exponents": both("exponents", "Channels by power of two", *scaled) if scaled else None,
        "layer_errors": both("layer-errors", "Error of the hidden states after each layer", *errors)
        if errors
        else None,
        "shrinkages": both("shrinkages", "Experts of each layer by shrinkage", *shrinkages) if shrinkages else None,
        "block_scales": both("block-scales", "Histogram of block scales", *scales),
    }


def _focusable(chart: Chart) -> Chart:
    """Let the keyboard reach every map of a chart. A chart with parts to focus is a group, not one image."""

    def change(svg: Markup) -> Markup:
        label = r'role="img" tabindex="0" aria-describedby="readout" aria-label="SQNR of \1 by layer and expert'
        text = _MAP_IMAGE.sub(rf'<image {label}: arrow keys go from cell to cell" ', str(svg))
        return Markup(text.replace('<svg role="img"', '<svg role="group"', 1))

    return Chart(wide=change(chart.wide), narrow=change(chart.narrow))


def _span(maps: tuple[HeatMap, ...]) -> str:
    if not maps:
        return ""
    scale = color_scale(maps)
    return f"{scale.high - scale.low:.2f} dB"


def _cells(maps: tuple[HeatMap, ...]) -> str:
    """Return the maps' values for the script: only digits, base64 and the three projections' names."""
    document = {
        found.projection: {
            "layers": list(found.layers),
            "experts": found.num_experts,
            "values": base64.b64encode(_encode_values(found)).decode(),
        }
        for found in maps
    }
    return json.dumps(document, separators=(",", ":"))


def _encode_values(found: HeatMap) -> bytes:
    values = found.values
    hundredths = np.clip(np.rint(100 * np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)), 1, _EXACT_CELL - 1)
    cells = np.where(np.isposinf(values), _EXACT_CELL, hundredths)
    return np.where(np.isnan(values), _NO_CELL, cells).astype("<u2").tobytes()
