"""The ledger, DEST/k2convert.json: what a result was converted from, how, and what was measured.

It is derived from the plan and the records of finished shards, and travels with the result. This module is the only one
that knows its form. It is written once every shard is recorded.
"""

import math
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, cast

from blake3 import blake3
from pydantic import AfterValidator, BeforeValidator, Field

from k2convert import __version__
from k2convert.checkpoint.files import is_there, read_text_file
from k2convert.checkpoint.index import Checkpoint, check_level
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.errors import CheckpointError, InvalidCheckpointError, quoted, remedy, shortened
from k2convert.models.config import FP8
from k2convert.plan.plan import Plan
from k2convert.plan.recipe import FP8_SQNR_DB, Recipe
from k2convert.quantize.metrics.weight_metrics import MetricsSum, WeightMetrics
from k2convert.quantize.rules import RULES
from k2convert.records.calibration import CalibrationRecord
from k2convert.records.document import Count, JsonObject, Real, encode, plain, shown
from k2convert.records.fingerprint import Source, StoredRecipe, fingerprint_digest, parse_described, source_digest


def _checked(metrics: WeightMetrics) -> WeightMetrics:
    for field in fields(metrics):
        figure: Any = getattr(metrics, field.name)
        values: Any = (*figure, *figure.values()) if isinstance(figure, dict) else (figure,)
        if not all(value is None or (value >= 0 and math.isfinite(value)) for value in values):
            raise ValueError(f"{field.name} has a figure that is negative or not finite")
    if max(metrics.scale_histogram, default=0) > 127:
        raise ValueError("scale_histogram has a byte above 127")
    return metrics


_FIGURES: Final = frozenset(field.name for field in fields(WeightMetrics))
_BYTES: Final = {str(byte): byte for byte in range(256)}


def _of_this_version(stated: object) -> object:
    """Leave out figures that only earlier versions measured, so that their results stay readable."""
    if not isinstance(stated, dict):
        return stated
    figures = {name: value for name, value in cast("dict[str, Any]", stated).items() if name in _FIGURES}
    if isinstance(histogram := figures.get("scale_histogram"), dict):
        # Keys of JSON are text. Pydantic reads them as integers only if it sees the text of the whole document.
        counts = cast("dict[str, Any]", histogram)
        figures["scale_histogram"] = {_BYTES.get(key, key): count for key, count in counts.items()}
    return figures


Metrics = Annotated[WeightMetrics, BeforeValidator(_of_this_version), AfterValidator(_checked)]


@dataclass(frozen=True, slots=True)
class ProjectionRecord:
    """Measurements of one converted projection. The global scale of FP8 is 1: each row has a scale of its own."""

    module: str
    role: str
    global_scale: Real
    metrics: Metrics | None


ALL_ZERO: Final = "all weights are zero"
MOST_MINUS_EIGHT: Final = 0.1
"""More codes of -8 than this are suspicious. Even codes have a sixteenth; two's complement makes an eighth of zeros."""
MOST_OF_ZEROS: Final = 0.2  # more codes of -8 than this are a range of zero bytes, not another code


def is_weight(name: str) -> bool:
    """Return whether a tensor that is all zero is suspicious, by its name: a bias may be zero."""
    return name.endswith(".weight")


def codes_warning(num_minus_eight: int | None, num_codes: int | None) -> str:
    """Return what the codes of a source weight make suspicious; empty for most, and for other weights than INT4."""
    count = num_minus_eight
    total = num_codes
    if count is None or not total or count <= MOST_MINUS_EIGHT * total:
        return ""
    share = f"{100 * count / total:.0f} % of the codes are -8, which Moonshot's training never writes"
    if count > MOST_OF_ZEROS * total:
        return f"{share}: a range of zeros in the file?"
    return f"{share}: two's complement?"


