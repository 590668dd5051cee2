"""`--help`: each verb in one whole line, its options in few panels, and no words that only Python knows."""

import re

import pytest
from command import run_here

HELP = run_here("--help", COLUMNS="80", code=0).stdout
SUMMARIES = re.findall(r"^  ([a-z]+) {2,}(\S.*)$", HELP, flags=re.MULTILINE)
VERBS = [verb for verb, _ in SUMMARIES]
OPTION = r"^  (--[a-z-]+)(?: / --[a-z-]+)?((?: \S+)?)(?: {2,}|$)"


def help_of(verb: str) -> str:
    return run_here(verb, "--help", COLUMNS="80", code=0).stdout


def test_every_summary_is_a_whole_sentence_in_80_columns() -> None:
    assert len(SUMMARIES) == 11
    assert max(map(len, HELP.splitlines())) <= 80
    for verb, summary in SUMMARIES:
        assert summary.endswith("."), verb
        assert not summary.endswith("..."), verb


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_no_type_of_python_and_gives_two_examples(verb: str) -> None:
    text = help_of(verb)
    named = re.findall(r"^  (?:-h, )?--\S+(?: / --\S+)? (\S+)", text, flags=re.MULTILINE)
    assert not [word for word in named if re.search(r"(?i)\b(str|text|int|integer|float|path|list|bool|range)\b", word)]
    assert not re.search(r"<(str|int|float|path|list|bool|Path)", text)
    examples = text.partition("Examples:\n")[2].splitlines()
    assert len(examples) == 2
    assert all(line.startswith(f"    k2convert {verb}") for line in examples)


def test_run_has_25_options_in_five_panels() -> None:
    text = help_of("run")
    panels = re.findall(r"^([A-Z][a-z ]+):$", text.partition("Examples")[0], flags=re.MULTILINE)
    assert panels == ["Arguments", "Options", "Result", "Output and checks", "Machine", "Hub"]
    assert len(re.findall(r"^  (?:-h, )?--[a-z-]+", text, flags=re.MULTILINE)) <= 25


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_is_said_alike_by_all_verbs(verb: str) -> None:
    """The same name has the same metavar everywhere; an option with choices may have more of them."""
    forms, ours = (dict(re.findall(OPTION, help_of(known), flags=re.MULTILINE)) for known in (verb, "run"))
    for name in forms.keys() & ours.keys():
        assert forms[name].startswith(ours[name].rstrip(">")), name
