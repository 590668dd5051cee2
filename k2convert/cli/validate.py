"""`validate`: check and measure a result in a folder or on the Hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.options import (
    NOTHING_KEPT,
    TEXT_FORMS,
    Json,
    Quiet,
    ResultArgument,
    SourceOption,
    option,
    refuse_contradictions,
)
from k2convert.errors import (
    CheckpointError,
    InvalidCheckpointError,
    K2ConvertError,
    format_bytes,
    require_extra,
)
from k2convert.hub.client import SCHEME, Hub, parse_repo

if TYPE_CHECKING:
    from k2convert.check.results import LayersRequest
    from k2convert.checkpoint.index import Checkpoint
    from k2convert.job.results import OpenResult
    from k2convert.records.command import JobCommand

_SYNTHETIC_TOKENS: Final = 256
_TEXT_TOKENS: Final = 2048  # one window


def validate(
    destination: ResultArgument,
    source: SourceOption = None,
    layers: Annotated[
        str | None,
        option("MoE layers to compute: 1,30,60 or all. Needs --source; both are folders.", "LAYERS"),
    ] = None,
    text: Annotated[
        list[Path] | None,
        option(
            f"Text for --layers ({TEXT_FORMS}), 2,048 tokens of it are used [default: synthetic hidden states].",
            "FILE",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a converted checkpoint and measure its error. It checks nineteen rules, most of them the engines' own;
    with --source every weight too, and MoE layers on request. Exit code 3 if it fails.
    """
    from k2convert.check.results import LAYERS_OF_FOLDERS
    from k2convert.cli import console
    from k2convert.cli.progress import Display, waiting
    from k2convert.cli.validation_view import print_serve, show_validation
    from k2convert.job.locations import named_source
    from k2convert.job.results import open_result_at
    from k2convert.records.command import read_command
    from k2convert.records.events import Extent
    from k2convert.records.journal import check_shards_are_here
    from k2convert.records.ledger import find_ledger

    console.set_output(json=json, quiet=quiet)
    say_when_interrupted(lambda: NOTHING_KEPT, resumes=False)
    uses_hub = any(address.startswith(SCHEME) for address in (destination, source or ""))
    refuse_contradictions(
        (layers and not source, "--layers needs --source"),
        (text and layers is None, "--text gives --layers hidden states: pass --layers"),
        (layers and uses_hub, LAYERS_OF_FOLDERS),
    )
    if text:
        require_extra("calibrate", purpose="--text")
    with open_result_at(
        destination, source=source, hub=Hub(notify=console.notifier(), warn=console.print_note)
    ) as opened:
        request = None
        if layers is not None and opened.source is not None:
            with waiting("loading torch"):
                request = _layers_request(opened.source, layers, text)
        if opened.shards.result is None:
            check_shards_are_here(opened.folder)
        total = opened.num_bytes
        if opened.shards.is_remote:
            console.print_event(f"checks {format_bytes(total)}, shard by shard; what comes from the Hub is dropped")
        num_experts = 0 if request is None else request.num_experts
        with Display(Extent({"check": (total, 0)}, num_experts=num_experts)) as events:
            report = opened.validate(layers=request, events=events)
        show_validation(report)
        if not report.passed:
            command = None if opened.shards.is_remote else read_command(opened.folder)
            raise failed_validation(opened, command, is_of_source=report.is_of_source)
        ref = parse_repo(destination) if destination.startswith(SCHEME) else None
        if not source and (words := named_source(opened.folder, find_ledger(opened.folder))):
            console.print_next(console.command("k2convert", "validate", destination, *words))
        elif ref is None:
            print_serve(destination, folder=opened.folder, family=report.contract.family)
        else:
            print_serve(ref.repo, folder=opened.folder, family=report.contract.family, revision=ref.revision)


def _layers_request(source: "Checkpoint", layers: str, files: list[Path] | None) -> "LayersRequest":
    """Check a request now: it is used after the pass over the shards, which may take hours. Reads the text, if any."""
    from k2convert.check.results import LayersRequest
    from k2convert.cli import console
    from k2convert.job.opening import read_windows_of
    from k2convert.models import read_architecture
    from k2convert.plan.recipe import TextUse

    require_extra("torch", purpose="--layers")
    known = read_architecture(source).moe_layers
    numbers = known
    if layers != "all":
        from k2convert.check.reference_layers import check_layers_exist

        try:
            numbers = tuple(int(part) for part in layers.split(","))
        except ValueError:
            raise typer.BadParameter(f"--layers {layers}: expected numbers like 1,30,60, or all") from None
        check_layers_exist(source, numbers)
    windows = None
    num_below = 0
    tokens = _SYNTHETIC_TOKENS
    if files:
        tokens = _TEXT_TOKENS
        windows = read_windows_of(source, files, TextUse(tokens=tokens, window=tokens, seed=0))
        num_below = len([layer for layer in known if layer < max(numbers)])
        for note in windows.notes:
            console.print_note(note)
    num_experts = (len(numbers) + num_below) * read_architecture(source).num_experts
    return LayersRequest(numbers, windows, tokens, num_experts)


def failed_validation(opened: "OpenResult", command: "JobCommand | None", *, is_of_source: bool) -> K2ConvertError:
    """Return the error of a validation; `command` is that of the job, if it is known.

    If all that fails compares with the source (`is_of_source`), and its commit is gone, it is no verdict.
    """
    result = opened.name
    if opened.is_gone and is_of_source:
        from k2convert.cli import console

        alone = console.command("k2convert", "validate", result)
        return CheckpointError(
            f"{result}: differs from the source. {opened.warning} `{alone}` checks the result alone."
        )
    problem = f"{result}: validation failed, see above. Do not publish or serve it."
    if command is not None:
        problem += f" `{command.verifying().line(here=str(Path.cwd()))}` converts missing and changed shards again."
        problem += " If a rule names a fault of the source, mend it first."
    elif not result.startswith(SCHEME):
        problem += " If it is a copy, copy it again. Otherwise run its conversion again."
    return InvalidCheckpointError(f"{problem} {opened.warning}".rstrip())
