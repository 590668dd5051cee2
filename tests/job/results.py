"""The files and the tensors of a result."""

from pathlib import Path
from typing import Any

from k2convert.checkpoint.header import read_header
from k2convert.checkpoint.index import open_checkpoint
from k2convert.job.locations import Destination
from k2convert.job.prepare import Job, choose_recipe, prepare
from k2convert.records.fingerprint import Source


def plan_job(
    source: Path, out: Path, recipe: str | None = None, *, more: dict[str, Any] | None = None, **keys: Any
) -> Job:
    """A job by a recipe with changed keys; `more` goes to `prepare`."""
    checkpoint = open_checkpoint(source)
    return prepare(
        source=Source(checkpoint),
        destination=Destination(out),
        recipe=choose_recipe(checkpoint, recipe, keys),
        **(more or {}),
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a result but the lock, whose content is the last owner's business, and what has times of files."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in ("lock", "command.json"))
    files = (p for p in files if not p.name.endswith(".json.k2convert"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def files_of(folder: Path, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """The files of a result that are published."""
    return {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file() and path.name not in without}


def raw_tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor by name."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        found |= {name: data[t.begin : t.end] for name, t in read_header(path).tensors.items()}
    return found
