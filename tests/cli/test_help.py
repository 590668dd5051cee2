"""The help of every verb and the pages of the guide: whole sentences that fit a terminal."""

import re
from pathlib import Path

import pytest
from command import ROOT, RunCli, run_here
from screen import in_terminal

from k2convert.check.results import CONTRACT
from k2convert.cli.guide import read_pages, summary

HELP = run_here("--help", COLUMNS="80", code=0).stdout
SUMMARIES = re.findall(r"^  ([a-z]+) {2,}(\S.*)$", HELP, flags=re.MULTILINE)
VERBS = [verb for verb, _ in SUMMARIES]
OPTION = r"^  (--[a-z-]+)(?: / --[a-z-]+)?((?: \S+)?)(?: {2,}|$)"


def help_of(verb: str) -> str:
    return run_here(verb, "--help", COLUMNS="80", code=0).stdout


def test_every_summary_is_a_whole_sentence_in_80_columns() -> None:
    assert len(SUMMARIES) == 11
    assert max(map(len, HELP.splitlines())) <= 80
    for verb, sentence in SUMMARIES:
        assert sentence.endswith("."), verb
        assert not sentence.endswith("..."), verb


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_no_type_of_python_and_gives_two_examples(verb: str) -> None:
    text = help_of(verb)
    named = re.findall(r"^  (?:-h, )?--\S+(?: / --\S+)? (\S+)", text, flags=re.MULTILINE)
    assert not [word for word in named if re.search(r"(?i)\b(str|text|int|integer|float|path|list|bool|range)\b", word)]
    types = re.findall(r"<(?:str|int|float|path|list|bool|Path)\w*>?", text)
    assert not types, f'{types}: name the value by a word, as option("How many notes.", "NUMBER")'
    examples = text.partition("Examples:\n")[2].splitlines()
    assert len(examples) == 2
    assert all(line.startswith(f"    k2convert {verb}") for line in examples)


def test_run_has_few_options_in_five_panels() -> None:
    text = help_of("run")
    panels = re.findall(r"^([A-Z][a-z ]+):$", text.partition("Examples")[0], flags=re.MULTILINE)
    assert panels == ["Arguments", "Options", "Result", "Output and checks", "Machine", "Hub"]
    options = re.findall(r"^  (?:-h, )?--[a-z-]+", text, flags=re.MULTILINE)
    assert len(options) <= 21, (
        f"run has {len(options)} options, and a page of help holds 21: what changes the bytes of a result is a recipe "
        "key, for --set (CONTRIBUTING.md, Adding an option); or take away an option that few need"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_is_said_alike_by_all_verbs(verb: str) -> None:
    """The same name has the same metavar everywhere; an option with choices may have more of them."""
    forms, ours = (dict(re.findall(OPTION, help_of(known), flags=re.MULTILINE)) for known in (verb, "run"))
    for name in forms.keys() & ours.keys():
        assert forms[name].startswith(ours[name].rstrip(">")), f"{name}: define it once, in cli/options.py"


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
    lines = text.count("\n")
    assert lines <= 110, f"README.md has {lines} lines, {lines - 110} more than 110: merge or delete as many"


def test_the_page_validate_has_the_rules_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", PAGES["validate"], flags=re.MULTILINE)
    assert rows[: len(CONTRACT)] == [(str(number), title) for number, title in CONTRACT.items()]
