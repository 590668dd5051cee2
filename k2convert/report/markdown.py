"""report.md: the same figures for a model card, as tables under headings of the second level.

The picture is linked by its relative name, so both files must be in the same folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from k2convert.fit.needs import COLUMNS
from k2convert.report import calibration, content, feedback, pruning
from k2convert.report.checks import LAYER_COLUMNS, Checks
from k2convert.report.figures import Report

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")
_NUM_WORST = 8


def render_markdown(report: Report, checks: Checks | None, *, page: str, picture: str | None) -> str:
    """Return the whole Markdown text. `page` and `picture` are the names of files in the same folder."""
    parts = [
        "## What the conversion changed",
        "SQNR and relative error are over all converted weights. The error is compared on a sample of every tensor's "
        "blocks with plain (max calibration, the usual recipe) and with the bound (no choice of scales, even "
        "real-valued, can do better).",
        _table(content.role_columns(report), content.role_rows(report)),
    ]
    if picture is not None:
        parts.append(f"![SQNR by tensor, layer and expert]({picture})")
    parts.append(content.caution(report).replace("q * s", "`q * s`"))
    parts += [f"> {escape(sentence)}" for sentence in report.missing]
    rows = [(c.label, c.value, c.share, c.meaning) for c in content.counts(report.total)]
    parts += ["### Counts", _table(("", "", "share", ""), rows)]
    if (pruned := report.provenance.pruning) is not None:
        parts += ["### Pruned experts", *map(escape, pruning.sentences(pruned, checks))]
        columns, shares = pruning.layer_table(pruned, checks)
        parts += [_table(columns, shares)] if shares else []
    if (found := report.provenance.calibration) is not None:
        parts += ["### Calibration", *map(escape, calibration.sentences(found))]
        parts.append(_table(calibration.LAYER_COLUMNS, calibration.layer_rows(found)))
        if rows := feedback.layer_rows(found):
            parts += ["### Rule feedback", *map(escape, feedback.sentences(found))]
            parts.append(_table(feedback.LAYER_COLUMNS, rows))
    if report.worst:
        worst = report.worst[:_NUM_WORST]
        rows = [(t.place or t.module, *row) for t, row in zip(worst, content.worst_rows(worst), strict=True)]
        parts += ["### Worst tensors", _table(content.WORST_COLUMNS, rows)]
    if checks is not None:
        parts += _contract(checks)
    if report.needs is not None:
        parts += ["### Needs", escape(report.needs.summary), _table(COLUMNS, report.needs.rows), report.needs.note]
    parts += ["### Provenance", _table(("", ""), content.made_by(report), code_from=1)]
    parts.append(f"Every tensor, with charts: [{page}]({page}).")
    return "\n\n".join(parts) + "\n"


def _contract(checks: Checks) -> list[str]:
    rows = [
        (str(rule.number), rule.verdict, f"{rule.count:,}" if rule.count else "", rule.title) for rule in checks.rules
    ]
    parts = ["### Servable contract", _table(("rule", "verdict", "count", "what must hold"), rows)]
    parts += [escape(sentence) for sentence in checks.sentences]
    if checks.layers:
        parts += [
            "### Reference layers",
            f"Error of the output of MoE blocks against {checks.against} in FP32. Hidden states: "
            f"{escape(checks.hidden_states)}.",
            _table(LAYER_COLUMNS, checks.layers),
        ]
    return parts


def escape(text: str) -> str:
    """Escape text from a checkpoint or recipe, so that Markdown shows it unchanged."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())).replace(r"\<", "&lt;").replace(r"\&", "&amp;")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, code_from: int | None = None) -> str:
    lines = [_line(columns), "|" + " --- |" * len(columns)]
    for row in rows:
        cells = [
            _code(cell) if code_from is not None and i >= code_from else escape(cell) for i, cell in enumerate(row)
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    plain = " ".join(text.split())
    return f"`{plain}`" if re.fullmatch(r"[^`|<&\\]+", plain) else escape(plain)
