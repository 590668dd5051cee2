"""The command line: verbs are stages. Stdout is data, stderr is progress; every command ends with the next one to run.

Heavy libraries are imported inside the commands, so that `--help` answers at once.
"""

import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from k2convert import __version__
from k2convert.cli.options import (
    ActivationsOption,
    DestinationArgument,
    Device,
    DeviceOption,
    DownInputScaleOption,
    DryRunOption,
    InputScaleOption,
    JsonOption,
    KvCacheOption,
    LayoutOption,
    MaxDiskOption,
    PublicOption,
    QuantizerOption,
    RecipeOption,
    ResultArgument,
    RuleOption,
    SourceArgument,
    TargetOption,
    WorkersOption,
    WorkFolderOption,
    YesOption,
    input_scales,
    recipe_overrides,
)
from k2convert.errors import InvalidCheckpointError, K2ConvertError

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
def inspect(source: SourceArgument, as_json: JsonOption = False) -> None:
    """Say what a checkpoint is, from its headers alone."""
    from k2convert.cli import console
    from k2convert.cli.inspection_view import show_inspection
    from k2convert.hub.client import Hub
    from k2convert.job.places import open_source
    from k2convert.plan.inspection import inspect_checkpoint

    with open_source(source, hub=Hub(notify=console.print_note)) as opened:
        found = inspect_checkpoint(opened.checkpoint)
        if opened.remote is not None:
            found = replace(found, folder=source)
    if as_json:
        console.print_json(found.to_dict())
        return
    show_inspection(found)
    if found.recipe is not None:
        console.print_next(console.command("k2convert", "run", source, "DEST", "--dry-run"))


