"""The ledger, DEST/k2convert.json: what a result was converted from, how, and what was measured.

It is derived from the plan and the records, and travels with the result. This module is the only one that knows its
form. It is written once every shard is recorded.
"""

import json
import math
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import Any, Final, TypeVar

from k2convert import __version__
from k2convert.checkpoint.files import dump_json, mapping_or_empty, read_json_file
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.errors import CheckpointError, RecipeError, quoted, remedy, shortened
from k2convert.plan.plan import Plan
from k2convert.plan.recipe import Recipe, build_recipe
from k2convert.quantize.metrics.weight_metrics import WeightMetrics, check_metrics, total_metrics
from k2convert.quantize.rules import RULES
from k2convert.records.calibration import CalibrationRecord
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.pruning import PruningRecord
from k2convert.records.shard_record import ShardRecord

T = TypeVar("T")

_FINGERPRINT_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "arithmetic": (int,),
    "source_revision": (str, NoneType),
    "source_headers": (str,),
    "source_config": (str,),
}

TOTAL: Final = "total"
_REMEDY: Final = "Delete the file and run the conversion again: the file is written again from the records."


@dataclass(frozen=True, slots=True)
class LedgerShard:
    """One shard of the result."""

    blake3: str
    num_bytes: int
    num_tensors: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """The content of k2convert.json.

    `recipe` is the resolved recipe as plain data. `headers` maps source shards to the digests of their headers.
    `totals` maps roles, and "total", to metrics. `calibration` is None for a result made without statistics, `pruning`
    for one with all experts. A damaged file gives the parts that could be read, and `problems`.
    """

    tool_version: str
    family: str | None
    repo: str | None
    revision: str | None
    headers: dict[str, str]
    recipe: dict[str, Any]
    fingerprint: dict[str, Any]
    versions: dict[str, str]
    shards: dict[str, LedgerShard]
    totals: dict[str, WeightMetrics]
    calibration: CalibrationRecord | None = None
    pruning: PruningRecord | None = None
    problems: tuple[str, ...] = field(default=())

    @property
    def digest(self) -> str:
        """The digest of the fingerprint, as the job's records carry it."""
        return fingerprint_digest(self.fingerprint)

    @property
    def num_bytes(self) -> int:
        """The bytes of all shards."""
        return sum(shard.num_bytes for shard in self.shards.values())

    def checked_recipe(self) -> Recipe | None:
        """The recipe as an object; None if this version does not accept it."""
        try:
            return build_recipe(self.recipe, where=LEDGER_NAME)
        except RecipeError:
            return None

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        shards = {
            name: {"blake3": shard.blake3, "bytes": shard.num_bytes, "tensors": shard.num_tensors}
            for name, shard in sorted(self.shards.items())
        }
        parts = {"calibration": self.calibration, "pruning": self.pruning}
        return dump_json(
            {
                "k2convert": self.tool_version,
                "source": {
                    "family": self.family,
                    "repo": self.repo,
                    "revision": self.revision,
                    "headers": dict(sorted(self.headers.items())),
                },
                "recipe": self.recipe,
                "fingerprint": self.fingerprint,
                "versions": self.versions,
                "shards": shards,
                "totals": {role: metrics.to_dict() for role, metrics in self.totals.items()},
                **{name: part.to_dict() for name, part in parts.items() if part is not None},
            }
        )


def build_ledger(
    *,
    plan: Plan,
    source: Checkpoint,
    records: Mapping[str, ShardRecord],
    fingerprint: dict[str, Any],
    repo: str | None,
    devices: Sequence[str],
    calibration: CalibrationRecord | None = None,
    pruning: PruningRecord | None = None,
) -> Ledger:
    """Build the ledger of a finished job.

    `repo` is the source's repository on the Hub, if it has one. `devices` are those that converted: "cpu", "cuda:0".
    `calibration` says which statistics were used, `pruning` which experts are kept, if any were.
    """
    return Ledger(
        tool_version=__version__,
        family=plan.family,
        repo=repo,
        revision=fingerprint["source_revision"],
        headers={shard: header.digest for shard, header in source.headers.items()},
        recipe=plan.recipe.document(),
        fingerprint=fingerprint,
        versions=_versions(plan.recipe, devices),
        shards={
            name: LedgerShard(record.blake3, record.file_bytes, record.num_tensors) for name, record in records.items()
        },
        totals=summarize(records.values()),
        calibration=calibration,
        pruning=pruning,
    )


