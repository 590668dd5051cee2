"""Names from a checkpoint, texts of tokens and absurd numbers are shown as they are, and do nothing."""

import html
import json
import re
import warnings
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from damaged_files import edit_sealed
from evaluation_makers import evaluation_of, write_evaluation
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from k2convert.check.results import ContractReport, Offender, RuleResult, ValidationReport, Verdict
from k2convert.records.document import seal
from k2convert.report import ReportFiles, write_report
from k2convert.report.render import escape, render_report, sentence
from scripts.fixture_maker.damage import edit_json

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`|&{{ 7*7 }}"
HOSTILE_TOKEN = (
    "</td></table></details><script>alert(1)</script><img src=x onerror=alert(2)>![](report.png)"
    "|`$\\frac{1}{0}$`{{ 7*7 }}\x1b[2J\u202e\u2028\n# x"
)
TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "ul", "li", "strong", "code",
    "blockquote", "div", "span", "table", "thead", "tbody", "tr", "th", "td", "details", "summary",
    "svg", "polyline", "text", "image",
}  # fmt: skip
ATTRIBUTES = {"style", "href", "src", "srcset", "data", "xlink:href", "action"}


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_harmless(files: ReportFiles) -> None:
    """Only our tags are in the page, nothing is loaded or run, and no table of the Markdown is broken."""
    page = files.page.read_text()
    parsed = _Tags(page)
    assert parsed.tags <= TAGS
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    loads = [value for name, value in parsed.attributes if name in ATTRIBUTES]
    assert all(value.startswith("data:image/png;base64,") for value in loads)
    assert page.count("<details>") == page.count("</details>") == page.count("<summary>")
    markdown = files.markdown.read_text()
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)", markdown)
    for rows in (block.splitlines() for block in markdown.split("\n\n") if block.startswith("|")):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
        assert set(rows[1]) <= set("| -:")


@pytest.mark.parametrize("name", ["reported", "evaluated"])
def test_the_page_is_self_contained(name: str, local_result: Path, request: pytest.FixtureRequest) -> None:
    files: ReportFiles = request.getfixturevalue(name)
    assert_harmless(files)
    page = files.page.read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert not re.search(r"@import|url\(|unsafe|<script", page)
    for path in (files.page, files.markdown):
        assert str(local_result.parent) not in path.read_text(), "a path of this machine"


def test_hostile_names_are_shown_and_do_nothing(records_only: Path, tmp_path: Path) -> None:
    record = records_only / ".k2convert/done/model-00002-of-000005.safetensors.json"
    shard = HOSTILE.replace("/", "")  # a file name cannot contain a slash

    def poison_record(document: dict[str, Any]) -> None:
        worst = document["projections"][0]
        worst["module"] = worst["role"] = HOSTILE
        worst["metrics"]["squared_error"] *= 9
        document["source_headers"] = {HOSTILE: HOSTILE}

    def poison_ledger(document: dict[str, Any]) -> None:
        document["source"].update(repo=HOSTILE, revision=HOSTILE)
        document["versions"] = {HOSTILE: HOSTILE}
        document["shards"][shard] = {"blake3": HOSTILE, "bytes": 1, "tensors": 1}

    edit_sealed(record, poison_record)
    edit_json(records_only / "k2convert.json", poison_ledger)
    copied = json.loads(record.read_text()) | {"shard": shard, "projections": []}
    del copied["checksum"]
    (records_only / f".k2convert/done/{shard}.json").write_bytes(seal(copied))
    rule = RuleResult(1, HOSTILE, Verdict.SKIPPED, 1, (Offender(HOSTILE, HOSTILE),), HOSTILE)
    contract = ContractReport(HOSTILE, HOSTILE, HOSTILE, HOSTILE, (rule,))
    validation = ValidationReport(HOSTILE, contract, weights=None, layers=None)
    files = write_report(folder=records_only, out=tmp_path / "out", validation=validation)
    assert_harmless(files)
    assert _Tags(files.page.read_text()).text.count(HOSTILE) >= 6


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    write_evaluation(folder, evaluation_of(folder))
    edit_json(folder / "evaluation.json", change)
    return folder


def test_hostile_tokens_are_shown_and_do_nothing(records_only: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["reference"]["name"] = f"hf://{HOSTILE_TOKEN}"
        document["text"]["texts"] = [[HOSTILE_TOKEN, "0" * 64]] * 1000
        for row in document["rows"]:
            row["model"]["name"] = HOSTILE_TOKEN
            row["worst"] = [worst | {"token": HOSTILE_TOKEN, "before": "abc " * 1000} for worst in row["worst"]]
            row["worst"][0]["reference_token"] = "\x1b[2J\u202e"

    files = write_report(folder=edited(records_only, change))
    assert_harmless(files)
    page = files.page.read_text()
    assert page.count("<svg") == 3, "no picture by a name from a file"
    assert "\\x1b[2J" in html.unescape(page)
    assert "and 988 more" in page
    for text in (page, files.markdown.read_text()):
        assert not {"\x1b", "\u202e", "\u2028"} & set(text)
        assert "\n# x" not in text
        assert "abc " * 20 not in text, "a long text is cut"


@given(st.text(st.sampled_from("<>|`[]()!*_$&\\#\n ab;lt~{}"), max_size=12))
def test_text_is_shown_as_it_is(text: str) -> None:
    markdown = MarkdownIt("commonmark").enable("table")
    shown = markdown.renderInline(escape(text))
    assert "<" not in shown
    assert html.unescape(shown).strip() == " ".join(text.split())
    assert not re.search(r"(?<!\\)\|", escape(text)), "a cell of a table ends there"
    assert "<" not in re.sub("</?code>", "", markdown.renderInline(sentence(f"`{text}` {text}")))


