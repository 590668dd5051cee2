"""Every public name of the package is used by the package: what only tests use goes, or moves into tests/."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "k2convert"
FILES = sorted(PACKAGE.rglob("*.py"))

ALLOWED = {
    "model_config": "pydantic reads it",
    "collect_usage_pieces": "typer calls it",
    "format_options": "typer calls it",
    "ridge": "the ledger states it of shared experts",
    "noise": "evaluations of servers by release 0.3 have it",
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
    found = unused(FILES)
    assert found - set(ALLOWED) == set(), "delete it, make it private, or move it into the test that uses it"
    assert set(ALLOWED) <= found, "no longer unused: remove it from ALLOWED"
    assert len(ALLOWED) <= 5, "delete one for each that you add"


def test_an_unused_name_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "def used() -> int:\n    return LIMIT\n\n\nLIMIT = 3\nused()\n\n\ndef unused() -> int:\n    return 1\n"
    )
    assert unused([module]) == {"unused"}
