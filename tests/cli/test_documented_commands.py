"""Every command and option that README, guide, recipes and .github name is one of the real command line.

Commands are parsed, and only `fit` is run: files need not exist. Commands of engines are in tests/fit/test_serving.py.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, RunCli
from test_named_options import COMMANDS, ENGINES, OWN

from k2convert.plan import recipe as recipes

PAGES = sorted(
    [ROOT / "README.md", ROOT / "recipes" / "README.md", *ROOT.glob(".github/*.md"), *ROOT.glob("k2convert/guide/*.md")]
)
USAGE = 2  # the exit code of options that contradict; a model that does not fit has another
OTHERS = {"--peers", "--with", "--wrap"}  # options of other programs that the pages name in a sentence


def code_lines(text: str) -> Iterator[str]:
    """Every line of code, with the lines that continue it."""
    for block in re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()


def spans(text: str) -> list[str]:
    prose = re.sub(r"^(    [^\n]*|```.*?^```)$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def documented(text: str) -> Iterator[list[str]]:
    """Every command as words, without the program's name; a command may be the argument of another program."""
    for line in code_lines(text):
        words = shlex.split(line.replace(")", " "), comments=True) if "k2convert" in line else []
        for i, word in enumerate(words):
            if word.rpartition("/")[2] == "k2convert" and "install" not in words:
                yield words[i + 1 :]
            elif word.startswith("k2convert "):
                yield shlex.split(word)[1:]
    for span in spans(text):
        if span.startswith("k2convert ") and len(span.split()) > 2:
            yield shlex.split(span)[1:]


def verb_of(name: str) -> Any:
    """The real verb, without the callbacks that look at files."""
    verb = COMMANDS[name]
    for parameter in verb.params:
        parameter.callback = None
    return verb


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_of_a_page_is_parsed(page: Path) -> None:
    for words in documented(page.read_text(encoding="utf-8")):
        context = verb_of(words[0]).make_context(words[0], words[1:])
        settings = context.params.get("settings")
        if settings:
            recipes.load_recipe("kimi-k2-thinking-nvfp4", recipes.parse_settings(settings))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_options_of_every_fit_go_together(page: Path, run_cli: RunCli, tiny: Path) -> None:
    for words in documented(page.read_text(encoding="utf-8")):
        if words[0] == "fit":
            assert run_cli("fit", tiny, *words[2:]).returncode != USAGE, words


def test_commands_are_found_in_every_form() -> None:
    text = (
        "Say `k2convert status DEST` or `k2convert recipes`.\n\n"
        "    k2convert run A B   # `k2convert run X`\n"
        "    $ .venv/bin/k2convert fit A --gpu b200 \\\n        --count 8\n"
        '    job=$(sbatch --wrap "k2convert run A B --part 1/8")\n'
        "    hf jobs uv run --with WHEEL k2convert run A B\n"
        "    pip install k2convert\n"
    )
    run = ["run", "A", "B"]
    fit = ["fit", "A", "--gpu", "b200", "--count", "8"]
    assert list(documented(text)) == [run, fit, [*run, "--part", "1/8"], run, ["status", "DEST"]]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_option_and_verb_in_a_sentence_is_there(page: Path) -> None:
    known = OTHERS | ENGINES.union(*OWN.values())
    for span in spans(page.read_text(encoding="utf-8")):
        words = span.removeprefix("k2convert ").split()
        options = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        if span.startswith("k2convert "):
            assert words[0] in OWN, span
        if words and words[0] in OWN:
            assert options <= OWN[words[0]], span
        elif span.startswith("--"):
            assert options <= known, span


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)|src(?:set)?=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
        path = target[0] or target[1]
        assert path.startswith("https://") or (page.parent / path).exists(), path
