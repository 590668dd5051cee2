"""Words that the project no longer uses, in names and in sentences, and the words to use in their place.

One idea has one word, that of the field. A row of WORDS forbids a word and its plural in the package, the tests, the
scripts, the recipes and the pages. What a word honestly means elsewhere stands in HONEST.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("k2convert", "tests", "scripts", "recipes", ".github")
SUFFIXES = (".py", ".pyi", ".cpp", ".hpp", ".md", ".yaml", ".yml")
HISTORY = ("scripts/bench/RESULTS.md", "scripts/bench/TRIED.md")
"""Pages that tell what earlier releases measured, in their words."""

WORDS = {
    "armor": "check",
    "curvature": "damped Hessian",
    "forecast": "count",
    "house": "structure",
    "imatrix": "mse, or gptq",
    "importance": "second moments",
    "storey": "subpackage",
    "walk": "layer pass",
    "walked": "computed",
    "wing": "subpackage",
}
"""What is gone, and what to write."""

HONEST = (
    "ast.walk",
    "os.walk",
    "walk_folder",
    '"walk": 3',  # a job of release 0.3 has this key
    '"curvature"',  # a message of the compiled module
)
"""Other meanings of these words; one that nothing uses any more leaves the list."""

PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # the words of a sentence, of snake_case and of CamelCase


def texts() -> dict[str, str]:
    """Every file that people write, by its path."""
    files = [ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    files = [path for path in files if path.suffix in SUFFIXES and path != Path(__file__)]
    names = {path.relative_to(ROOT).as_posix(): path for path in files}
    return {
        name: path.read_text()
        for name, path in names.items()
        if name not in HISTORY and not name.startswith("tests/data/")
    }


def gone_words(text: str) -> Iterator[str]:
    """Yield the line number and the word of each use of a word that is gone."""
    for number, line in enumerate(text.splitlines(), 1):
        for phrase in HONEST:
            line = line.replace(phrase, "")
        for part in PARTS.findall(line):
            word = part.lower()
            for gone in {word, word.removesuffix("s")} & set(WORDS):
                yield f"line {number}: {word}; write {WORDS[gone]}"


def test_words_that_are_gone_stay_gone() -> None:
    found = [f"{name}, {use}" for name, text in texts().items() for use in gone_words(text)]
    assert not found, "\n".join(found)


def test_every_exception_is_used() -> None:
    everything = "".join(texts().values())
    assert [phrase for phrase in HONEST if phrase not in everything] == [], "remove it from HONEST"


@pytest.mark.parametrize("text", ["plan_walk(x)", "class WalkPlan:", "# the walk of a layer", "two walks", "ARMOR = 1"])
def test_a_word_that_comes_back_is_found(text: str) -> None:
    assert len(list(gone_words(text))) == 1


@pytest.mark.parametrize("text", ["ast.walk(tree)", "a sidewalk", "warehouse", "important", "walk_folder(path)"])
def test_other_words_are_not_taken_for_them(text: str) -> None:
    assert not list(gone_words(text))
