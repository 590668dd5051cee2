"""`k2convert guide`: its list, its pages, and that they agree with the code."""

import re
from pathlib import Path

import pytest
from command import ROOT, RunCli
from screen import in_terminal

from k2convert.check.results import CONTRACT
from k2convert.cli.guide import read_pages, summary

FOLDER = ROOT / "k2convert" / "guide"
PAGES = read_pages()


def test_every_page_is_listed_with_one_sentence(run_cli: RunCli) -> None:
    done = run_cli("guide", code=0)
    assert sorted(PAGES) == list(PAGES) == sorted(path.stem for path in FOLDER.glob("*.md"))
    for topic, page in PAGES.items():
        assert re.match(r"# [A-Z][a-z]+\n\n[A-Z][^\n]+\.\n\n", page), topic
        assert re.search(rf"^{topic} +│ {re.escape(summary(page))} *$", done.stdout, flags=re.MULTILINE), topic
        assert len(summary(page)) <= 68, "one line on 80 columns"


def test_a_page_goes_into_a_pipe_as_it_is(run_cli: RunCli) -> None:
    for topic in PAGES:
        done = run_cli("guide", topic)
        assert (done.returncode, done.stdout) == (0, (FOLDER / f"{topic}.md").read_text())


@pytest.mark.quick(3)
@pytest.mark.parametrize("topic", PAGES)
def test_a_page_is_whole_on_a_terminal_of_80_columns(topic: str, tmp_path: Path) -> None:
    ended = in_terminal("guide", topic, columns=80, rows=24, folder=tmp_path, PAGER="cat")
    assert ended.code == 0
    assert "…" not in ended.screen.text
    assert not ended.screen.wrapped
    shown = re.sub(r"[^\w]", "", ended.screen.text)
    for words in re.findall(r"^[A-Z][\w ,']+\.$", PAGES[topic], flags=re.MULTILINE):
        assert re.sub(r"[^\w]", "", words) in shown


def test_a_terminal_has_a_pager_and_tables_of_whole_words(tmp_path: Path) -> None:
    ended = in_terminal("guide", "engines", columns=80, rows=24, folder=tmp_path, PAGER="tee seen")
    lines = ended.screen.text.splitlines()
    assert "\x1b[" in (tmp_path / "seen").read_text(), "in colors"
    assert sum("compressed-tensors" in line for line in lines) >= 8
    assert "s" not in map(str.strip, lines)


def test_an_unknown_topic_names_the_known_ones(run_cli: RunCli) -> None:
    done = run_cli("guide", "quantize", code=2)
    assert all(topic in done.stderr for topic in ("'quantize'", *PAGES))


def test_the_readme_links_every_page_and_stays_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(f"k2convert/guide/{topic}.md" in text for topic in PAGES)
    assert text.count("\n") <= 110


def test_the_page_validate_has_the_rules_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGES["validate"], flags=re.MULTILINE)
    assert rows[: len(CONTRACT)] == [(str(number), title) for number, title in CONTRACT.items()]
