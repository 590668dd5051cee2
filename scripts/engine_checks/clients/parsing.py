"""Gives serve commands to an engine's own parser: `REQUEST OUT`, both JSON; OUT is the list of problems."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path


def check_commands(parser: argparse.ArgumentParser, *, skip: int) -> int:
    """Parse every command of the request without its first `skip` words, and look up the recorded options.

    Returns the exit code. No abbreviation is accepted, although the engines do.
    """
    parser.allow_abbrev = False
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("request", type=Path)
    arguments.add_argument("out", type=Path)
    paths = arguments.parse_args()
    request = json.loads(paths.request.read_text(encoding="utf-8"))
    problems: list[str] = []
    for words in request["commands"]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(words[skip:])
        except SystemExit:
            lines = said.getvalue().strip().splitlines() or ["refused"]
            problems.append(f"{' '.join(words)}: {lines[-1]}")
    problems += _wrong_options(parser, request["options"])
    paths.out.write_text(json.dumps(problems), encoding="utf-8")
    print(f"{len(request['commands'])} commands and {len(request['options'])} options, {len(problems)} problems")
    return 1 if problems else 0


def _wrong_options(parser: argparse.ArgumentParser, recorded: dict[str, str | list[str]]) -> list[str]:
    """Compare the recorded options with the parser's: whether they are there, and whether they take a value."""
    actions = {name: action for action in parser._actions for name in action.option_strings if name.startswith("--")}
    problems = [f"{name}: recorded, but the parser does not have it" for name in recorded if name not in actions]
    for name, kind in recorded.items():
        if name in actions and (kind == "flag") != (actions[name].nargs == 0):
            problems.append(f"{name}: recorded as {kind}, but nargs is {actions[name].nargs}")
    return problems
