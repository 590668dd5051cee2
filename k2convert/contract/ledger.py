"""k2convert.json as the rules read it: what a shard's hash should be, and by which recipe the folder was made."""

from dataclasses import dataclass
from pathlib import Path

from k2convert.checkpoint.header import mapping_or_empty
from k2convert.checkpoint.index import read_json_file
from k2convert.checkpoint.sidecars import LEDGER_NAME
from k2convert.errors import CheckpointError, RecipeError
from k2convert.recipe import Recipe, build_recipe


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger's statements; `problems` are what is missing or unreadable, `is_present` whether there is a file."""

    is_present: bool
    problems: tuple[str, ...]
    recipe: Recipe | None
    shards: dict[str, tuple[str, int]]
    source_headers: dict[str, str]


def read_ledger(folder: Path) -> Ledger:
    """Read DEST/k2convert.json; nothing is raised, everything wrong with it is among `problems`."""
    path = folder / LEDGER_NAME
    if not path.exists():
        return Ledger(is_present=False, problems=("there is none",), recipe=None, shards={}, source_headers={})
    try:
        document = read_json_file(path)
    except CheckpointError as error:
        return Ledger(is_present=True, problems=(str(error),), recipe=None, shards={}, source_headers={})
    problems: list[str] = []
    recipe: Recipe | None = None
    try:
        recipe = build_recipe(mapping_or_empty(document.get("recipe")), where=str(path))
    except RecipeError as error:
        problems.append(f"recipe: {error}")
    if not mapping_or_empty(document.get("fingerprint")):
        problems.append("fingerprint: missing")
    source = mapping_or_empty(document.get("source"))
    headers = {
        name: digest for name, digest in mapping_or_empty(source.get("headers")).items() if isinstance(digest, str)
    }
    if not source.get("revision") and not headers:
        problems.append("source: neither a revision nor the digests of its headers")
    shards: dict[str, tuple[str, int]] = {}
    for name, entry in mapping_or_empty(document.get("shards")).items():
        stated = mapping_or_empty(entry)
        digest, size = stated.get("blake3"), stated.get("bytes")
        if isinstance(digest, str) and isinstance(size, int):
            shards[name] = (digest, size)
        else:
            problems.append(f"shards: {name}: no blake3 and bytes")
    return Ledger(
        is_present=True, problems=tuple(problems), recipe=recipe, shards=shards, source_headers=headers
    )  # fmt: skip
