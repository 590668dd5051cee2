"""The human's view of a conversion: report.html to look at, report.md and report.png for the model card.

    collect    journal, ledger and validation -> Report (figures), and what is missing
    checks     the validation's document, taken apart
    content    the words and rows that page and Markdown share
    charts, heat_map, sheet, palette    matplotlib figures -> SVG that follows the page's colours
    page, markdown, picture             Report -> report.html, report.md, report.png

Nothing here depends on time, host or path: the same folder always gives the same files. matplotlib (charts) and Jinja2
(escaping) are imported when a report is written and by no other command.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k2convert.checkpoint.files import make_folder, write_atomically
from k2convert.errors import DestinationError
from k2convert.report.checks import read_checks
from k2convert.report.collect import MeasuredError, can_be_validated, check_folder, collect_report
from k2convert.report.document import report_document
from k2convert.report.figures import Report

__all__ = [
    "MeasuredError",
    "Report",
    "ReportFiles",
    "can_be_validated",
    "check_folder",
    "collect_report",
    "report_document",
    "write_report",
]

PAGE_NAME = "report.html"
MARKDOWN_NAME = "report.md"
PICTURE_NAME = "report.png"


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """What was written, and the figures it was made of; `picture` is None where no single tensor is known."""

    report: Report
    page: Path
    markdown: Path
    picture: Path | None


def write_report(
    *,
    folder: Path,
    out: Path | None = None,
    validation: Mapping[str, Any] | None = None,
    measured: Mapping[str, MeasuredError] | None = None,
) -> ReportFiles:
    """Write the report on the conversion in `folder` into `out` (the folder itself, if not given).

    `validation` is the document of `validate --json`; without it the report says that nothing was checked. `measured`
    are errors by module that stand in for a missing journal. Raises CheckpointError where the folder holds no
    conversion or a document is damaged, DestinationError where `out` is a file.
    """
    from k2convert.report.markdown import render_markdown
    from k2convert.report.page import render_page
    from k2convert.report.picture import render_picture

    target = folder if out is None else out
    if target.exists() and not target.is_dir():
        raise DestinationError(f"{target}: is a file. Name a folder for the report.")
    checks = None if validation is None else read_checks(validation)
    report = collect_report(folder=folder, validation=validation, measured=measured)
    page, picture = render_page(report, checks), render_picture(report)
    text = render_markdown(report, checks, page=PAGE_NAME, picture=PICTURE_NAME if picture else None)
    make_folder(target)
    write_atomically(target / PAGE_NAME, page.encode())
    write_atomically(target / MARKDOWN_NAME, text.encode())
    if picture is not None:
        write_atomically(target / PICTURE_NAME, picture)
    return ReportFiles(
        report=report,
        page=target / PAGE_NAME,
        markdown=target / MARKDOWN_NAME,
        picture=target / PICTURE_NAME if picture is not None else None,
    )
