"""Conversions of small checkpoints by the real pipeline, without the command."""

from pathlib import Path
from typing import Any

from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.layer_pass import PassText
from k2convert.hub.client import Hub
from k2convert.job.locations import Destination
from k2convert.job.prepare import Job, JobOptions, choose_recipe, prepare
from k2convert.job.run import execute
from k2convert.plan.recipe import resolve_recipe
from k2convert.records.fingerprint import Source
from k2convert.text.windows import read_windows


def text_of(source: Path, files: list[Path], *, tokens: int = 320, window: int = 64) -> PassText:
    """The text of a layer pass on the CPU."""
    windows = read_windows(files, tokenizer=source, vocab_size=2048, tokens=tokens, window=window, seed=0)
    return PassText(windows, chunk=4, devices=("cpu",), threads=2)


def plan_job(
    source: Path | Source,
    folder: Path,
    recipe: str | None = None,
    *,
    text: PassText | None = None,
    max_disk: int | None = None,
    **keys: Any,
) -> Job:
    """A job by a recipe with changed keys."""
    opened = source if isinstance(source, Source) else Source(open_checkpoint(source))
    options = JobOptions(str(opened.checkpoint.folder), Destination(folder), max_disk=max_disk)
    chosen = choose_recipe(opened.checkpoint, recipe, keys)
    chosen = resolve_recipe(chosen, has_text=text is not None)
    return prepare(options, opened, chosen, text=text, hub=Hub())


def convert(source: Path | Source, folder: Path, **keys: Any) -> Path:
    """Convert a source on the CPU; the keywords are its recipe's. Returns the result's folder."""
    execute(plan_job(source, folder, **keys))
    return folder
