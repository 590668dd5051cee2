"""k2convert.json as the rules read it: what a shard's hash should be, and by which recipe the folder was made."""

import json
import platform
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, cast

from k2convert import __version__
from k2convert.checkpoint.files import dump_json, mapping_or_empty, read_json_file
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.errors import CheckpointError, K2ConvertError, RecipeError
from k2convert.plan.plan import Plan
from k2convert.plan.recipe import Recipe, build_recipe
from k2convert.quantize.metrics.weight_metrics import WeightMetrics, total_metrics
from k2convert.records.shard_record import ShardRecord


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


def summarize(records: Mapping[str, ShardRecord]) -> dict[str, WeightMetrics]:
    """Totals of all measured projections, by role and under "total"."""
    by_role: dict[str, list[WeightMetrics]] = defaultdict(list)
    for _, record in sorted(records.items()):
        for projection in record.projections:
            if projection.metrics is not None:
                by_role[projection.role].append(WeightMetrics.from_dict(projection.metrics))
    totals = {role: total_metrics(found) for role, found in sorted(by_role.items())}
    if totals:
        totals["total"] = total_metrics([m for found in by_role.values() for m in found])
    return totals


def read_totals(destination: Path) -> dict[str, WeightMetrics]:
    """The totals that the ledger of a finished conversion holds, as `summarize` made them."""
    found: dict[str, dict[str, Any]] = read_json_file(destination / LEDGER_NAME).get("totals", {})
    return {role: WeightMetrics.from_dict(metrics) for role, metrics in found.items()}


def ledger_document(
    *, plan: Plan, source: Checkpoint, records: Mapping[str, ShardRecord], fingerprint: dict[str, Any], repo: str | None
) -> dict[str, Any]:
    """k2convert.json: from what, by which recipe and versions, every shard's hash, and what was lost in numbers."""
    return {
        "k2convert": __version__,
        "source": {
            "family": plan.family,
            "repo": repo,
            "revision": fingerprint["source_revision"],
            "headers": {shard: header.digest for shard, header in sorted(source.headers.items())},
        },
        "recipe": plan.recipe.document(),
        "fingerprint": fingerprint,
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "shards": {
            name: {"blake3": record.blake3, "bytes": record.file_bytes, "tensors": record.num_tensors}
            for name, record in sorted(records.items())
        },
        "totals": {role: metrics.to_dict() for role, metrics in summarize(records).items()},
    }


def _keep_versions(path: Path, ledger: dict[str, Any]) -> dict[str, Any]:
    """The ledger that is there if it says the same but for versions: those of the run that converted."""
    try:
        found = read_json_file(path)
    except K2ConvertError:
        return ledger
    same = json.loads(dump_json(ledger | {"versions": found.get("versions")})) == found
    return found if same and isinstance(found["versions"], dict) else ledger


_LEDGER_OBJECTS = ("source", "recipe", "fingerprint", "versions", "shards", "totals")


def read_ledger_document(folder: Path) -> dict[str, Any]:
    """k2convert.json of a finished folder; raises CheckpointError where the folder is not one of ours, or damaged."""
    if not (folder / LEDGER_NAME).is_file():
        raise CheckpointError(f"{folder}: has no {LEDGER_NAME}, so it is no finished conversion. Finish `run` first.")
    ledger = read_json_file(folder / LEDGER_NAME)
    damaged = next((key for key in _LEDGER_OBJECTS if not isinstance(ledger.get(key), dict)), None)
    if damaged is None and not all(map(_is_shard_entry, ledger["shards"].items())):
        damaged = "shards"
    if damaged is None and not all(isinstance(ledger["source"].get(key), str | None) for key in ("repo", "revision")):
        damaged = "source"
    if damaged is not None:
        raise CheckpointError(
            f"{folder / LEDGER_NAME}: its {damaged} is missing or not of the form that `run` writes. "
            "Delete the file and run the conversion again: it writes it anew from its records."
        )
    return ledger


def _is_shard_entry(item: tuple[str, Any]) -> bool:
    """Whether this is a plain file name and an object that states its bytes."""
    name, entry = item
    num_bytes: Any = cast(dict[str, Any], entry).get("bytes") if isinstance(entry, dict) else None
    return PurePosixPath(name).name == name and type(num_bytes) is int and num_bytes >= 0
