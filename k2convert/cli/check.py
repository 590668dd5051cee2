"""What `validate` and `report` do on the command line: measure a finished folder, show it, write it down."""

from pathlib import Path

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.cli import console
from k2convert.cli import progress as progress_views
from k2convert.cli.validation_view import show_validation
from k2convert.errors import CheckpointError, InvalidCheckpointError
from k2convert.report import ReportFiles, write_report
from k2convert.report.collect import can_be_validated, check_folder
from k2convert.report.document import report_document as figures_document
from k2convert.validate.layers.result import LayerBudget, LayersReport
from k2convert.validate.results import ValidationReport, folder_budget, folder_bytes, report_document
from k2convert.validate.validation import validate_checkpoint


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
) -> None:
    """Validate and show; no `layers` are all of them, None is none. InvalidCheckpointError where something fails."""
    opened = None if source is None else open_checkpoint(source)
    _check_operands(opened, layers=layers, hidden_states=hidden_states, against=against)

    def compute_layers(original: Checkpoint, converted: Checkpoint) -> LayersReport:
        from k2convert.validate.layers.check import check_layers, moe_layers

        budget = folder_budget(destination)
        return check_layers(
            source=original,
            converted=converted,
            layers=layers or moe_layers(original),
            hidden_states=hidden_states,
            tokens=tokens,
            budget=LayerBudget(layer_sqnr_db=budget.layer_sqnr_db, expert_sqnr_db=budget.expert_sqnr_db),
            progress=None if as_json else progress_views.LayerNotes().advance,
        )

    total = folder_bytes(destination) + (folder_bytes(against) if against is not None else 0)
    with progress_views.PassDisplay(what="validate", total_bytes=total, quiet=as_json) as display:
        found = validate_checkpoint(
            folder=destination,
            source=opened,
            reference=reference,
            against=against,
            check_reference_layers=compute_layers if layers is not None else None,
            progress=display.advance,
        )
    if as_json:
        console.print_json(report_document(found))
    else:
        show_validation(found)
    if not found.passed:
        raise InvalidCheckpointError(f"{destination}: validation failed; see above. Do not publish or serve it.")
    if not as_json:
        console.print_next(console.command("vllm", "serve", destination, "--trust-remote-code"))


def _check_operands(
    source: Checkpoint | None, *, layers: tuple[int, ...] | None, hidden_states: Path | None, against: Path | None
) -> None:
    """Open now what is needed after the pass over the shards, which takes hours for a large model; CheckpointError."""
    if source is not None and layers:
        from k2convert.validate.layers.check import check_layers_exist

        check_layers_exist(source, layers)
    if hidden_states is not None:
        if not hidden_states.is_file():
            raise CheckpointError(f"{hidden_states}: no such file of hidden states.")
        read_header(hidden_states)
    if against is not None:
        open_checkpoint(against)


def report(destination: Path, *, source: Path | None, validation: Path | None, out: Path | None, as_json: bool) -> None:
    """Validate what can be validated, or take the validation from a file, and write the report."""
    check_folder(destination)
    if validation is not None:
        files = write_report(folder=destination, out=out, validation=read_json_file(validation))
    elif (found := _validate_for_report(destination, source, quiet=as_json)) is not None:
        measured = found.weights.errors if found.weights is not None else None
        files = write_report(folder=destination, out=out, validation=report_document(found), measured=measured)
    else:
        files = write_report(folder=destination, out=out)
    is_sound = _show_report(files, as_json)
    if not as_json and is_sound:
        console.print_next(console.command("k2convert", "publish", destination, "--repo", "owner/name"))


def _validate_for_report(destination: Path, source: Path | None, *, quiet: bool) -> ValidationReport | None:
    if not can_be_validated(destination):
        if source is not None:
            raise CheckpointError(f"{destination}: no finished checkpoint to measure against {source}. Drop --source.")
        return None
    opened = None if source is None else open_checkpoint(source)
    with progress_views.PassDisplay(what="report", total_bytes=folder_bytes(destination), quiet=quiet) as display:
        return validate_checkpoint(folder=destination, source=opened, progress=display.advance)


def _show_report(files: ReportFiles, as_json: bool) -> bool:
    """Print what was written; returns whether the conversion is complete and no rule known to be broken."""
    written = {"html": files.page, "markdown": files.markdown, "picture": files.picture}
    document = figures_document(files.report)
    failed: list[int] = document["contract"]["failed"] if document["contract"] else []
    is_sound = files.report.is_complete and not failed
    if as_json:
        paths = {kind: None if path is None else str(path) for kind, path in written.items()}
        console.print_json({"files": paths, **document})
        return is_sound
    for path in written.values():
        if path is not None:
            console.print_line(str(path))
    for sentence in document["missing"]:
        console.print_note(sentence)
    if failed:
        rules = ", ".join(map(str, failed))
        console.print_note(f"contract rules broken: {rules}. Do not publish or serve it; see {files.page}")
    return is_sound
