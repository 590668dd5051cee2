"""The command line: every verb is a stage. Data goes to stdout, progress to stderr; each command prints the next one.

Heavy libraries are imported inside the commands, so that `--help` answers at once.
"""

import gc
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from k2convert import __version__
from k2convert.cli.calibrate_options import CalibrateOptions
from k2convert.cli.failures import UsageError, explain, explain_usage
from k2convert.cli.fit_options import FitOptions
from k2convert.cli.interrupts import Interrupted, catch_interrupts, say_interrupted
from k2convert.cli.machines import complete_part
from k2convert.cli.options import (
    TEXT_FORMS,
    DestinationArgument,
    FolderArgument,
    InspectedArgument,
    JsonOption,
    PublicOption,
    QuietOption,
    RevisionOption,
    RunOptions,
    SourceOption,
    StatisticsOption,
    StatusArgument,
    YesOption,
    existing_place,
    new_place,
    not_address,
    on_branch,
    takes,
)
from k2convert.errors import InvalidCheckpointError, K2ConvertError, visible

app = typer.Typer(
    name="k2convert",
    help="Convert Kimi K2 INT4 checkpoints to NVFP4: streamed, resumable, measured.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"k2convert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show version.")] = False,
) -> None:
    pass


@app.command()
def inspect(source: InspectedArgument, as_json: JsonOption = False) -> None:
    """Describe a checkpoint, from its headers, or a statistics file."""
    if Path(source).is_file():
        from k2convert.cli.statistics_view import inspect_statistics

        inspect_statistics(Path(source), as_json=as_json)
        return
    from k2convert.checkpoint.names import LEDGER_NAME
    from k2convert.cli import console
    from k2convert.cli.inspection_view import show_inspection, stated_pruning
    from k2convert.hub.client import Hub
    from k2convert.job.places import open_source
    from k2convert.plan.inspection import inspect_checkpoint

    with open_source(source, hub=Hub(notify=console.print_note)) as opened:
        folder = opened.checkpoint.folder
        found = inspect_checkpoint(opened.checkpoint, shown_as=source, pruning=stated_pruning(folder))
        is_result = (folder / LEDGER_NAME).is_file()
    if as_json:
        console.print_json(found.to_dict())
        return
    show_inspection(found)
    if found.recipe is not None:
        console.print_next(console.command("k2convert", "run", source, "DEST", "--dry-run"))
    elif found.nvfp4_projections and is_result:
        console.print_next(console.command("k2convert", "validate", source))


@app.command()
@takes(FitOptions)
def fit(options: FitOptions) -> None:
    """Show which GPUs hold a checkpoint, and with how much KV cache. Needs its headers only. Exit code 3 if it does not
    fit.
    """
    from k2convert.cli.fit import fit

    fit(options)


@app.command()
@takes(RunOptions)
def run(options: RunOptions) -> None:
    """Convert an INT4 checkpoint to NVFP4. Source and destination are folders or hf:// repositories. Running it again
    resumes.
    """
    from k2convert.cli.run import run

    run(options)


@app.command()
@takes(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> None:
    """Collect statistics of activations on a text. It computes SOURCE layer by layer and writes STATISTICS for `run
    --statistics`. Running it again resumes.
    """
    from k2convert.cli.calibrate import calibrate

    calibrate(options)


@app.command()
def status(destination: StatusArgument, as_json: JsonOption = False) -> None:
    """Show how far a conversion or a calibration is. For a finished one: where it was published."""
    from k2convert.cli.status import status

    status(destination, as_json=as_json)


@app.command()
def validate(
    destination: DestinationArgument,
    source: SourceOption = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="MoE layers to compute for real: 1,30,60 or all; from hf:// only these are read. Needs --source."
        ),
    ] = None,
    hidden_states: Annotated[
        Path | None, typer.Option(help="Captured hidden states (safetensors) for --layers [default: synthetic].")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"Text for --layers ({TEXT_FORMS}): the source's layers below are computed on it.", metavar="FILE"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to compute layers on.")] = 256,
    reference: Annotated[bool, typer.Option("--reference", help="Decode with the quantization libraries too.")] = False,
    statistics: StatisticsOption = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Folder of another NVFP4 checkpoint of the same source, to measure it too. Needs --source.",
            callback=existing_place,
        ),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a converted checkpoint and measure its error. It checks the servable contract, every weight, and MoE
    layers on request. Exit code 3 if it fails.
    """
    if source is None and (layers or against or reference or statistics):
        raise typer.BadParameter("--layers, --against, --reference and --statistics need --source")
    if layers and against and any(str(text).startswith("hf://") for text in (destination, source)):
        raise typer.BadParameter("with hf://, --layers reads only these layers: leave out --against")
    if text and (layers is None or hidden_states is not None):
        raise typer.BadParameter(
            "--text gives --layers its hidden states: pass --layers, and leave out --hidden-states"
        )
    if text and any(str(place).startswith("hf://") for place in (destination, source)):
        raise typer.BadParameter("--text computes all layers below, so both checkpoints must be folders, not hf://")
    from k2convert.cli import check

    check.validate(
        destination,
        source=source,
        layers=_parse_layers(layers),
        hidden_states=hidden_states,
        text=tuple(text or ()),
        tokens=tokens,
        reference=reference,
        statistics=statistics,
        against=against,
        as_json=as_json,
        quiet=quiet,
    )


def _parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the layer numbers; () for all, None for none."""
    if text is None or text == "all":
        return None if text is None else ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--layers {text}: expected numbers like 1,30,60, or all") from None


