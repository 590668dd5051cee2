"""An option that a text names exists, and a verb that can come there has it; a job reads each of its own."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields

import pytest
import typer.main
from command import ROOT
from test_named_things import CONTRIBUTING, prose

from k2convert.cli.app import app
from k2convert.job.evaluation import EvaluationOptions
from k2convert.job.prepare import JobOptions
from k2convert.plan.recipe import Recipe

OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OWN = {
    verb: {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for verb, command in COMMANDS.items()
}
ENGINES = {
    option
    for path in (ROOT / "tests" / "data" / "engine-options").glob("*.json")
    for option in json.loads(path.read_text())["options"]
}
OTHERS = {
    "": {"--help", "--version", "--local-dir", "--force-download"},  # of every verb, and of `hf download`
    "job/run.py": {"--array"},  # of sbatch
    "job/prepare.py": {"--mem"},  # of sbatch
    "guide/cluster.md": {
        "--array", "--cpus-per-task", "--dependency", "--flavor", "--mem", "--parsable", "--requeue", "--secrets",
        "--timeout", "--with", "--wrap",
    },  # of sbatch and `hf jobs`
    "guide/numbers.md": {"--dense-layers", "--only", "--peers", "--rows"},  # of scripts
    "guide/prove.md": {"--model_args", "--num_fewshot", "--smoke-model", "--tasks", "--think-mode"},  # of evaluators
}  # fmt: skip
VERBS = {
    **{f"cli/{verb}.py": {verb} for verb in OWN},
    "calibration/": {"run"},
    "evaluation/": {"evaluate"},
    "deploy/": {"fit"},
    "plan/": {"run", "inspect"},
    "text/": {"run", "evaluate"},
}
"""The verbs whose options a file or a subpackage may name. What its messages suggest to run is another command."""
NEXT = {
    "evaluate": {"report"},
    "fit": {"run", "prune"},
    "inspect": {"run", "validate"},
    "run": {"validate"},
    "status": {"validate", "run", "evaluate"},
    "report": {"publish"},
}


def named() -> Iterator[tuple[str, str]]:
    """Every docstring and message of the package, the texts beside it, and the recipes, each with its file."""
    for file, text in prose():
        if file not in ("README.md", CONTRIBUTING):  # they name options of scripts and of other programs
            yield file.removeprefix("k2convert/"), text


def of(file: str, table: dict[str, set[str]]) -> set[str] | None:
    return table.get(file, table.get(f"{file.partition('/')[0]}/"))


def wrong(file: str, text: str) -> set[str]:
    """Return the options in a text that no verb has, or none that can come to this file."""
    known = set().union(*OWN.values())
    if (verbs := of(file, VERBS)) is not None:
        known = set().union(*(OWN[verb] for verb in verbs.union(*(NEXT.get(verb, set()) for verb in verbs))))
    return set(OPTION.findall(text)) - known - ENGINES - OTHERS[""] - OTHERS.get(file, set())


def test_every_option_that_is_named_exists_where_it_is_named() -> None:
    errors = {(file, *sorted(options)) for file, text in named() if (options := wrong(file, text))}
    assert not errors, (
        f"{errors}: no verb that comes to this file has it. Correct it, or list it in OTHERS (another program's), "
        "or in NEXT (that of a verb which is proposed), or add the verb that comes there to VERBS"
    )


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("evaluation/head.py", "Requests at a time: --concurrency."),
        ("calibration/text.py", "error: pass --gpu b200."),
        ("guide/serve.md", "Pass `--concurrency 8`."),
        ("report/card.py", "Made with --input-scale."),
        ("recipes/x.yaml", "rule: max  # --input-scale"),
    ],
)
def test_a_planted_option_is_found(file: str, planted: str) -> None:
    assert wrong(file, planted)


PACKAGE = [path.read_text() for path in (ROOT / "k2convert").rglob("*.py")]
OPTIONS = "JobOptions"
FLAGS = {"text": "calibrate", "private": "public"}  # options that the command line calls differently


def named_options(module: ast.Module) -> set[str]:
    """The options that a module declares, sets or reads."""
    names = set[str]()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == OPTIONS:
            names |= {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
        elif isinstance(node, ast.FunctionDef) and node.name == "run":
            names |= {argument.arg for argument in node.args.args}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == OPTIONS:
            names |= {keyword.arg or "" for keyword in node.keywords}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "options":
            names.add(node.attr)
    return names


@pytest.fixture(scope="module")
def options_of() -> dict[str, set[str]]:
    """The options that are named in each file of the package that knows those of a job."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "k2convert").rglob("*.py")}
    return {path: named_options(ast.parse(text)) for path, text in texts.items() if OPTIONS in text}


@pytest.mark.parametrize("option", [field.name for field in fields(JobOptions)])
def test_an_option_is_named_in_at_most_four_files(options_of: dict[str, set[str]], option: str) -> None:
    names = {option, FLAGS.get(option, option)}
    files = [path for path, named in options_of.items() if named & names]
    assert len(files) <= 4, files
    assert "k2convert/job/prepare.py" in files


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(("options", field.name) for kind in (JobOptions, EvaluationOptions) for field in fields(kind)),
        *(("recipe", field) for field in Recipe.model_fields),
    ],
)
def test_what_an_option_or_a_recipe_says_is_read(name: str, option: str) -> None:
    """Ruff finds a parameter of a verb that nothing reads (ARG001); this finds a field."""
    assert any(re.search(rf"\b{name}\.{option}\b", text) for text in PACKAGE), (
        f"nothing reads {name}.{option}: use it where the job needs it, or delete it"
    )
