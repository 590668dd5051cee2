"""`report`: measure a result if it is there, and write the report on it."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Final

import typer

from k2convert.check.results import ValidationReport, validation_document
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.header import ShardHeader
from k2convert.checkpoint.index import open_checkpoint
from k2convert.cli import console
from k2convert.cli.progress import Display
from k2convert.cli.verbs import ReportOptions
from k2convert.errors import CheckpointError, K2ConvertError, remedy
from k2convert.fit.model import Tensor
from k2convert.hub.client import Hub
from k2convert.job.opened import Opened, open_ends
from k2convert.records.events import Extent
from k2convert.records.journal import Journal
from k2convert.records.ledger import find_ledger
from k2convert.report import write_report
from k2convert.report.figures import can_be_validated, figures_document, read_records

_VALIDATION_REMEDY: Final = "Write it again: `k2convert validate DEST --json > FILE`."


def report(options: ReportOptions) -> None:
    """Write the report, with a validation from a file or of the folder; of a repository into the current folder."""
    if options.source is not None and options.validation is not None:
        raise typer.BadParameter("--validation replaces the measurement: leave out --source")
    hub = Hub(notify=console.notifier())
    with open_ends(options.destination, options.source, hub=hub) as opened:
        folder = opened.folder
        is_remote = opened.shards.result is not None
        read_records(folder)  # raises if there is nothing to report on
        out = Path() if options.out is None and is_remote else options.out
        with nullcontext() if options.validation is None else remedy(_VALIDATION_REMEDY):
            document = None
            measured = None
            if options.validation is not None:
                document = read_json_file(options.validation)
            elif (found := _validate(opened, options)) is not None:
                document = validation_document(found)
                measured = found.weights and found.weights.errors
            tensors = None if document is None else _tensors(opened)
            files = write_report(folder=folder, out=out, validation=document, measured=measured, tensors=tensors)
    written = {"html": files.page, "markdown": files.markdown, "picture": files.picture}
    figures = figures_document(files.report)
    failed: list[int] = figures["contract"]["failed"] if figures["contract"] else []
    has_passed = figures["contract"] is None or figures["contract"]["passed"]
    paths = {kind: str(path) for kind, path in written.items()}
    notes = [partial(console.print_note, sentence) for sentence in figures["missing"]]
    console.show({"files": paths, **figures}, *paths.values(), *notes)
    if not has_passed:
        which = "the validation failed"
        if failed:
            which = f"the contract failed by rule {', '.join(map(str, failed))}"
        console.print_note(f"the report is written, but {which}. Do not publish or serve this result; see {files.page}")
    if not has_passed or is_remote:
        return
    if files.report.is_complete and can_be_validated(folder) and find_ledger(folder) is not None:
        words = () if options.source is None else ("--source", options.source)
        console.print_next(console.command("k2convert", "publish", folder, "--repo", "owner/name", *words))
    elif Journal(folder).job() is not None:  # it is not finished, or has left
        console.print_next(console.command("k2convert", "status", folder))


def _tensors(opened: Opened) -> list[Tensor] | None:
    """Return the tensors of the opened result's shards; None if a shard is not here or is damaged."""
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


def _validate(opened: Opened, options: ReportOptions) -> ValidationReport | None:
    if not can_be_validated(opened.folder):
        if options.source is not None:
            raise CheckpointError(
                f"{options.destination}: not a finished checkpoint with shards, so it cannot be measured against "
                f"{options.source}. Leave out --source."
            )
        return None
    with Display("report", Extent({"check": (opened.num_bytes, 0)})) as events:
        found = validate_checkpoint(
            folder=opened.folder,
            source=opened.source,
            events=events,
            shards=opened.shards,
        )
    return opened.named(found)