@app.command()
def report(
    destination: DestinationArgument,
    source: SourceOption = None,
    statistics: StatisticsOption = None,
    validation: Annotated[
        Path | None, typer.Option(help="Output of `validate --json`, to be shown instead of reading the shards again.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to [default: DESTINATION, or . for hf://].", callback=new_place),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a report as page, Markdown and picture. The files are report.html, report.md and report.png."""
    if source is not None and validation is not None:
        raise typer.BadParameter("--validation replaces the measurement: leave out --source")
    if statistics is not None and source is None:
        raise typer.BadParameter("--statistics needs --source")
    from k2convert.cli import check

    check.report(
        destination,
        source=source,
        statistics=statistics,
        validation=validation,
        out=out,
        as_json=as_json,
        quiet=quiet,
    )


@app.command()
def publish(
    destination: FolderArgument,
    repo: Annotated[
        str,
        typer.Option(help="Repository: owner/name[@branch].", callback=not_address, show_default=False),
    ],
    revision: RevisionOption = None,
    public: PublicOption = False,
    yes: YesOption = False,
    base_model: Annotated[
        str | None,
        typer.Option(
            help="Repository of the INT4 source, for the card and its license [default: the ledger's].",
            callback=not_address,
        ),
    ] = None,
    source: SourceOption = None,
    statistics: StatisticsOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Validate a converted checkpoint and publish it on the Hub. It makes one commit, on main or a branch."""
    if statistics is not None and source is None:
        raise typer.BadParameter("--statistics needs --source")
    from k2convert.cli.publish import publish

    publish(
        destination,
        repo=on_branch(repo, revision),
        source=source,
        statistics=statistics,
        private=not public,
        yes=yes,
        base_model=base_model,
        as_json=as_json,
        quiet=quiet,
    )


@app.command()
def recipes(as_json: JsonOption = False) -> None:
    """List the recipes that come with k2convert."""
    from k2convert.cli import console
    from k2convert.cli.views import show_recipe
    from k2convert.plan.recipe import load_recipe, shipped_recipes

    found = [load_recipe(name) for name in shipped_recipes()]
    if as_json:
        console.print_json([recipe.document() | {"purpose": recipe.purpose} for recipe in found])
        return
    for recipe in found:
        show_recipe(recipe)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command. Exit codes: 0 done, 1 known error, 2 usage, 3 validation failed, 130 interrupted."""
    gc.disable()  # a plan is hundreds of thousands of objects without cycles: scanning them doubles the planning time
    # The few small matrix products need no threads; where no more are allowed, OpenBLAS would print a page about it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _prepare_streams()
    try:
        catch_interrupts()
        code = app(args=complete_part(sys.argv[1:] if arguments is None else arguments), standalone_mode=False)
    except Interrupted as interrupt:
        sys.exit(say_interrupted(*getattr(interrupt, "__notes__", ())))
    except InvalidCheckpointError as error:
        _say(str(error))
        sys.exit(3)
    except K2ConvertError as error:
        _say(str(error))
        sys.exit(1)
    except UsageError as error:
        sys.stderr.write(explain_usage(error))
        sys.exit(2)
    except typer.Abort:
        sys.stderr.write("Aborted!\n")
        sys.exit(1)
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        _say(line)
        sys.exit(1)
    sys.exit(code or 0)


def _prepare_streams() -> None:
    """Replace each stream that the caller closed: otherwise a shard's file could get the descriptor of stdout.

    A character that a stream cannot encode is written as an escape.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(message: str) -> None:
    try:
        from k2convert.cli import console

        console.print_error(message)
    except Exception:  # whatever fails now, the message comes first
        sys.stderr.write(f"error: {visible(message)}\n")
