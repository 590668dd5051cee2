"""The human's view of a conversion: report.html to look at, report.md, report.png, and the model card.

    figures     journal, ledger and validation -> Report (figures), and what is missing
    checks      the document of a validation, parsed
    content     headline, sections and provenance, computed once for every form;
                calibrated: its parts on calibration, rule gptq and pruning; wording: numbers as text, tables
    charts, drawing   matplotlib figures -> SVG in the page's colors
    page, markdown   Report -> report.html and report.png, report.md and README.md

Apart from the day of the report, nothing here depends on time, host or path: on one day, the same folder always gives
the same files. matplotlib (charts) and Jinja2 (escaping) are imported only when a report is written.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k2convert.checkpoint.files import read_json_file, write_atomically
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.names import (
    CARD_NAME,
    CONFIG_NAME,
    EVALUATION_NAME,
    LEDGER_NAME,
    REPORT_PAGE_NAME,
    REPORT_PICTURE_NAME,
    REPORT_TEXT_NAME,
)
from k2convert.errors import DestinationError
from k2convert.fit.model import Tensor
from k2convert.report.figures import Report, collect_report

if TYPE_CHECKING:
    from k2convert.check.results import ValidationReport
    from k2convert.hub.source_card import SourceCard
    from k2convert.records.ledger import DecodedError

_REPORT: Final = (REPORT_PAGE_NAME, REPORT_TEXT_NAME, REPORT_PICTURE_NAME)


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """The written files and the figures in them. `picture` is None if no figures of single tensors are known."""

    report: Report
    page: Path
    markdown: Path
    picture: Path | None


def write_report(
    *,
    folder: Path,
    out: Path | None = None,
    validation: Mapping[str, Any] | None = None,
    measured: Mapping[str, "DecodedError"] | None = None,
    tensors: Iterable[Tensor] | None = None,
) -> ReportFiles:
    """Write the report on the conversion in `folder` into `out`, or into the folder itself.

    `validation` is the document of `validate --json`; without it the report says that nothing was checked. The other
    arguments are those of `collect_report`. Raises CheckpointError if the folder holds no conversion or a document is
    damaged, DestinationError if `out` is a file.
    """
    target = folder if out is None else out
    if out is None and (folder / CONFIG_NAME).is_symlink():
        raise DestinationError(f"{folder}: is made of links, so nothing is written to it. Name a folder with --out.")
    if target.exists() and not target.is_dir():
        raise DestinationError(f"{target}: is a file. Pass a folder for the report.")
    report = collect_report(folder=folder, validation=validation, measured=measured, tensors=tensors)
    files = render_report(report)
    make_folder(target)
    for file, data in files.items():
        write_atomically(target / file, data)
    picture = None
    if REPORT_PICTURE_NAME in files:
        picture = target / REPORT_PICTURE_NAME
    return ReportFiles(report, page=target / REPORT_PAGE_NAME, markdown=target / REPORT_TEXT_NAME, picture=picture)


def render_report(report: Report) -> dict[str, bytes]:
    """Return the files of a report by name; without the picture if no figures of single tensors are known."""
    from k2convert.report.markdown import render_markdown

    # Without a home that can be written to, matplotlib uses a temporary folder, and says so.
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    from k2convert.report.page import render_page, render_picture

    logger.setLevel(level)
    page = render_page(report)
    picture = render_picture(report)
    text = render_markdown(report, page=REPORT_PAGE_NAME, picture=REPORT_PICTURE_NAME if picture else None)
    files = {REPORT_PAGE_NAME: page.encode(), REPORT_TEXT_NAME: text.encode()}
    if picture is None:
        return files
    return files | {REPORT_PICTURE_NAME: picture}


def current_report(folder: Path) -> list[str]:
    """Return the files of the report in a folder; none if it is not whole, or older than evaluation or ledger."""
    found = [name for name in _REPORT if (folder / name).is_file()]
    times = [(folder / name).stat().st_mtime_ns for name in found]
    told = (folder / name for name in (LEDGER_NAME, EVALUATION_NAME))
    newest = max((path.stat().st_mtime_ns for path in told if path.is_file()), default=0)
    is_whole = REPORT_PAGE_NAME in found and REPORT_TEXT_NAME in found
    if is_whole and min(times) >= newest:
        return found
    return []


def report_names(folder: Path) -> list[str]:
    """Return the files of the report that would be made of a finished folder; raises as `collect_report`."""
    is_pictured = collect_report(folder=folder).has_picture
    return [name for name in _REPORT if is_pictured or name != REPORT_PICTURE_NAME]


def card_files(
    folder: Path,
    *,
    repo: str,
    base_model: str | None,
    source: "SourceCard",
    revision: str | None = None,
    validation: "ValidationReport",
    tensors: Iterable[Tensor],
    kept: Sequence[str] = (),
) -> dict[str, bytes]:
    """Return the model card of a finished folder, and its report unless that is `kept`, by file name.

    `tensors` are those of the result's shards, which need not be here. `revision` is the branch if it is not main.
    """
    from k2convert.check.results import validation_document
    from k2convert.report.markdown import render_card

    report = collect_report(folder=folder, validation=validation_document(validation), tensors=tensors, name=repo)
    files = {} if kept else render_report(report)
    is_pictured = REPORT_PICTURE_NAME in (kept or files)
    card = render_card(
        report,
        base_model=base_model,
        source=source,
        config=read_json_file(folder / CONFIG_NAME),
        revision=revision,
        picture=REPORT_PICTURE_NAME if is_pictured else None,
    )
    return files | {CARD_NAME: card.encode()}
