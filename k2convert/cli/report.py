"""`report`: measure a result if it is there, and write the report on it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from k2convert.cli.options import Json, Quiet, ResultArgument, SourceOption, check_new_place, option
from k2convert.errors import CheckpointError, K2ConvertError

if TYPE_CHECKING:
    from k2convert.check.results import ValidationReport
    from k2convert.deploy.model import Tensor
    from k2convert.job.results import OpenResult


def report(
    destination: ResultArgument,
    source: SourceOption = None,
    out: Annotated[
        str | None, option("Folder to write to [default: DEST, or . for hf://].", "FOLDER", check=check_new_place)
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a report as an HTML page, a Markdown file and an image. They are report.html, report.md and report.png."""
    from k2convert.cli import console
    from k2convert.hub.client import Hub
    from k2convert.job.results import open_result_at
    from k2convert.records.journal import Journal
    from k2convert.report import write_report
    from k2convert.report.figures import can_be_validated, figures_document, read_finished

    console.set_output(json=json, quiet=quiet)
    with open_result_at(
        destination, source=source, hub=Hub(notify=console.notifier(), warn=console.print_note)
    ) as opened:
        folder = opened.folder
        is_remote = opened.shards.result is not None
        read_finished(folder)  # raises if there is nothing to report on
        out_folder = None if out is None else Path(out)
        if out_folder is None and is_remote:
            out_folder = Path()
        validation = _validate(opened, source)
        tensors = None if validation is None else _tensors(opened)
        files = write_report(folder=folder, out=out_folder, validation=validation, tensors=tensors)
    figures = figures_document(files.report)
    paths = {"html": str(files.page), "markdown": str(files.markdown), "picture": str(files.picture)}
    notes = [partial(console.print_note, sentence) for sentence in figures["missing"]]
    console.show({"files": paths, **figures}, *paths.values(), *notes)
    if validation is not None and not validation.passed:
        which = "the validation failed"
        if failed := validation.contract.failed:
            which = f"the contract failed by rule {', '.join(map(str, failed))}"
        advice = "Do not publish or serve this result. "
        if opened.is_gone and validation.is_of_source:
            advice = ""
        advice = f"{advice}{opened.warning}".rstrip(" .")
        console.print_note(f"the report is written, but {which}. {advice}; see {files.page}")
    elif is_remote:
        return
    elif can_be_validated(folder):
        words = () if source is None else ("--source", source)
        console.print_next(console.command("k2convert", "publish", folder, "--repo", "owner/name", *words))
    elif Journal(folder).job() is not None:  # the shards have left
        console.print_next(console.command("k2convert", "status", folder))


def _tensors(opened: "OpenResult") -> "list[Tensor] | None":
    """Return the tensors of the opened result's shards; None if a shard is not here or is damaged."""
    from k2convert.checkpoint.header import ShardHeader
    from k2convert.checkpoint.index import open_checkpoint

    if (remote := opened.shards.result) is not None:
        headers = [header for header in remote.headers.values() if isinstance(header, ShardHeader)]
        is_whole = len(headers) == len(remote.headers)
        if is_whole:
            return [tensor for header in headers for tensor in header.tensors.values()]
        return None
    try:
        return list(open_checkpoint(opened.folder).tensors.values())
    except K2ConvertError:  # the validation names the problem
        return None


def _validate(opened: "OpenResult", source: str | None) -> "ValidationReport | None":
    from k2convert.cli.progress import Display
    from k2convert.records.events import Extent
    from k2convert.report.figures import can_be_validated

    if not can_be_validated(opened.folder):
        if source is not None:
            raise CheckpointError(
                f"{opened.name}: not a finished checkpoint with shards, so it cannot be measured against "
                f"{source}. Leave out --source."
            )
        return None
    with Display(Extent({"check": (opened.num_bytes, 0)})) as events:
        return opened.validate(events=events)
