"""A new option of `run` is a parameter with its help, and a use: a job's options are named in at most four files."""

import ast
from dataclasses import fields

import pytest
from structure import ROOT

from k2convert.job.prepare import JobOptions

OPTIONS = "JobOptions"
FLAGS = {"text": "calibrate", "private": "public"}  # options that the command line calls differently


def named_options(module: ast.Module) -> set[str]:
    """The options that a module declares, sets or reads."""
    found = set[str]()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == OPTIONS:
            found |= {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
        elif isinstance(node, ast.FunctionDef) and node.name == "run":
            found |= {argument.arg for argument in node.args.args}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == OPTIONS:
            found |= {keyword.arg or "" for keyword in node.keywords}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "options":
            found.add(node.attr)
    return found


@pytest.fixture(scope="module")
def options_of() -> dict[str, set[str]]:
    """The options that are named in each file of the package that knows those of a job."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "k2convert").rglob("*.py")}
    return {path: named_options(ast.parse(text)) for path, text in texts.items() if OPTIONS in text}


@pytest.mark.parametrize("option", [field.name for field in fields(JobOptions)])
def test_an_option_is_named_in_at_most_four_files(options_of: dict[str, set[str]], option: str) -> None:
    names = {option, FLAGS.get(option, option)}
    found = [path for path, named in options_of.items() if named & names]
    assert len(found) <= 4, found
    assert "k2convert/job/prepare.py" in found
