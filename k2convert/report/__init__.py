"""The human's view of a conversion: report.html to look at, report.md, report.png, and the model card.

    figures          journal, ledger and validation -> Report, and what is missing
    content          headline, sections and provenance, the same in every form; wording: numbers as text, tables
    charts           the four charts -> SVG in the page's colors, or pixels
    render, card     one Markdown text -> report.md, report.html and report.png; README.md

Apart from the day of the report, nothing here depends on time, host or path: on one day, the same folder always gives
the same files. Pillow and markdown-it are imported only when a report is written.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
from k2convert.deploy.model import Tensor
from k2convert.errors import DestinationError
from k2convert.report.figures import Report, collect_report

if TYPE_CHECKING:
    from k2convert.check.results import ValidationReport
    from k2convert.hub.source_card import SourceCard

REPORT_NAMES: Final = (REPORT_PAGE_NAME, REPORT_TEXT_NAME, REPORT_PICTURE_NAME)


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """The written files and the figures in them."""

    report: Report
    page: Path
    markdown: Path
    picture: Path


def write_report(
    *,
    folder: Path,
    out: Path | None = None,
    validation: "ValidationReport | None" = None,
    tensors: Iterable[Tensor] | None = None,
) -> ReportFiles:
    """Write the report on the conversion in `folder` into `out`, or into the folder itself.

    Without `validation` the report says that nothing was checked. `tensors` are those of the result's shards. Raises
    CheckpointError if the folder holds no finished conversion or a document is damaged, DestinationError if `out` is a
    file.
    """
    from k2convert.report.render import render_report

    target = folder if out is None else out
    if out is None and (folder / CONFIG_NAME).is_symlink():
        raise DestinationError(f"{folder}: is made of links, so nothing is written to it. Name a folder with --out.")
    if target.exists() and not target.is_dir():
        raise DestinationError(f"{target}: is a file. Pass a folder for the report.")
    report = collect_report(folder=folder, validation=validation, tensors=tensors)
    files = render_report(report)
    make_folder(target)
    for name, data in files.items():
        write_atomically(target / name, data)
    return ReportFiles(report, target / REPORT_PAGE_NAME, target / REPORT_TEXT_NAME, target / REPORT_PICTURE_NAME)


def current_report(folder: Path) -> list[str]:
    """Return the files of the report in a folder; none if it is not whole, or older than evaluation or ledger."""
    times = [(folder / name).stat().st_mtime_ns for name in REPORT_NAMES if (folder / name).is_file()]
    sources = (folder / name for name in (LEDGER_NAME, EVALUATION_NAME))
    newest = max((path.stat().st_mtime_ns for path in sources if path.is_file()), default=0)
    return list(REPORT_NAMES) if len(times) == len(REPORT_NAMES) and min(times) >= newest else []


def report_names(folder: Path) -> list[str]:
    """Return the files of the report that would be made of a finished folder; raises as `collect_report`."""
    collect_report(folder=folder)
    return list(REPORT_NAMES)


def card_files(
    folder: Path,
    *,
    repo: str,
    base_model: str | None,
    source: "SourceCard",
    revision: str | None = None,
    validation: "ValidationReport",
    tensors: Iterable[Tensor],
    retained: Sequence[str] = (),
) -> dict[str, bytes]:
    """Return the model card of a finished folder, and its report unless that is `retained`, by file name.

    `tensors` are those of the result's shards, which need not be here. `revision` is the branch if it is not main.
    """
    from k2convert.report.card import render_card
    from k2convert.report.render import render_report

    report = collect_report(folder=folder, validation=validation, tensors=tensors, name=repo)
    files = {} if retained else render_report(report)
    config = read_json_file(folder / CONFIG_NAME)
    card = render_card(report, base_model=base_model, source=source, config=config, revision=revision)
    return files | {CARD_NAME: card.encode()}