def proven(metrics: WeightMetrics, decoded: WeightMetrics | None) -> WeightMetrics:
    """Return the figures of a cast weight with whether every decoded value is the source's, None if not decoded."""
    if metrics.below_window_groups is None:
        return metrics
    if decoded is None:
        return replace(metrics, lossless_tensors=None)
    return replace(metrics, lossless_tensors=decoded.lossless_tensors)


def _is_scalar(data: str) -> str:
    if not re.fullmatch("[0-9a-f]{8}", data):
        raise ValueError(f"{quoted(data)} is not four bytes as hex")
    return data


Scalar = Annotated[str, AfterValidator(_is_scalar)]


@dataclass(frozen=True, slots=True)
class ShardFindings:
    """Findings of validation on a shard before its upload, by tensor. All that it compared with the source agreed."""

    blake3: str  # of the file as it was read
    copied: tuple[str, ...]  # tensors with the source's bytes
    scaled: tuple[str, ...]  # those of them that smoothing changes
    decoded: dict[str, Metrics]  # by module
    certified_rows: dict[str, Count]  # that the certificate checked, by module
    certified_whole: bool  # whether these are all
    invalid_scales: dict[str, Count]
    subnormal_scales: dict[str, Count]
    zero_blocks_with_codes: dict[str, Count]
    scalars: dict[str, Scalar]  # as hex


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One finished shard: hashes and size of the file, digests of the source headers it was converted from."""

    shard: str
    fingerprint: str
    blake3: str
    file_bytes: Count
    num_tensors: Count
    source_headers: dict[str, str]
    projections: tuple[ProjectionRecord, ...] = ()
    sha256: str | None = None  # by which the Hub identifies files; set, as `checked`, if written for upload
    zero_copies: tuple[str, ...] = ()  # copied weights that are all zero
    checked: ShardFindings | None = None

    def __post_init__(self) -> None:
        checked = self.checked
        modules = {projection.module for projection in self.projections}
        if checked is not None and not checked.decoded.keys() == modules:
            raise ValueError("checked and projections name different modules")

    @property
    def is_checked(self) -> bool:
        """Return whether the bytes with this hash were compared with the source."""
        return self.checked is not None and self.checked.blake3 == self.blake3


TOTAL: Final = "total"
MAX_NAMED: Final = 3
_REMEDY: Final = "Delete the file and run the conversion again: the file is written again from the records."


@dataclass(frozen=True, slots=True)
class LedgerShard:
    """One shard of the result."""

    blake3: str
    num_bytes: Annotated[Count, Field(alias="bytes")]
    num_tensors: Annotated[Count, Field(alias="tensors")]


@dataclass(frozen=True, slots=True)
class LedgerSource:
    """Source that was converted: a folder, or a commit on the Hub. `headers` are digests of its shards' headers."""

    family: str | None
    repo: str | None
    revision: str | None
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Ledger:
    """The content of k2convert.json. `totals` maps roles, and "total", to metrics.

    `pruning` lists the experts that versions up to 0.3 kept of a source with more; `k2convert prune --keep` reads it.
    """

    tool_version: Annotated[str, Field(alias="k2convert")]
    source: LedgerSource
    recipe: StoredRecipe
    fingerprint: JsonObject
    versions: dict[str, str]
    shards: dict[str, LedgerShard]
    totals: dict[str, Metrics]
    calibration: CalibrationRecord | None = None
    pruning: JsonObject | None = None

    def __post_init__(self) -> None:
        kinds = {"arithmetic": int, "source_revision": str | None, "source_headers": str, "source_config": str}
        for key, kind in kinds.items():
            if not isinstance(self.fingerprint.get(key, ...), kind):
                raise ValueError(f"fingerprint.{key} is {quoted(self.fingerprint.get(key))}")
        for name in self.shards:
            if PurePosixPath(name).name != name:
                raise ValueError(f"shards: {shortened(name)} is not a file name")

    @property
    def digest(self) -> str:
        return fingerprint_digest(self.fingerprint)

    @property
    def weights(self) -> str:
        """The digest that stands for the weights: of names and contents of all shards."""
        digest = blake3()
        for name, shard in sorted(self.shards.items()):
            digest.update(f"{name}\0{shard.blake3}\n".encode())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards.values())


