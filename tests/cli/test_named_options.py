"""An option that a message, a docstring or the guide names exists, and a verb that can come there has it."""

import ast
import json
import re
from pathlib import Path

import typer.main

from k2convert.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "k2convert"
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
        "--array",
        "--cpus-per-task",
        "--dependency",
        "--flavor",
        "--mem",
        "--parsable",
        "--requeue",
        "--secrets",
        "--timeout",
        "--with",
        "--wrap",
    },  # of sbatch and `hf jobs`
    "guide/numbers.md": {"--dense-layers", "--peers", "--rows"},  # of scripts
    "guide/prove.md": {"--model_args", "--num_fewshot", "--smoke-model", "--tasks", "--think-mode"},  # of evaluators
}
VERBS = {
    **{f"cli/{verb}.py": {verb} for verb in OWN},
    "calibration/": {"calibrate", "run"},
    "calibration/text.py": {"calibrate", "run", "evaluate", "compare"},
    "evaluation/": {"evaluate", "compare"},
    "fit/": {"fit"},
    "plan/": {"run"},
}
"""The verbs whose options a file or a wing may name. What its messages suggest to run is another command."""
NEXT = {
    "calibrate": {"run"},
    "evaluate": {"report"},
    "fit": {"run"},
    "inspect": {"run"},
    "run": {"validate"},
    "status": {"validate", "run", "evaluate"},
    "report": {"publish"},
}


def named() -> list[tuple[str, set[str]]]:
    found: list[tuple[str, set[str]]] = []
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix == ".py":
            nodes = ast.walk(ast.parse(path.read_text()))
            texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        elif path.suffix in (".md", ".jinja"):
            texts = [path.read_text()]
        else:
            continue
        if options := {option for text in texts for option in OPTION.findall(text)}:
            found.append((path.relative_to(PACKAGE).as_posix(), options))
    return found


def of(file: str, table: dict[str, set[str]]) -> set[str] | None:
    return table.get(file, table.get(f"{file.partition('/')[0]}/"))


def test_every_option_that_is_named_exists_where_it_is_named() -> None:
    everything = set().union(*OWN.values())
    for file, options in named():
        ours = options - ENGINES - OTHERS[""] - OTHERS.get(file, set())
        assert ours <= everything, f"{file}: no verb has it"
        if (verbs := of(file, VERBS)) is not None:
            after = set().union(*(NEXT.get(verb, set()) for verb in verbs))
            here = set().union(*(OWN[verb] for verb in verbs | after))
            assert ours <= here, f"{file}: {' and '.join(verbs)} cannot have it"
