"""The report on a conversion for people: report.html to look at, report.md and report.png for the model card.

    collect    journal, ledger and validation -> Report (figures), and what is missing
    checks     the document of a validation, parsed
    content    the words and rows that page and Markdown share; formatting: numbers as text
    needs      memory and GPUs of a finished result
    calibration, calibration_charts     what a result was calibrated with, if it was
    feedback, feedback_charts           what rule feedback did in each layer, if that was the rule
    pruning    which experts were kept, if not all, and what that may cost
    charts, heat_map, sheet, palette    matplotlib figures -> SVG in the page's colors
    page, markdown, picture             Report -> report.html, report.md, report.png

Apart from the day of the report, nothing here depends on time, host or path: on one day, the same folder always gives
the same files. matplotlib (charts) and Jinja2 (escaping) are imported only when a report is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from k2convert.checkpoint.files import write_atomically
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.names import REPORT_PAGE_NAME, REPORT_PICTURE_NAME, REPORT_TEXT_NAME
from k2convert.errors import DestinationError
from k2convert.fit.needs import Needs
from k2convert.report.checks import read_checks
from k2convert.report.collect import MeasuredError, collect_report
from k2convert.report.figures import Report

__all__ = ["ReportFiles", "write_report"]


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
    measured: Mapping[str, MeasuredError] | None = None,
    needs: Needs | None = None,
    name: str | None = None,
) -> ReportFiles:
    """Write the report on the conversion in `folder` into `out`, or into the folder itself.

    `validation` is the document of `validate --json`; without it the report says that nothing was checked. `measured`
    are errors by module, used if there is no journal. `needs` are the result's (see needs). `name` is the result's, by
    default the folder's. Raises CheckpointError if the folder holds no conversion or a document is damaged,
    DestinationError if `out` is a file.
    """
    from k2convert.report.markdown import render_markdown
    from k2convert.report.page import render_page
    from k2convert.report.picture import render_picture

    target = folder if out is None else out
    if target.exists() and not target.is_dir():
        raise DestinationError(f"{target}: is a file. Pass a folder for the report.")
    checks = None if validation is None else read_checks(validation)
    made_on = datetime.now(UTC).date().isoformat()
    report = collect_report(folder=folder, validation=validation, measured=measured, name=name, made_on=made_on)
    report = replace(report, needs=needs)
    page, picture = render_page(report, checks), render_picture(report)
    text = render_markdown(report, checks, page=REPORT_PAGE_NAME, picture=REPORT_PICTURE_NAME if picture else None)
    make_folder(target)
    write_atomically(target / REPORT_PAGE_NAME, page.encode())
    write_atomically(target / REPORT_TEXT_NAME, text.encode())
    if picture is not None:
        write_atomically(target / REPORT_PICTURE_NAME, picture)
    return ReportFiles(
        report=report,
        page=target / REPORT_PAGE_NAME,
        markdown=target / REPORT_TEXT_NAME,
        picture=target / REPORT_PICTURE_NAME if picture is not None else None,
    )
