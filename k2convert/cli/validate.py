"""`validate`: check and measure a result in a folder or on the Hub, and show the findings."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import open_checkpoint
from k2convert.cli import console
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.options import NOTHING_KEPT
from k2convert.cli.progress import Display, Waiting
from k2convert.cli.validation_view import print_serve, show_validation
from k2convert.cli.verbs import ValidateOptions
from k2convert.errors import (
    CheckpointError,
    InvalidCheckpointError,
    K2ConvertError,
    counted,
    format_bytes,
    remedy,
    require_extra,
)
from k2convert.hub.client import SCHEME, Hub, parse_repo
from k2convert.job.opened import Opened, open_ends
from k2convert.job.opening import read_windows_of
from k2convert.plan.recipe import TextUse
from k2convert.records.events import Extent
from k2convert.records.publication import check_shards_are_here
from k2convert.validation.remote import folder_bytes
from k2convert.validation.shards import num_kept
from k2convert.validation.validate import LayersRequest, validate_checkpoint

if TYPE_CHECKING:
    from k2convert.validation.layers.check import LayersCost

_MAX_NUMBERS: Final = 8  # layers that are listed one by one
TEXT_WINDOW: Final = 2048  # tokens that see each other, as in calibration


def validate(options: ValidateOptions) -> None:
    """Validate and show the findings; raises InvalidCheckpointError if the validation fails."""
    layers = _check_options(options)
    against = options.against
    text = options.text
    request = None if layers is None else LayersRequest(layers, options.hidden_states, options.tokens)
    hub = Hub(notify=console.notifier())
    with open_ends(options.destination, options.source, hub=hub, statistics=options.statistics) as opened:
        hidden_states = options.hidden_states
        # Checked now, because it is used after the pass over the shards, which may take hours.
        if layers is not None:
            require_extra("torch", purpose="--layers")
        if opened.source is not None and layers:
            from k2convert.validation.layers.check import check_layers_exist

            check_layers_exist(opened.source, layers)
        if hidden_states is not None:
            if not hidden_states.is_file():
                raise CheckpointError(f"{hidden_states}: no such file. Pass a file of hidden states.")
            with remedy("Capture the hidden states again, or leave out --hidden-states."):
                read_header(hidden_states)
        if against is not None:
            with remedy("Pass a complete NVFP4 checkpoint to --against."):
                open_checkpoint(against)
        if request is not None and opened.source is not None and text:
            use = TextUse(tokens=options.tokens, window=TEXT_WINDOW, seed=0)
            request = replace(request, hidden_states=(windows := read_windows_of(opened.source, text, use)))
            for note in windows.notes:
                console.print_note(note)
        if opened.shards.result is None:
            check_shards_are_here(opened.folder)
        total = opened.bytes_to_read(layers) + (folder_bytes(against) if against is not None else 0)
        if opened.shards.is_remote:
            console.print_event(f"checks {format_bytes(total)}, shard by shard; what comes from the Hub is dropped")
        cost = None if request is None else _say_layers_cost(opened, request)
        extent = Extent({"check": (total, 0)}, num_experts=0 if cost is None else cost.num_experts)
        display = Display("validate", extent)
        if cost is not None and cost.seconds is not None:
            display.tally.expected_seconds["layers"] = cost.seconds
        say_when_interrupted(partial(_how_far, opened.folder), resumes=False)
        with display as events:
            found = validate_checkpoint(
                folder=opened.folder,
                source=opened.source,
                reference=options.reference,
                against=against,
                layers=request,
                events=events,
                shards=opened.shards,
                statistics=opened.statistics,
            )
        found = opened.named(found)
        show_validation(found)
        if not found.passed:
            raise InvalidCheckpointError(f"{found.folder}: validation failed, see above. Do not publish or serve it.")
        if found.contract.layout != "int4":
            ref = parse_repo(found.folder) if found.folder.startswith(SCHEME) else None
            name, revision = (found.folder, None) if ref is None else (ref.repo, ref.revision)
            print_serve(name, folder=opened.folder, revision=revision)


def _how_far(folder: Path) -> str:
    if not (num_checked := num_kept(folder)):
        return NOTHING_KEPT
    return f"{counted(num_checked, 'shard')} checked. The same command resumes"


def _check_options(options: ValidateOptions) -> tuple[int, ...] | None:
    """Return the layers to compute: () for all, None for none; raises BadParameter for options that contradict."""
    layers = options.layers
    hidden_states = options.hidden_states
    text = options.text
    against = options.against
    uses_hub = any(str(place).startswith(SCHEME) for place in (options.destination, options.source))
    if options.source is None and (layers or against or options.reference or options.statistics):
        raise typer.BadParameter("--layers, --against, --reference and --statistics need --source")
    if layers and against and uses_hub:
        raise typer.BadParameter("with hf://, --layers reads only these layers: leave out --against")
    if text and (layers is None or hidden_states is not None):
        raise typer.BadParameter("--text gives --layers hidden states: pass --layers, and leave out --hidden-states")
    if text and uses_hub:
        raise typer.BadParameter("--text computes all layers below, so both checkpoints must be folders, not hf://")
    if options.reference:
        require_extra("reference", purpose="--reference")
    if text:
        require_extra("calibrate", purpose="--text")
    try:
        numbers = () if layers in (None, "all") else tuple(int(part) for part in str(layers).split(","))
    except ValueError:
        raise typer.BadParameter(f"--layers {layers}: expected numbers like 1,30,60, or all") from None
    return None if layers is None else numbers


def _say_layers_cost(opened: Opened, request: LayersRequest) -> "LayersCost | None":
    """Print the cost of --layers before anything is read; None if the result cannot be opened."""
    from k2convert.validation.layers.check import layers_cost

    if (source := opened.seen) is None or opened.source is None:
        return None
    try:
        with Waiting("measures one expert"):
            converted = None if opened.shards.is_remote else open_checkpoint(opened.folder)
            is_text = request.hidden_states is not None and not isinstance(request.hidden_states, Path)
            cost = layers_cost(
                source=source, whole=opened.source, converted=converted, layers=request.layers, is_text=is_text
            )
    except K2ConvertError:  # the validation names the problem
        return None
    numbers = ",".join(map(str, cost.layers)) if len(cost.layers) <= _MAX_NUMBERS else f"{len(cost.layers)} layers"
    below = f" (and {cost.num_below} layers below, for the hidden states of the text)" if cost.num_below else ""
    work = f"{cost.num_experts:,} experts on {request.tokens:,} tokens and reads {format_bytes(cost.num_bytes)}"
    text = f"--layers {numbers}{below}: computes {work}"
    if cost.seconds is not None:
        text += f", in about {console.format_seconds(cost.seconds)} (an estimate from one expert on this machine)"
    console.print_event(text)
    return cost
