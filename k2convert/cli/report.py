"""`report`: measure a result if it is there, and write the report on it."""

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from k2convert.cli.options import (
    Json,
    Quiet,
    ResultArgument,
    SourceOption,
    check_new_place,
    option,
    refuse_contradictions,
)
from k2convert.errors import CheckpointError, K2ConvertError, remedy
from k2convert.hub.client import SCHEME

if TYPE_CHECKING:
    from k2convert.check.results import ValidationReport
    from k2convert.fit.model import Tensor
    from k2convert.job.results import OpenResult

_VALIDATION_REMEDY: Final = "Write it again: `k2convert validate DEST --json > FILE`."


def report(
    destination: ResultArgument,
    source: SourceOption = None,
    out: Annotated[
        str | None, option("Folder to write to [default: DEST, or . for hf://].", "FOLDER", check=check_new_place)
    ] = None,
    validation: Annotated[
        Path | None, option("Output of `validate --json`, to show it instead of reading the shards again.", "FILE")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a report as an HTML page, a Markdown file and an image. They are report.html, report.md and report.png."""
    from k2convert.check.results import validation_document
    from k2convert.cli import console
    from k2convert.hub.client import Hub
    from k2convert.job.results import open_result_at
    from k2convert.records.journal import Journal
    from k2convert.records.ledger import find_ledger
    from k2convert.report import write_report
    from k2convert.report.figures import can_be_validated, figures_document, read_records

    console.set_output(json=json, quiet=quiet)
    refuse_contradictions((source and validation, "--validation replaces the measurement: leave out --source"))
    with open_result_at(destination, source=source, hub=Hub(notify=console.notifier())) as opened:
        folder = opened.folder
        is_remote = opened.shards.result is not None
        read_records(folder)  # raises if there is nothing to report on
        place = None if out is None else Path(out)
        if place is None and is_remote:
            place = Path()
        with nullcontext() if validation is None else remedy(_VALIDATION_REMEDY):
            document = None
            measured = None
            if validation is not None:
                document = _read_validation(validation, destination)
            elif (found := _validate(opened, source)) is not None:
                document = validation_document(found)
                measured = found.weights and found.weights.errors
            tensors = None if document is None else _tensors(opened)
            files = write_report(folder=folder, out=place, validation=document, measured=measured, tensors=tensors)
    figures = figures_document(files.report)
    paths = {"html": str(files.page), "markdown": str(files.markdown), "picture": str(files.picture)}
    notes = [partial(console.print_note, sentence) for sentence in figures["missing"]]
    console.show({"files": paths, **figures}, *paths.values(), *notes)
    contract = figures["contract"]
    if contract is not None and not contract["passed"]:
        which = "the validation failed"
        if failed := contract["failed"]:
            which = f"the contract failed by rule {', '.join(map(str, failed))}"
        console.print_note(f"the report is written, but {which}. Do not publish or serve this result; see {files.page}")
    elif is_remote:
        return
    elif files.report.is_complete and can_be_validated(folder) and find_ledger(folder) is not None:
        words = () if source is None else ("--source", source)
        console.print_next(console.command("k2convert", "publish", folder, "--repo", "owner/name", *words))
    elif Journal(folder).job() is not None:  # it is not finished, or has left
        console.print_next(console.command("k2convert", "status", folder))


def _read_validation(file: Path, result: str) -> dict[str, Any]:
    """Read the output of `validate --json`; raises CheckpointError if it is the validation of another result."""
    from k2convert.checkpoint.files import read_json_file

    document = read_json_file(file)
    folder = document.get("folder")
    if isinstance(folder, str) and not _is_same_place(folder, result):
        raise other_validation(file, folder, result)
    return document


def _is_same_place(folder: str, result: str) -> bool:
    """Say whether the folder that a validation names is the result's. Its path may start in another working folder."""
    if folder == result:
        return True
    if SCHEME in (folder[: len(SCHEME)], result[: len(SCHEME)]):
        return False
    path = Path(os.path.normpath(folder))
    if path.resolve() == Path(result).resolve():
        return True
    names = tuple(part for part in path.parts if part != "..")
    ends = (place.parts[-len(names) :] for place in (Path(result).absolute(), Path(result).resolve()))
    return bool(names) and not path.is_absolute() and names in ends


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
    from k2convert.check.validate import validate_checkpoint
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
    with Display("report", Extent({"check": (opened.num_bytes, 0)})) as events:
        found = validate_checkpoint(
            folder=opened.folder,
            source=opened.source,
            events=events,
            shards=opened.shards,
        )
    return opened.named(found)


def other_validation(file: Path, folder: str, result: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: is the validation of {folder}, not of {result}. Name the result as the validation does, or write the "
        f"file again: `k2convert validate {result} --json > {file}`."
    )
