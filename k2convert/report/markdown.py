"""report.md: the figures of the page as Markdown, and how any Markdown is rendered from a template.

Every value that a template shows is escaped, so text of a checkpoint, a recipe or another card is shown unchanged and
does nothing. The filters of `render_template` make tables, sections and code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from k2convert.report.checks import Checks
from k2convert.report.content import caution, sections
from k2convert.report.figures import Report
from k2convert.report.wording import Section, Table

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def render_markdown(report: Report, checks: Checks | None, *, page: str, picture: str | None) -> str:
    """Return report.md. `page` and `picture` are the names of files in the same folder."""
    return render_template(
        "report.md.jinja",
        caution=caution(report),
        missing=report.missing,
        sections=[section for section in sections(report, checks) if section.tables or not section.charts],
        page=page,
        picture=picture,
    )


def render_template(file: str, **values: object) -> str:
    """Return a Markdown template filled in. Every value is escaped, except those of the filters below."""
    environment = Environment(undefined=StrictUndefined, finalize=_shown, trim_blocks=True, lstrip_blocks=True)
    filters = {"table": table, "section": section, "code": code, "raw": Markup, "url": _url}
    environment.filters.update(filters)  # pyright: ignore[reportArgumentType, reportCallIssue]
    template = environment.from_string(resources.files("k2convert.report").joinpath(file).read_text(encoding="utf-8"))
    return re.sub(r"\n{3,}", "\n\n", template.render(values)).strip() + "\n"


def _shown(value: object) -> object:
    return value if isinstance(value, Markup) or not isinstance(value, str) else sentence(value)


def sentence(text: str) -> str:
    """Return text with what is between backticks as code, and everything else escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return "".join(code(part) if i % 2 else escape(part) for i, part in enumerate(parts))


def escape(text: str) -> str:
    """Escape text from a checkpoint or recipe, so that Markdown shows it unchanged."""
    return _SPECIAL.sub(r"\\\1", re.sub(r"\s+", " ", text)).replace(r"\<", "&lt;").replace(r"\&", "&amp;")


def _url(text: str) -> Markup:
    """Return a name as part of an address."""
    return Markup(quote(text))


def code(text: str) -> Markup:
    """Return text as code, or as plain text if it has characters that would end the code."""
    plain = " ".join(text.split())
    return Markup(f"`{plain}`" if re.fullmatch(r"[^`|<&\\]+", plain) else escape(plain))


def section(found: Section, level: int, *, is_folded: bool = False, with_tables: bool = True) -> Markup:
    """Return a section under a heading; `is_folded` hides tables that have a summary until they are opened."""
    parts = [f"{'#' * level} {escape(found.title)}", *map(sentence, found.sentences)]
    for shown in found.tables if with_tables else ():
        text = table(shown)
        if is_folded and shown.summary:
            text = f"<details><summary>{escape(shown.summary)}</summary>\n\n{text}\n\n</details>"
        parts.append(text)
    return Markup("\n\n".join(parts))


def table(found: Table) -> Markup:
    """Return a table. Columns of numbers are aligned at the right."""
    alignments = ["---:" if found.is_numeric(i) else "---" for i in range(len(found.columns))]
    lines = [_line(map(escape, found.columns)), _line(alignments)]
    for row in found.rows:
        lines.append(_line(code(cell) if found.is_code and i else escape(cell) for i, cell in enumerate(row)))
    return Markup("\n".join(lines))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
