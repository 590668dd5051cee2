"""The command line: every verb is a stage. Data goes to stdout, progress to stderr; each command prints the next one.

A verb's file imports at its top only what `--help` needs, which has to answer at once. The rest it imports when it
runs.
"""

import gc
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand

from k2convert import __version__
from k2convert.cli.evaluate import evaluate
from k2convert.cli.fit import fit
from k2convert.cli.guide import guide, recipes
from k2convert.cli.inspect import inspect, status
from k2convert.cli.interrupts import is_resumable, wait_for_end
from k2convert.cli.prune import prune
from k2convert.cli.publish import publish
from k2convert.cli.report import report
from k2convert.cli.run import run
from k2convert.cli.validate import validate
from k2convert.errors import InvalidCheckpointError, K2ConvertError, explain, visible

# typer has it from click, or from its own copy of click
UsageError: Final[type[Exception]] = typer.BadParameter.__bases__[0]

_SAME_THING: Final[dict[str, str]] = {
    **dict.fromkeys(("convert", "quantize", "resume"), "run"),
    **dict.fromkeys(("check", "verify"), "validate"),
    **dict.fromkeys(("info", "show"), "inspect"),
    **dict.fromkeys(("push", "upload"), "publish"),
}
"""Words that other tools have for a command, where the spelling does not give it away."""

_MANY_OPTIONS: Final = 15  # from here on, help shows them in panels

_VERBS: Final[dict[Callable[..., None], tuple[str, str]]] = {
    inspect: ("inspect Kimi-K2-Thinking", "inspect hf://moonshotai/Kimi-K2-Thinking --json"),
    fit: (
        "fit hf://moonshotai/Kimi-K2-Thinking",
        "fit Kimi-K2-Thinking --gpu rtx-pro-6000 --count 8 --experts auto",
    ),
    run: (
        "run Kimi-K2-Thinking Kimi-K2-Thinking-NVFP4 --dry-run",
        "run hf://moonshotai/Kimi-K2-Thinking hf://YOU/K2-NVFP4 --max-disk 200GB",
    ),
    prune: (
        "prune Kimi-K2-Thinking Kimi-K2-192 --keep kept.json --dry-run",
        "prune Kimi-K2-Thinking Kimi-K2-192 --keep kept.json",
    ),
    status: ("status Kimi-K2-Thinking-NVFP4", "status hf://YOU/K2-NVFP4 --json"),
    validate: (
        "validate Kimi-K2-Thinking-NVFP4 --source Kimi-K2-Thinking",
        "validate hf://YOU/K2-NVFP4 --source hf://moonshotai/Kimi-K2-Thinking",
    ),
    evaluate: (
        "evaluate Kimi-K2-Thinking Kimi-K2-Thinking-NVFP4 --text novel.txt --dry-run",
        "evaluate hf://moonshotai/Kimi-K2-Thinking OURS hf://nvidia/K2-NVFP4 --text novel.txt",
    ),
    report: (
        "report Kimi-K2-Thinking-NVFP4 --source Kimi-K2-Thinking",
        "report hf://YOU/K2-NVFP4 --out reports",
    ),
    publish: (
        "publish Kimi-K2-Thinking-NVFP4 --repo YOU/K2-NVFP4 --source Kimi-K2-Thinking",
        "publish Kimi-K2-Thinking-NVFP4 --repo YOU/K2-NVFP4@v2 --yes",
    ),
    recipes: ("recipes", "recipes --json"),
    guide: ("guide", "guide serve"),
}
"""Every verb, with two examples."""

app = typer.Typer(
    name="k2convert",
    help="Convert Kimi K2 (INT4) and Kimi K3 (MXFP4) to NVFP4: streamed, resumable, measured.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Verb(TyperCommand):
    """A command whose help shows its options in panels, and names values without their types."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an empty argument: as a path it would be the current folder."""
        for word in args:
            if re.fullmatch(r"(--[\w-]+=)?", word):
                raise typer.BadParameter(f'"{word}" is empty. Is a shell variable unset? Write "." for this folder.')
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(str(p.metavar) for p in self.get_params(ctx) if p.param_type_name == "argument")]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options; of many, each under the heading that its definition names."""
        panels: dict[str, list[tuple[str, str]]] = {}
        is_long = len(self.params) > _MANY_OPTIONS
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                panels.setdefault("Arguments", []).append((str(parameter.metavar), record[1]))
            else:
                panel = getattr(parameter, "rich_help_panel", None) if is_long else None
                panels.setdefault(panel or "Options", []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"k2convert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version.")] = False,
) -> None:
    pass


for _verb, _examples in _VERBS.items():
    _epilog = "\b\nExamples:\n" + "\n".join(f"  k2convert {example}" for example in _examples)  # \b keeps lines
    app.command(cls=Verb, epilog=_epilog)(_verb)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command. Exit codes: 0 done, 1 known error, 2 usage, 3 validation failed, 130 Ctrl-C, 143 SIGTERM."""
    gc.disable()  # a plan is hundreds of thousands of objects without cycles: scanning them doubles the planning time
    # The few small matrix products need no threads; where no more are allowed, OpenBLAS would print a page about it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A stream that the caller closed is replaced: otherwise a shard's file could get the descriptor of stdout.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            code = app(args=sys.argv[1:] if arguments is None else arguments, standalone_mode=False)
        finally:
            wait_for_end()
    except K2ConvertError as error:
        _say(str(error))
        sys.exit(3 if isinstance(error, InvalidCheckpointError) else 1)
    except UsageError as error:
        sys.stderr.write(_explain_usage(error))
        sys.exit(2)
    except typer.Abort:
        sys.stderr.write("Aborted!\n")
        sys.exit(1)
    except Exception as error:
        if (line := explain(error, resumes=is_resumable())) is None:
            raise
        _say(line)
        sys.exit(1)
    sys.exit(code or 0)


def _explain_usage(error: Any) -> str:
    """Return what to print for a UsageError: usage and message; nothing if it printed help itself."""
    shown = io.StringIO()
    error.show(file=shown)
    if "Error: " not in shown.getvalue():
        return shown.getvalue()
    *lines, message = shown.getvalue().rstrip("\n").split("Error: ", 1)
    message = " ".join(message.split()).replace(": Value error, ", ": ")
    missing = re.fullmatch(r"No such command '(\w+)'\.", message)
    if missing and missing[1] in _SAME_THING:
        message += f" Did you mean '{_SAME_THING[missing[1]]}'?"
    return f"{lines[0]}Error: {visible(message)}\n"


def _say(message: str) -> None:
    try:
        from k2convert.cli import console

        console.print_error(message)
    except Exception:  # whatever fails now, the message comes first
        sys.stderr.write(f"error: {visible(message)}\n")