@app.command()
def run(
    source: SourceArgument,
    destination: ResultArgument,
    recipe: RecipeOption = None,
    rule: RuleOption = None,
    layout: LayoutOption = None,
    activations: ActivationsOption = None,
    quantizer: QuantizerOption = None,
    to: TargetOption = None,
    kv_cache: KvCacheOption = None,
    input_scale: InputScaleOption = None,
    down_input_scale: DownInputScaleOption = None,
    workers: WorkersOption = None,
    device: DeviceOption = Device.auto,
    max_disk: MaxDiskOption = None,
    work_dir: WorkFolderOption = None,
    public: PublicOption = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert SOURCE into DESTINATION, each a folder or a repository of the Hub. Running it again resumes."""
    from k2convert.cli import console
    from k2convert.hub.client import Hub
    from k2convert.hub.xet import bound_memory
    from k2convert.job.places import open_source, read_destination
    from k2convert.job.prepare import choose_recipe, prepare
    from k2convert.records.journal import Journal

    scales = input_scales(input_scale, down_input_scale)
    overrides = recipe_overrides(rule, layout, activations, quantizer, to, kv_cache, scales)
    place, hub = read_destination(destination, work_folder=work_dir), Hub(notify=console.print_note)
    if place.repo is None and (public or work_dir is not None):
        raise typer.BadParameter("--public and --work-dir are for a destination on the Hub: hf://owner/name")
    if place.repo is not None:
        bound_memory()
    with open_source(source, hub=hub, pinned=Journal(place.folder).pinned_revision()) as opened:
        job = prepare(
            source=opened.checkpoint,
            destination=place.folder,
            recipe=choose_recipe(opened.checkpoint, recipe, overrides),
            device=device.value,
            workers=workers,
            revision=opened.revision,
            repo=opened.repo,
        )
        if opened.remote is not None or place.repo is not None:
            from k2convert.cli.publish import TransferOptions, run_transfer

            options = TransferOptions(source, max_disk, not public, yes, dry_run, as_json)
            run_transfer(job, opened, place, hub=hub, options=options)
        else:
            from k2convert.cli.run import run_local, show_local_plan

            if max_disk is not None:
                raise typer.BadParameter("--max-disk is for jobs with the Hub: between folders nothing is kept twice")
            if dry_run:
                show_local_plan(job, as_json)
            else:
                run_local(job, source, as_json)


@app.command()
def status(destination: DestinationArgument, as_json: JsonOption = False) -> None:
    """Say how far a conversion has come."""
    from k2convert.checkpoint.names import CONFIG_NAME
    from k2convert.cli import console
    from k2convert.cli.views import show_status, status_document
    from k2convert.records.journal import Journal

    state = Journal(destination).state(config_name=CONFIG_NAME)
    if as_json:
        console.print_json(status_document(state))
        return
    show_status(destination, state)
    if state.is_complete:
        if state.recipe["target"] == "nvfp4":
            console.print_next(console.command("k2convert", "validate", destination))
    elif not state.is_running:
        console.print_note("not running: the same `k2convert run` command resumes it")


@app.command()
def validate(
    destination: DestinationArgument,
    source: Annotated[
        Path | None, typer.Option(help="The INT4 source: measures every weight, compares copies.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="MoE layers to compute for real: 1,30,60 or all. Needs --source.")
    ] = None,
    hidden_states: Annotated[
        Path | None, typer.Option(help="Captured hidden states (safetensors) for --layers [default: synthetic].")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to compute layers on.")] = 256,
    reference: Annotated[bool, typer.Option("--reference", help="Decode with the quantisation libraries too.")] = False,
    against: Annotated[
        Path | None, typer.Option(help="Another NVFP4 checkpoint of the same source to measure beside. Needs --source.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a converted checkpoint: servable contract, weight error, reference layers. Exit code 3 if it fails."""
    if source is None and (layers or against or reference):
        raise typer.BadParameter("--layers, --against and --reference need --source")
    from k2convert.cli import check as check_commands

    check_commands.validate(
        destination,
        source=source,
        layers=_parse_layers(layers),
        hidden_states=hidden_states,
        tokens=tokens,
        reference=reference,
        against=against,
        as_json=as_json,
    )


def _parse_layers(text: str | None) -> tuple[int, ...] | None:
    """None for no layers, () for all."""
    if text is None or text == "all":
        return None if text is None else ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--layers {text}: expected numbers like 1,30,60, or all") from None


@app.command()
def report(
    destination: DestinationArgument,
    source: Annotated[Path | None, typer.Option(help="The INT4 source: measures every weight again.")] = None,
    validation: Annotated[
        Path | None, typer.Option(help="What `validate --json` printed, to show instead of reading the shards again.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write into; without it DESTINATION.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write report.html, report.md and report.png: what the conversion changed, in figures and charts."""
    if source is not None and validation is not None:
        raise typer.BadParameter("--validation stands in for measuring: leave out --source")
    from k2convert.cli import check as check_commands

    check_commands.report(destination, source=source, validation=validation, out=out, as_json=as_json)


@app.command()
def publish(
    destination: DestinationArgument,
    repo: Annotated[str, typer.Option(help="Repository to publish to: owner/name.", show_default=False)],
    public: PublicOption = False,
    yes: YesOption = False,
    base_model: Annotated[
        str | None, typer.Option(help="Repository of the INT4 source, for card and licence [default: the ledger's].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Validate a converted checkpoint and publish it on the Hub, in one commit on main."""
    from k2convert.cli import publish as hub_commands

    hub_commands.publish(destination, repo=repo, private=not public, yes=yes, base_model=base_model, as_json=as_json)


@app.command()
def recipes(as_json: JsonOption = False) -> None:
    """List the recipes that come with k2convert."""
    from k2convert.cli import console
    from k2convert.plan.recipe import load_recipe, shipped_recipes

    found = [load_recipe(name) for name in shipped_recipes()]
    if as_json:
        console.print_json([recipe.document() for recipe in found])
        return
    rows = [(r.name, r.family or "any", ", ".join(r.roles), r.rule, r.activations, r.layout) for r in found]
    console.print_table("recipes", ("name", "family", "roles", "rule", "activations", "layout"), rows)


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not KeyboardInterrupt, which the argument parser would turn into exit code 1."""


def _interrupt(_signal: int, frame: FrameType | None) -> None:
    """Raise Interrupted, after an import where one is going on: compiled modules swallow what ends theirs."""
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise Interrupted


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point. Exit codes: 0 done, 1 known error, 2 usage, 3 validation failed, 130 interrupted."""
    gc.disable()  # plans are hundreds of thousands of small objects without cycles; scanning them doubles the time
    _fill_closed_streams()
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):  # the last is an interrupt put off
            signal.signal(number, _interrupt)
        app(args=arguments)
    except Interrupted:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # another one need not wait for the message
        _say("interrupted: finished shards are kept; the same command resumes", as_error=False)
        sys.exit(130)
    except InvalidCheckpointError as error:
        _say(str(error), as_error=True)
        sys.exit(3)
    except K2ConvertError as error:
        _say(str(error), as_error=True)
        sys.exit(1)
    sys.exit(0)


def _fill_closed_streams() -> None:
    """Put a stream in the place of each that the caller closed: else a shard's file could become the next stdout."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - as long as the process lives


def _say(message: str, *, as_error: bool) -> None:
    from k2convert.cli import console

    (console.print_error if as_error else console.print_note)(message)


if __name__ == "__main__":
    main()