def build_ledger(
    *,
    plan: Plan,
    source: Source,
    records: Mapping[str, ShardRecord],
    fingerprint: JsonObject,
    calibration: CalibrationRecord | None,
) -> Ledger:
    """Build the ledger of a finished job."""
    libraries = ["numpy"]
    if plan.recipe.quantizer == "reference":
        libraries += ["torch", "compressed-tensors", "nvidia-modelopt"]
    elif RULES[plan.recipe.rule].needs_text:
        libraries.append("torch")
    return Ledger(
        tool_version=__version__,
        source=LedgerSource(
            family=plan.family,
            repo=source.repo,
            revision=cast("str | None", fingerprint["source_revision"]),
            headers={shard: header.digest for shard, header in sorted(source.checkpoint.headers.items())},
        ),
        recipe=plan.recipe,
        fingerprint=fingerprint,
        versions={"python": platform.python_version(), **{name: version(name) for name in libraries}},
        shards={
            name: LedgerShard(record.blake3, record.file_bytes, record.num_tensors)
            for name, record in ((name, records[name]) for name in sorted(records))  # one at a time in memory
        },
        totals=summarize(records.values()),
        calibration=calibration,
    )


def summarize(records: Iterable[ShardRecord]) -> dict[str, WeightMetrics]:
    """Add up measured metrics by role and "total". Only shards compared with the source count lossless tensors."""
    return sum_by_role(_measured(records))


def _measured(records: Iterable[ShardRecord]) -> Iterator[tuple[str, WeightMetrics]]:
    for record in records:
        decoded = record.checked.decoded if record.checked is not None and record.is_checked else {}
        for projection in record.projections:
            if projection.metrics is not None:
                yield projection.role, proven(projection.metrics, decoded.get(projection.module))


def sum_by_role(measured: Iterable[tuple[str, WeightMetrics]]) -> dict[str, WeightMetrics]:
    """Add up the metrics of weights by their roles and under "total"; empty if there are none."""
    by_role: dict[str, MetricsSum] = defaultdict(MetricsSum)
    for role, metrics in measured:
        by_role[role].add(metrics)
        by_role[TOTAL].add(metrics)
    return {role: by_role[role].total() for role in (*sorted(by_role.keys() - {TOTAL}), *by_role.keys() & {TOTAL})}


def totals_by_format(totals: Mapping[str, WeightMetrics]) -> dict[str, WeightMetrics]:
    """Return the sums of "NVFP4" and of "FP8" weights if there are both, else that of "total"; nothing without it."""
    formats: dict[str, MetricsSum] = defaultdict(MetricsSum)
    for role, metrics in totals.items():
        if role != TOTAL:
            formats["NVFP4" if metrics.num_blocks else FP8].add(metrics)
    if len(formats) > 1:
        return {name: formats[name].total() for name in ("NVFP4", FP8)}
    return {TOTAL: totals[TOTAL]} if TOTAL in totals else {}


def shown_totals(totals: Mapping[str, WeightMetrics]) -> dict[str, WeightMetrics]:
    """Return totals by role, or "role, FP8", and one sum for each format: an error of both together says nothing."""
    sums = totals_by_format(totals)
    if TOTAL in sums or not sums:
        return dict(totals)
    roles = {(role if m.num_blocks else f"{role}, {FP8}"): m for role, m in totals.items() if role != TOTAL}
    return roles | {f"{TOTAL}, {name}": metrics for name, metrics in sums.items()}


def metrics_document(metrics: WeightMetrics) -> dict[str, Any]:
    """Return metrics with the derived ratios, for --json; ratios that are not finite become None."""
    names = ("sqnr_db", "relative_mse", "achieved_to_max")
    ratios = {name: getattr(metrics, name) for name in names}
    return plain(metrics) | shown(ratios)


