"""Words that are gone stay gone, and every public name is used."""

import ast
import re
from collections import Counter
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
    "doubt": "warning",
    "forecast": "count",
    "house": "structure",
    "imatrix": "mse, or gptq",
    "importance": "second moments",
    "storey": "subpackage",
    "tally": "counts",
    "walk": "layer pass",
    "walked": "computed",
    "wing": "subpackage",
}
"""What is gone, and what to write."""

HONEST = (
    "ast.walk",
    "os.walk",
    "walk_folder",
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
    uses = [f"{name}, {use}" for name, text in texts().items() for use in gone_words(text)]
    assert not uses, "\n".join(uses)


def test_every_exception_is_used() -> None:
    everything = "".join(texts().values())
    assert [phrase for phrase in HONEST if phrase not in everything] == [], "remove it from HONEST"


@pytest.mark.parametrize("text", ["plan_walk(x)", "class WalkPlan:", "# the walk of a layer", "two walks", "ARMOR = 1"])
def test_a_word_that_comes_back_is_found(text: str) -> None:
    assert len(list(gone_words(text))) == 1


@pytest.mark.parametrize("text", ["ast.walk(tree)", "a sidewalk", "warehouse", "important", "walk_folder(path)"])
def test_other_words_are_not_taken_for_them(text: str) -> None:
    assert not list(gone_words(text))


SAY_NOTHING = {"asked", "found", "kept", "made", "one", "place", "places", "said", "seen", "what"}
"""What no variable, parameter, function or class is called: the name is a noun that says what is in it."""


def new_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that a module gives a name to."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.MatchAs(name=str(name)):
                yield node.lineno, name
            case _:
                pass


@pytest.mark.parametrize("folder", ["k2convert", "scripts", "tests"])
def test_a_name_is_a_noun(folder: str) -> None:
    bad = [
        f"{path.relative_to(ROOT)}, line {line}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in new_names(ast.parse(path.read_text()))
        if name.strip("_").lower() in SAY_NOTHING
    ]
    assert not bad, "\n".join(["choose a noun that says what is in it, such as header, errors or address:", *bad])


PACKAGE = ROOT / "k2convert"
FILES = sorted(PACKAGE.rglob("*.py"))

ALLOWED = {
    "model_config": "pydantic reads it",
    "collect_usage_pieces": "typer calls it",
    "format_options": "typer calls it",
    "ridge": "the ledger states it of shared experts",
}
"""Public names that nothing in the package uses, each with its reason. At most five."""


def definitions(tree: ast.Module) -> Iterator[str]:
    """Public functions, classes, constants, methods, properties and fields of a module."""
    for node in tree.body:
        yield from names_of(node)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                yield from names_of(member)


def names_of(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def uses(tree: ast.Module) -> Iterator[str]:
    """Every name that is read, every attribute, every keyword and every word of a string annotation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg  # a field of a dataclass that is written as a whole
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value  # getattr, slots, string annotations


def unused(files: list[Path]) -> set[str]:
    trees = {path: ast.parse(path.read_text()) for path in files}
    used = Counter(name for tree in trees.values() for name in uses(tree))
    defined = {(path, name) for path, tree in trees.items() for name in definitions(tree)}
    verbs = {(PACKAGE / "cli" / f"{name}.py", name) for _, name in defined}  # the command line calls these by name
    return {name for path, name in defined - verbs if not name.startswith("_") and not used[name]}


def test_every_public_name_is_used_by_the_package() -> None:
    names = unused(FILES)
    assert names - set(ALLOWED) == set(), (
        "use it (a family, a layout, a rule needs its row: CONTRIBUTING.md), delete it, make it private, or move it "
        "into the test that uses it"
    )
    assert set(ALLOWED) <= names, "no longer unused: remove it from ALLOWED"
    assert len(ALLOWED) <= 5, "delete one for each that you add"


def test_an_unused_name_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "def used() -> int:\n    return LIMIT\n\n\nLIMIT = 3\nused()\n\n\ndef unused() -> int:\n    return 1\n"
    )
    assert unused([module]) == {"unused"}
