"""The verbs `validate` and `report`: measure a finished folder, show the findings, write the report."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.cli import console
from k2convert.cli.progress import Display, Waiting
from k2convert.cli.serving import print_serve
from k2convert.cli.validation_view import show_validation
from k2convert.errors import CheckpointError, InvalidCheckpointError, K2ConvertError, remedy, require_extra
from k2convert.models.projections import SOURCE_REMEDY
from k2convert.records.events import Extent
from k2convert.records.journal import Journal
from k2convert.records.ledger import find_ledger
from k2convert.report import ReportFiles, write_report
from k2convert.report.collect import can_be_validated, check_folder
from k2convert.report.document import figures_document
from k2convert.validate.results import ValidationReport, folder_bytes, validation_document
from k2convert.validate.validation import LayersRequest, validate_checkpoint

if TYPE_CHECKING:
    from k2convert.validate.layers.cost import LayersCost

_MAX_NUMBERS: Final = 8  # layers that are listed one by one
_VALIDATION_REMEDY: Final = "Write it again: `k2convert validate DEST --json > FILE`."


def validate(
    destination: Path,
    *,
    source: Path | None,
    layers: tuple[int, ...] | None,
    hidden_states: Path | None,
    tokens: int,
    reference: bool,
    against: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Validate and show the findings; raises InvalidCheckpointError if the validation fails.

    `layers` are the reference layers to compute: empty means all, None means none.
    """
    opened = None if source is None else _open_source(source)
    if reference:
        require_extra("reference", purpose="--reference")
    _check_operands(opened, layers=layers, hidden_states=hidden_states, against=against)
    request = None if layers is None else LayersRequest(layers, hidden_states, tokens)
    total = folder_bytes(destination) + (folder_bytes(against) if against is not None else 0)
    cost = (
        None
        if opened is None or layers is None
        else _say_layers_cost(opened, destination, layers, tokens=tokens, quiet=quiet)
    )
    extent = Extent({"check": (total, 0)}, num_experts=cost.num_experts if cost is not None else 0)
    display = Display("validate", extent, quiet=quiet)
    if cost is not None and cost.seconds is not None:
        display.tally.expected_seconds["layers"] = cost.seconds
    with display as events:
        found = validate_checkpoint(
            folder=destination, source=opened, reference=reference, against=against, layers=request, events=events
        )
    if as_json:
        console.print_json(validation_document(found))
    else:
        show_validation(found)
    if not found.passed:
        raise InvalidCheckpointError(f"{destination}: validation failed, see above. Do not publish or serve it.")
    if not as_json:
        print_serve(str(destination), folder=destination)


def _open_source(source: Path) -> Checkpoint:
    with remedy(SOURCE_REMEDY):
        return open_checkpoint(source)


def _say_layers_cost(
    source: Checkpoint, folder: Path, layers: tuple[int, ...], *, tokens: int, quiet: bool
) -> "LayersCost | None":
    """Say what --layers will take, before anything is read; None if the result cannot be opened."""
    from k2convert.validate.layers.cost import layers_cost

    try:
        with Waiting("measures one expert", quiet=quiet):
            cost = layers_cost(source=source, converted=open_checkpoint(folder), layers=layers)
    except K2ConvertError:  # the validation says what is wrong
        return None
    numbers = ",".join(map(str, cost.layers)) if len(cost.layers) <= _MAX_NUMBERS else f"{len(cost.layers)} layers"
    text = (
        f"--layers {numbers}: computes {cost.num_experts:,} experts on {tokens:,} tokens and reads "
        f"{console.format_bytes(cost.num_bytes)}"
    )
    if cost.seconds is not None:
        text += f", in about {console.format_seconds(cost.seconds)} (an estimate from one expert on this machine)"
    if not quiet:
        console.print_event(text)
    return cost


def _check_operands(
    source: Checkpoint | None, *, layers: tuple[int, ...] | None, hidden_states: Path | None, against: Path | None
) -> None:
    """Check now what is used after the pass over the shards, which may take hours; raises CheckpointError."""
    if layers is not None:
        require_extra("torch", purpose="--layers")
    if source is not None and layers:
        from k2convert.validate.layers.check import check_layers_exist

        check_layers_exist(source, layers)
    if hidden_states is not None:
        if not hidden_states.is_file():
            raise CheckpointError(f"{hidden_states}: no such file. Pass a file of hidden states.")
        with remedy("Capture the hidden states again, or leave out --hidden-states."):
            read_header(hidden_states)
    if against is not None:
        with remedy("Pass a complete NVFP4 checkpoint to --against."):
            open_checkpoint(against)


def report(
    destination: Path, *, source: Path | None, validation: Path | None, out: Path | None, as_json: bool, quiet: bool
) -> None:
    """Write the report, with a validation from a file or of the folder, if the folder can be validated."""
    check_folder(destination)
    if validation is not None:
        with remedy(_VALIDATION_REMEDY):
            files = write_report(folder=destination, out=out, validation=read_json_file(validation))
    elif (found := _validate_for_report(destination, source, quiet=quiet)) is not None:
        measured = found.weights.errors if found.weights is not None else None
        files = write_report(folder=destination, out=out, validation=validation_document(found), measured=measured)
    else:
        files = write_report(folder=destination, out=out)
    is_servable = _show_report(files, as_json)
    if not as_json and is_servable:
        _print_next_of_report(destination, is_complete=files.report.is_complete)


def _print_next_of_report(destination: Path, *, is_complete: bool) -> None:
    """A result is published next; a conversion that is not finished, or whose shards are gone, says how it stands."""
    if is_complete and can_be_validated(destination) and find_ledger(destination) is not None:
        console.print_next(console.command("k2convert", "publish", destination, "--repo", "owner/name"))
    elif Journal(destination).job() is not None:
        console.print_next(console.command("k2convert", "status", destination))


def _validate_for_report(destination: Path, source: Path | None, *, quiet: bool) -> ValidationReport | None:
    if not can_be_validated(destination):
        if source is not None:
            raise CheckpointError(
                f"{destination}: not a finished checkpoint with shards, so it cannot be measured against {source}. "
                "Leave out --source."
            )
        return None
    opened = None if source is None else _open_source(source)
    with Display("report", Extent({"check": (folder_bytes(destination), 0)}), quiet=quiet) as events:
        return validate_checkpoint(folder=destination, source=opened, events=events)


def _show_report(files: ReportFiles, as_json: bool) -> bool:
    """Print the written files; return whether no checked rule is broken."""
    written = {"html": files.page, "markdown": files.markdown, "picture": files.picture}
    document = figures_document(files.report)
    failed: list[int] = document["contract"]["failed"] if document["contract"] else []
    if as_json:
        paths = {kind: None if path is None else str(path) for kind, path in written.items()}
        console.print_json({"files": paths, **document})
        return not failed
    for path in written.values():
        if path is not None:
            console.print_line(str(path))
    for sentence in document["missing"]:
        console.print_note(sentence)
    if failed:
        rules = ", ".join(map(str, failed))
        console.print_note(f"contract rules broken: {rules}. Do not publish or serve it; see {files.page}")
    return not failed
