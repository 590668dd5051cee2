"""Conversions of small checkpoints by the real pipeline, without the command."""

from pathlib import Path
from typing import Any

from k2convert.calibration.statistics import Statistics
from k2convert.checkpoint.index import open_checkpoint
from k2convert.job.locations import Destination
from k2convert.job.prepare import choose_recipe, prepare
from k2convert.job.run import execute
from k2convert.records.fingerprint import Source


def convert(source: Path | Source, folder: Path, *, statistics: Statistics | None = None, **recipe: Any) -> Path:
    """Convert a source on the CPU; the keywords are its recipe's. Returns the result's folder."""
    opened = source if isinstance(source, Source) else Source(open_checkpoint(source))
    chosen = choose_recipe(opened.checkpoint, None, recipe)
    out = Destination(folder)
    execute(prepare(source=opened, destination=out, recipe=chosen, statistics=statistics))
    return folder