def below_budget(records: Iterable[ShardRecord], recipe: Recipe) -> dict[str, float]:
    """Return the SQNR in dB of the measured tensors that `validate` refuses by the recipe's budget, the worst first."""
    measured = ((p, p.metrics) for r in records for p in r.projections if p.metrics and p.metrics.energy > 0.0)
    missed = {p.module: m.sqnr_db for p, m in measured if not m.sqnr_db >= recipe.least_sqnr_db(p.role)}
    return dict(sorted(missed.items(), key=lambda item: item[1]))


def source_warnings(records: Iterable[ShardRecord]) -> list[str]:
    """Return what makes the source suspicious, a sentence for each kind: weights that are zero, codes of -8."""
    zeros = list[str]()
    minus_eights = dict[str, str]()
    for record in records:
        zeros += record.zero_copies
        for projection in record.projections:
            if projection.metrics is None:
                continue
            if projection.metrics.energy == 0.0:
                zeros.append(projection.module)
            elif warning := codes_warning(projection.metrics.num_minus_eight, projection.metrics.num_codes):
                minus_eights[projection.module] = warning
    sentences = list[str]()
    if zeros:
        sentences.append(f"{_some(zeros)}: {ALL_ZERO}")
    if minus_eights:
        sentences.append(f"{_some(list(minus_eights))}: {next(iter(minus_eights.values()))}")
    return sentences


def _some(names: Sequence[str]) -> str:
    first = ", ".join(sorted(names)[:MAX_NAMED])
    if len(names) <= MAX_NAMED:
        return first
    return f"{len(names):,} tensors ({first}, ...)"


def check_budget(folder: Path, recipe: Recipe, missed: Mapping[str, float]) -> None:
    """Raise InvalidCheckpointError if tensors are below the recipe's budget: `validate` fails. The result stays."""
    if missed:
        least = recipe.budget.tensor_sqnr_db
        if min(missed.values()) >= least:  # only FP8 has a higher one
            least = FP8_SQNR_DB
        worst = ", ".join(f"{name} has {figure:.2f} dB" for name, figure in list(missed.items())[:3])
        raise InvalidCheckpointError(
            f"{folder}: {len(missed)} {'tensor is' if len(missed) == 1 else 'tensors are'} below the error budget of "
            f"{least:g} dB, so `validate` fails: {worst}{', ...' if len(missed) > 3 else ''}. "
            "Choose a different rule, or set `budget` in the recipe."
        )


def encode_ledger(path: Path, ledger: Ledger) -> bytes:
    """Return the bytes to write to `path`. If an equal ledger is there, its versions stay: those that converted."""
    try:
        earlier = parse_ledger(read_text_file(path), where=str(path))
    except CheckpointError:
        return encode(ledger)
    unchanged = encode(replace(ledger, versions=earlier.versions))
    return unchanged if unchanged == encode(earlier) else encode(ledger)


def parse_ledger(text: str, *, where: str) -> Ledger:
    """Return the ledger in a text; raises MalformedFileError. Fields that only earlier releases have are left out."""
    return parse_described(Ledger, text, where=where)


def find_ledger(folder: Path) -> Ledger | None:
    """Read a folder's ledger; None if there is none; raises MalformedFileError."""
    path = folder / LEDGER_NAME
    if is_there(path):
        return parse_ledger(read_text_file(path), where=str(path))
    return None


def read_ledger(folder: Path) -> Ledger:
    """Read the ledger of a finished folder; raises CheckpointError if there is none or it is damaged."""
    with remedy(_REMEDY):
        ledger = find_ledger(folder)
    if ledger is None:
        check_level(folder)
        raise CheckpointError(f"{folder}: not a finished conversion (no {LEDGER_NAME}). Finish `k2convert run` first.")
    return ledger


def weights_digest(checkpoint: Checkpoint, ledger: Ledger | None) -> str:
    """Return the digest that stands for the weights' bytes: the ledger's, or without one that of the headers."""
    if ledger is None:
        return source_digest(checkpoint)
    return ledger.weights