@pytest.mark.parametrize("planted", ["<script>alert(1)</script>", "<details><summary><img></summary>", "x <img src=x>"])
def test_unescaped_html_is_shown_as_text(planted: str, reported: ReportFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page does not rely on `escape` alone."""
    monkeypatch.setattr("k2convert.report.render.escape", str)
    monkeypatch.setattr("k2convert.report.render.caution", lambda _report: planted)
    page = render_report(reported.report)["report.html"].decode()
    assert html.escape(planted) in page
    assert planted not in page


def numbers(document: Any, value: float) -> Any:
    """The document with another value for every number of the figures."""
    if isinstance(document, dict):
        return {key: part if "share" in key else numbers(part, value) for key, part in document.items()}
    if isinstance(document, list):
        return [numbers(part, value) for part in document]
    return value if isinstance(document, float) else document


@pytest.mark.quick(1)
@pytest.mark.parametrize("value", [1e308, 0.0, 1e-308, 123456789.125])
def test_absurd_numbers_are_shown(records_only: Path, value: float) -> None:
    def change(document: dict[str, Any]) -> None:
        for row in document["rows"]:
            shares = {key: row["figures"][key] for key in ("top1_agreement", "left_top5")}
            row["figures"] = numbers(row["figures"], value) | shares
            row["figures"]["divergence"]["histogram"] = [0] * 37 + [(1 << 63) - 1]
            row["figures"]["divergence"]["by_position"] = [
                {"first": (1 << 62), "stop": 3, "mean": value},
                {"first": 0, "stop": 0, "mean": value},
            ]
            row["layers"] = [{"relative_error": value, "routing_agreement": None}] * 1000
            row["worst"] = [worst | {"divergence": value, "window": 1 << 62} for worst in row["worst"]]
        document["text"] |= {"tokens": (1 << 63) - 1, "windows": 0, "window": 1 << 60, "dropped": 1 << 61}

    folder = edited(records_only, change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = write_report(folder=folder)
    assert f"{value:.3g}" in files.markdown.read_text()
    assert files.page.stat().st_size < 1_000_000
    assert not re.search(r"\bnan\b", files.markdown.read_text() + files.page.read_text())
