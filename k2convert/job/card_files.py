"""Jobs with the Hub on either side, as the command line needs them: pre-flight, consent, card."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.names import CARD_NAME, CONFIG_NAME, LEDGER_NAME
from k2convert.errors import HubError, MissingDependencyError, PlanError
from k2convert.hub.card import PICTURES, CardFacts, build_card
from k2convert.hub.client import Hub, check_endpoint
from k2convert.hub.preflight import Target, check_target
from k2convert.hub.source_card import SourceCard
from k2convert.job.execute import output_items
from k2convert.job.places import OpenedSource
from k2convert.job.prepare import LocalJob
from k2convert.report import write_report
from k2convert.validate.results import ValidationReport, report_document


def check_job_target(local: LocalJob, opened: OpenedSource, *, repo: str, private: bool, hub: Hub) -> Target:
    """Pre-flight for a planned job, before anything is converted; raises HubError or PlanError."""
    check_endpoint()
    if local.plan.recipe.target != "nvfp4":
        raise PlanError("--to bf16 goes to a folder: only NVFP4 checkpoints are validated, and so published.")
    file_bytes = {item.name: item.output_bytes for item in output_items(local)}
    return check_target(
        hub, repo=repo, private=private, file_bytes=file_bytes, licence=opened.card.licence, source=opened.remote
    )


def confirm(target: Target, *, total_bytes: int, yes: bool, ask: Callable[[str], bool]) -> None:
    """Publishing needs a yes: typed, or --yes; raises HubError without one."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise HubError(f"{target.repo}: publishing without a terminal needs --yes.")
    kind = "private" if target.private else "PUBLIC"
    if not ask(f"Publish {total_bytes / 1e9:,.1f} GB to the {kind} repository {target.repo}?"):
        raise HubError(f"{target.repo}: not published.")


def card_files(
    folder: Path, *, repo: str, base_model: str | None, source: SourceCard, validation: ValidationReport
) -> dict[str, bytes]:
    """README.md for a finished folder, from its ledger and config, and the report that it shows."""
    made = report_files(folder, validation=validation)
    picture = next((name for name in PICTURES if name in made or (folder / name).is_file()), None)
    facts = CardFacts(
        repo=repo,
        base_model=base_model,
        ledger=read_json_file(folder / LEDGER_NAME),
        config=read_json_file(folder / CONFIG_NAME),
        source=source,
        picture=picture,
    )
    return made | {CARD_NAME: build_card(facts).encode()}


def report_files(folder: Path, *, validation: ValidationReport) -> dict[str, bytes]:
    """report.html, report.md and report.png of a finished folder; those that are there already are kept.

    Empty where the libraries that draw are not installed.
    """
    with tempfile.TemporaryDirectory(prefix="k2convert-") as temporary:
        try:
            files = write_report(folder=folder, out=Path(temporary), validation=report_document(validation))
        except MissingDependencyError:
            return {}
        made = [path for path in (files.page, files.markdown, files.picture) if path is not None]
        return {path.name: path.read_bytes() for path in made if not (folder / path.name).exists()}
