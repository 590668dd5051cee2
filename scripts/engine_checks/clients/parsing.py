"""Gives serve commands to an engine's own parser: `ENGINE REQUEST OUT`. OUT is a JSON list of problems."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path

from scripts.engine_checks.clients import sglang_on_cpu
from scripts.engine_checks.clients.vllm_on_cpu import ENVIRONMENT


def vllm_parser() -> argparse.ArgumentParser:
    os.environ.update(ENVIRONMENT)
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def sglang_parser() -> argparse.ArgumentParser:
    sglang_on_cpu.enable()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


PARSERS = {"vllm": (vllm_parser, 1), "sglang": (sglang_parser, 2)}
"""The parser of each engine's server, and how many words (`serve`, `-m sglang.launch_server`) come before options."""


def main() -> int:
    """Parse every command of the request, and look up the recorded options; return the exit code.

    No abbreviation is accepted, although the engines do.
    """
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("engine", choices=PARSERS)
    arguments.add_argument("request", type=Path)
    arguments.add_argument("out", type=Path)
    given = arguments.parse_args()
    make_parser, skip = PARSERS[given.engine]
    parser = make_parser()
    parser.allow_abbrev = False
    request = json.loads(given.request.read_text(encoding="utf-8"))
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
    given.out.write_text(json.dumps(problems), encoding="utf-8")
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


if __name__ == "__main__":
    sys.exit(main())
