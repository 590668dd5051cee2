"""Conversions of small checkpoints by the real pipeline, without the command."""

from pathlib import Path
from typing import Any

from k2convert.calibration.plan import WalkText
from k2convert.calibration.statistics import Statistics
from k2convert.checkpoint.index import open_checkpoint
from k2convert.hub.client import Hub
from k2convert.job.locations import Destination
from k2convert.job.prepare import Job, JobOptions, choose_recipe, prepare
from k2convert.job.run import execute
from k2convert.plan.recipe import settle_recipe
from k2convert.records.fingerprint import Source


def plan_job(
    source: Path | Source,
    folder: Path,
    recipe: str | None = None,
    *,
    statistics: Statistics | None = None,
    text: WalkText | None = None,
    max_disk: int | None = None,
    **keys: Any,
) -> Job:
    """A job by a recipe with changed keys."""
    opened = source if isinstance(source, Source) else Source(open_checkpoint(source))
    options = JobOptions(str(opened.checkpoint.folder), Destination(folder), max_disk=max_disk)
    chosen = choose_recipe(opened.checkpoint, recipe, keys)
    chosen = settle_recipe(chosen, has_statistics=statistics is not None, has_text=text is not None)
    return prepare(options, opened, chosen, statistics=statistics, text=text, hub=Hub())


def convert(source: Path | Source, folder: Path, *, statistics: Statistics | None = None, **keys: Any) -> Path:
    """Convert a source on the CPU; the keywords are its recipe's. Returns the result's folder."""
    execute(plan_job(source, folder, statistics=statistics, **keys))
    return folder
