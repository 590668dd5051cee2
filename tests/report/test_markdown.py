"""report.md fits into a model card: headings from the second level, whole tables, no active content."""

import re

import pytest

from k2convert.report import ReportFiles
from k2convert.report.content import needs_section
from k2convert.report.markdown import escape, sentence
from k2convert.report.wording import percent


def test_figures_are_those_of_the_page(reported: ReportFiles) -> None:
    text = reported.markdown.read_text()
    page = reported.page.read_text()
    for figure in ("22.62 dB", "0.506", "94.9 %", "4,026,056", "2,728"):
        assert figure in text, figure
        assert figure in page, figure


def test_headings_leave_the_first_level_to_the_card(reported: ReportFiles) -> None:
    headings = [line for line in reported.markdown.read_text().splitlines() if line.startswith("#")]
    assert headings[0] == "## What the conversion changed"
    assert all(line.startswith(("## ", "### ")) for line in headings)


def test_memory_and_gpus_are_those_of_the_result(reported: ReportFiles) -> None:
    needs = needs_section(reported.report)
    assert needs is not None
    assert needs.sentences[0].startswith("Weights: 7.5 MB. KV cache: ")
    assert ("1 x A100 80 GB", "TP1") in {tuple(row[:2]) for row in needs.tables[0].rows}
    for text in (reported.markdown.read_text(), reported.page.read_text()):
        assert needs.sentences[0] in text
        assert "`k2convert fit`" in text or "<code>k2convert fit</code>" in text
        assert all(cell in text for row in needs.tables[0].rows for cell in row)


def test_every_table_is_whole(reported: ReportFiles) -> None:
    blocks = [b.splitlines() for b in reported.markdown.read_text().split("\n\n") if b.startswith("|")]
    assert len(blocks) >= 5
    for rows in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
        assert set(rows[1]) <= set("| -:")


def test_page_and_picture_are_linked(reported: ReportFiles) -> None:
    assert reported.picture is not None
    text = reported.markdown.read_text()
    assert f"]({reported.picture.name})" in text
    assert f"]({reported.page.name})" in text


@pytest.mark.parametrize("text", ["<b>", "a|b", "`x`", "[a](http://b)", "![a](b)", "*a* _b_", "a\n\n# b", "&lt;"])
def test_text_is_shown_as_it_is(text: str) -> None:
    escaped = escape(text)
    assert "\n" not in escaped
    assert not re.search(r"(?<!\\)[|`\[\]<*_]", escaped)
    assert "&lt;" not in escaped or "<" in text or "&amp;lt;" in escaped
    assert "<" not in sentence(f"`{text}` {text}`")


@pytest.mark.parametrize(
    ("part", "whole", "shown"),
    [(0, 10, "0 %"), (10, 10, "100 %"), (1, 10**9, "< 0.001 %"), (10**9 - 1, 10**9, "> 99.999 %"), (1, 3, "33.3 %")],
)
def test_only_none_and_all_are_shown_as_such(part: int, whole: int, shown: str) -> None:
    assert percent(part, whole) == shown