def _versions(recipe: Recipe, devices: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of the libraries that computed."""
    libraries = ["numpy"]
    if recipe.quantizer == "reference":
        libraries += ["torch", "compressed-tensors", "nvidia-modelopt"]
    elif any(device != "cpu" for device in devices):
        libraries += ["torch", "triton"]
    elif RULES[recipe.rule].needs_walk:
        libraries.append("torch")
    return {"python": platform.python_version(), **{name: version(name) for name in libraries}}


def summarize(records: Iterable[ShardRecord]) -> dict[str, WeightMetrics]:
    """Add up the metrics of all measured projections, by role and under "total"; empty if none was measured."""
    by_role: dict[str, list[WeightMetrics]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r.shard):
        for projection in record.projections:
            if projection.metrics is not None:
                by_role[projection.role].append(WeightMetrics.from_dict(projection.metrics))
    totals = {role: total_metrics(found) for role, found in sorted(by_role.items())}
    if totals:
        totals[TOTAL] = total_metrics([m for found in by_role.values() for m in found])
    return totals


def metrics_document(metrics: WeightMetrics) -> dict[str, Any]:
    """Return metrics with the derived ratios, for --json; ratios that are not finite become None."""
    names = ("sqnr_db", "relative_mse", "achieved_to_max", "achieved_to_bound", "weighted_sqnr_db")
    ratios = {name: getattr(metrics, name) for name in names}
    if metrics.weighted_sqnr_db is None:
        del ratios["weighted_sqnr_db"]
    return metrics.to_dict() | {name: value if math.isfinite(value) else None for name, value in ratios.items()}


def below_budget(records: Iterable[ShardRecord], recipe: Recipe) -> dict[str, float]:
    """Return the SQNR in dB of the measured tensors that `validate` refuses by the recipe's budget, the worst first."""
    measured = {p.module: WeightMetrics.from_dict(p.metrics) for r in records for p in r.projections if p.metrics}
    figures = {name: metrics.sqnr_db for name, metrics in measured.items() if metrics.energy > 0.0}
    missed = {name: figure for name, figure in figures.items() if not figure >= recipe.budget.tensor_sqnr_db}
    return dict(sorted(missed.items(), key=lambda item: item[1]))


def encode_ledger(path: Path, ledger: Ledger) -> bytes:
    """Return the bytes to write to `path`. If an equal ledger is there, its versions are kept: those that converted."""
    new = json.loads(ledger.to_bytes())
    try:
        found = read_json_file(path)
    except CheckpointError:
        return ledger.to_bytes()
    is_same = isinstance(found.get("versions"), dict) and new | {"versions": found["versions"]} == found
    return dump_json(found) if is_same else ledger.to_bytes()


def parse_ledger(document: Mapping[str, Any]) -> Ledger:
    """Read a ledger leniently: what is missing or malformed is listed in `problems`."""
    problems: list[str] = []
    source = mapping_or_empty(document.get("source"))
    headers = _texts(source.get("headers", {}), "source.headers", problems)
    recipe = mapping_or_empty(document.get("recipe"))
    try:
        build_recipe(recipe, where=LEDGER_NAME)
    except RecipeError as error:
        problems.append(f"recipe: {error}")
    fingerprint = mapping_or_empty(document.get("fingerprint"))
    if not fingerprint:
        problems.append("fingerprint: missing")
    repo, revision = (_text_or_none(source.get(key), f"source.{key}", problems) for key in ("repo", "revision"))
    if not revision and not headers:
        problems.append("source: has neither a revision nor the digests of its headers")
    for key, kinds in _FINGERPRINT_TYPES.items():
        if type(fingerprint.get(key)) not in kinds and fingerprint:
            problems.append(f"fingerprint.{key}: {quoted(fingerprint.get(key))}")
    return Ledger(
        tool_version=_text_or_none(document.get("k2convert"), "k2convert", problems) or "",
        family=_text_or_none(source.get("family"), "source.family", problems),
        repo=repo,
        revision=revision,
        headers=headers,
        recipe=recipe,
        fingerprint=fingerprint,
        versions=_texts(_object(document, "versions", problems), "versions", problems),
        shards=_parse_shards(_object(document, "shards", problems), problems),
        totals=_parse_totals(_object(document, "totals", problems), problems),
        calibration=_parse_part(document, "calibration", CalibrationRecord.from_dict, problems),
        pruning=_parse_part(document, "pruning", PruningRecord.from_dict, problems),
        problems=tuple(problems),
    )


def _text_or_none(value: object, where: str, problems: list[str]) -> str | None:
    if value is None or isinstance(value, str):
        return value
    problems.append(f"{where}: not text")
    return None


def _texts(stated: object, where: str, problems: list[str]) -> dict[str, str]:
    """Return an object of texts; a problem for each value that is none, and for what is no object."""
    found = mapping_or_empty(stated)
    if found is not stated:
        problems.append(f"{where}: not an object")
    problems += [f"{where}.{shortened(name)}: not text" for name, text in found.items() if not isinstance(text, str)]
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _object(document: Mapping[str, Any], key: str, problems: list[str]) -> dict[str, Any]:
    """Return a part of the document that must be an object; empty, with a problem, if it is not."""
    if not isinstance(document.get(key), dict):
        problems.append(f"{key}: missing")
    return mapping_or_empty(document.get(key))


def _parse_shards(entries: dict[str, Any], problems: list[str]) -> dict[str, LedgerShard]:
    shards: dict[str, LedgerShard] = {}
    for name, entry in entries.items():
        stated = mapping_or_empty(entry)
        digest, size, count = stated.get("blake3"), stated.get("bytes"), stated.get("tensors", 0)
        if PurePosixPath(name).name != name:
            problems.append(f"shards: {shortened(name)}: not a file name")
        elif isinstance(digest, str) and type(size) is int and size >= 0 and type(count) is int and count >= 0:
            shards[name] = LedgerShard(digest, size, count)
        else:
            problems.append(f"shards: {shortened(name)}: no blake3, bytes and tensors")
    return shards


def _parse_totals(stated: dict[str, Any], problems: list[str]) -> dict[str, WeightMetrics]:
    totals: dict[str, WeightMetrics] = {}
    for role, metrics in stated.items():
        try:
            check_metrics(mapping_or_empty(metrics), where=f"totals.{shortened(role)}")
            totals[role] = WeightMetrics.from_dict(mapping_or_empty(metrics))
        except (ValueError, TypeError) as error:
            problems.append(str(error))
    return totals


def _parse_part(document: Mapping[str, Any], name: str, rebuild: Callable[[Any], T], problems: list[str]) -> T | None:
    """Return a part that only some results have; None, with a problem, if it is damaged."""
    if name not in document:
        return None
    try:
        return rebuild(document[name])
    except ValueError as error:
        problems.append(f"{name}: {error}")
        return None


def find_ledger(folder: Path) -> Ledger | None:
    """Read a folder's ledger leniently; None if there is none; raises MalformedFileError if it is not a JSON object."""
    path = folder / LEDGER_NAME
    return parse_ledger(read_json_file(path)) if path.exists() else None


def read_ledger(folder: Path) -> Ledger:
    """Read the ledger of a finished folder; raises CheckpointError if there is none or it is damaged."""
    with remedy(_REMEDY):
        ledger = find_ledger(folder)
    if ledger is None:
        raise CheckpointError(f"{folder}: not a finished conversion (no {LEDGER_NAME}). Finish `k2convert run` first.")
    if ledger.problems:
        raise CheckpointError(f"{folder / LEDGER_NAME}: {ledger.problems[0]}. {_REMEDY}")
    return ledger


def pruned_source(source: Checkpoint, ledger: Ledger | None) -> Checkpoint:
    """Return a result's source with the experts that the result's ledger keeps; raises PlanError if they do not fit.

    The source as it is, if the result keeps all experts or has no ledger.
    """
    return source if ledger is None or ledger.pruning is None else ledger.pruning.view(source)
