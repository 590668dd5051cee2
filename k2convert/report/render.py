"""One Markdown text for everybody: report.md is that text, report.html shows it with charts, the card has its sections.

Every value is escaped, so text of a checkpoint, a recipe or another card is shown unchanged and does nothing. The page
has no script, loads nothing, and its security policy allows neither: even a name that was not escaped could not run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape as escape_html
from importlib import resources
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

from k2convert.checkpoint.names import REPORT_PAGE_NAME, REPORT_PICTURE_NAME, REPORT_TEXT_NAME
from k2convert.errors import visible
from k2convert.report.charts import Drawing, Words, css_palette, draw_charts, to_png, to_svg
from k2convert.report.content import caution, headline, provenance, sections
from k2convert.report.figures import Report
from k2convert.report.wording import Section, Table

_SPECIAL: Final = re.compile(r"[\\`*_{}\[\]<>#|~&$]")
_FOLD: Final = re.compile(r"<details><summary>[^<>]*</summary>\s*|</details>\s*")
"""The only HTML in our Markdown."""


def render_report(report: Report) -> dict[str, bytes]:
    """Return the files of a report by name. The same report always gives the same bytes."""
    recipe = report.ledger.recipe
    words = f"rule {code(recipe.rule)}, layout {code(recipe.layout)}, {recipe.activations.upper()}"
    opening = (f"# {escape(report.title)}", f"k2convert's report of {report.made_on} (UTC): {words}.")
    text = render_text(report, opening)
    charts = draw_charts(report)
    return {
        REPORT_PAGE_NAME: render_page(report.title, text, charts).encode(),
        REPORT_TEXT_NAME: f"{text}\nWith charts: [{REPORT_PAGE_NAME}]({REPORT_PAGE_NAME}).\n".encode(),
        REPORT_PICTURE_NAME: render_picture(report, charts),
    }


def render_text(report: Report, opening: Iterable[str], advice: Iterable[str] = ()) -> str:
    """Return the Markdown text of a report or a model card: `opening` begins it, `advice` stands before the end."""
    blocks = [
        *opening,
        "\n".join(f"- **{escape(f.value)}** {escape(f.label)}: {escape(f.detail)}" for f in headline(report)),
        escape(caution(report)),
        *(f"> {sentence(line)}" for line in report.missing),
        f"![Headline figures and charts]({REPORT_PICTURE_NAME})",
        *(block for section in sections(report) for block in section_blocks(section)),
        *advice,
        *section_blocks(provenance(report)),
    ]
    return "\n\n".join(block.strip() for block in blocks if block.strip()) + "\n"


def section_blocks(section: Section) -> Iterator[str]:
    """Yield heading, sentences and tables."""
    yield f"## {escape(section.title)}"
    yield from map(sentence, section.sentences)
    yield from map(_table, section.tables)


def _table(table: Table) -> str:
    """Return a table, folded if it has a summary. Columns of numbers are aligned at the right."""
    alignments = ["---" if i in table.words else "---:" for i in range(len(table.columns))]
    rows = [[code(c) if table.is_code and i else escape(c) for i, c in enumerate(row)] for row in table.rows]
    lines = [[escape(column) for column in table.columns], alignments, *rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    if table.summary:
        return f"<details><summary>{escape(table.summary)}</summary>\n\n{text}\n\n</details>"
    return text


def escape(text: str) -> str:
    """Escape text from a checkpoint or recipe, so that Markdown shows it unchanged, in one line."""
    entities = {"<": "&lt;", "&": "&amp;"}
    text = visible(re.sub(r"\s+", " ", text))
    return _SPECIAL.sub(lambda match: entities.get(match[0], f"\\{match[0]}"), text)


def code(text: str) -> str:
    """Return text as code, or as plain text if it has characters that would end the code."""
    plain = visible(" ".join(text.split()))
    return f"`{plain}`" if re.fullmatch(r"[^`|<&\\]+", plain) else escape(plain)


def sentence(text: str) -> str:
    """Return text with what is between backticks as code, and everything else escaped."""
    if len(parts := text.split("`")) % 2 == 0:
        return escape(text)
    return "".join(code(part) if i % 2 else escape(part) for i, part in enumerate(parts))


def render_page(title: str, text: str, charts: Sequence[Drawing]) -> str:
    """Return a Markdown text as a whole HTML document, with the charts in place of the picture."""
    markdown = MarkdownIt("commonmark").enable("table")
    for name, rule in _RENDER_RULES.items():
        markdown.add_render_rule(name, rule)
    body = markdown.render(text, {"charts": "".join(map(to_svg, charts))})
    light, dark = css_palette()
    css = resources.files("k2convert.report").joinpath("page.css").read_text(encoding="utf-8")
    style = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{css}"
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<title>{escape_html(visible(title))}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}</main>
</body>
</html>
"""


def _html(_: object, tokens: Sequence[Token], index: int, *__: object) -> str:
    content = tokens[index].content
    return content if _FOLD.fullmatch(content) else escape_html(content)


def _image(_: object, tokens: Sequence[Token], index: int, __: object, page: Mapping[str, str]) -> str:
    is_ours = tokens[index].attrGet("src") == REPORT_PICTURE_NAME
    return f'<span class="charts">{page["charts"]}</span>' if is_ours else ""


def _cell_open(_: object, tokens: Sequence[Token], index: int, *__: object) -> str:
    """A cell with a class instead of a style, which the policy forbids."""
    is_number = "right" in str(tokens[index].attrGet("style"))
    names = [*(["number"] if is_number else []), *(["bad"] if tokens[index + 1].content == "fail" else [])]
    style = f' class="{" ".join(names)}"' if names else ""
    return f"<{tokens[index].tag}{style}>"


_RENDER_RULES: Final[Mapping[str, Callable[..., str]]] = {
    "html_block": _html,
    "html_inline": _html,
    "image": _image,
    "td_open": _cell_open,
    "th_open": _cell_open,
    "table_open": lambda *_: '<div class="scroll"><table>\n',
    "table_close": lambda *_: "</table></div>\n",
}
"""Tokens that become HTML in another way than markdown-it's."""


def render_picture(report: Report, charts: Sequence[Drawing]) -> bytes:
    """Return a PNG of the headline figures and the charts, for a model card."""
    figures = headline(report)
    head = Drawing("", 34 + 26.0 * len(figures))
    head.add(Words(4, 16, f"{report.source_format.title} to NVFP4, rule {report.rule}", "ink", size=16))
    for i, figure in enumerate(figures):
        level = 46 + 26.0 * i
        head.add(Words(120, level, figure.value, "ours", "end", 17), Words(130, level, figure.label, "ink"))
    columns: tuple[list[Drawing], list[Drawing]] = ([head], [])
    for drawing in charts:
        min(columns, key=lambda column: sum(other.height for other in column)).append(drawing)
    return to_png([column for column in columns if column])
