"""Collect a report's figures from a folder: from the journal if it is there, else from the ledger.

A published folder has the ledger (k2convert.json) but not the journal (.k2convert/): totals and provenance are known,
figures of single tensors are not, unless the shards were just measured against the source. A running conversion has
the journal but no ledger yet. The report states what is missing; nothing is filled in.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from k2convert.checkpoint.files import list_folder
from k2convert.checkpoint.names import CONFIG_NAME, LEDGER_NAME, SHARD_SUFFIX, WORK_FOLDER
from k2convert.errors import CheckpointError, remedy
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.job_description import JobDescription
from k2convert.records.journal import Journal
from k2convert.records.ledger import TOTAL, Ledger, find_ledger, summarize
from k2convert.records.shard_record import ShardRecord
from k2convert.report.figures import (
    Provenance,
    Report,
    TensorFigures,
    figures_from_metrics,
    heat_maps,
    locate_projection,
)

_LEDGER_REMEDY = "Delete the file and run the conversion again: the file is written again from the records."


class MeasuredError(Protocol):
    """A tensor's error as measured from written bytes; see validate.decode."""

    @property
    def num_weights(self) -> int: ...
    @property
    def num_nonzero(self) -> int: ...
    @property
    def equal_nonzero(self) -> int: ...
    @property
    def sqnr_db(self) -> float | None: ...
    @property
    def relative_mse(self) -> float: ...
    @property
    def max_error_steps(self) -> float | None: ...


def collect_report(
    *,
    folder: Path,
    validation: Mapping[str, Any] | None = None,
    measured: Mapping[str, MeasuredError] | None = None,
    name: str | None = None,
    made_on: str = "",
) -> Report:
    """Collect everything about `folder`. `measured` are errors by module, used if there is no journal.

    `name` is the result's, by default the folder's. `made_on` is the report's date.

    Raises CheckpointError if the folder holds no conversion or a BF16 copy, or if its ledger or journal is damaged.
    """
    ledger, job = _read_documents(folder)
    fingerprint = _fingerprint(ledger, job)
    records = Journal(folder).records(fingerprint_digest(fingerprint))
    missing: list[str] = []
    num_stated = 0 if ledger is None else len(ledger.shards)
    planned = max(num_stated, 0 if job is None else len(job.shards), len(records))
    finished = len(records) if ledger is None else planned
    if ledger is None or len(records) == planned:
        totals, tensors = _from_records(records, folder)
    else:
        totals, tensors = _from_ledger(ledger, folder, measured, missing)
    if finished < planned:
        missing.append(
            f"The conversion is not finished: only {finished} of {planned} shards are done and counted here."
        )
    maps = heat_maps(tensors)
    if tensors and not maps:
        missing.append("No map of layers and experts: the recorded names are not those of a known model's experts.")
    if validation is None:
        missing.append(_why_not_validated(folder))
    return Report(
        name=folder.resolve().name if name is None else name,
        made_on=made_on,
        provenance=_provenance(ledger, job, records, fingerprint),
        totals=totals,
        tensors=tensors,
        maps=maps,
        finished_shards=finished,
        num_shards=planned,
        validation=validation,
        missing=tuple(missing),
    )


def check_folder(folder: Path) -> None:
    """Raise CheckpointError if there is nothing to report on. Reads only small files, so it is called first."""
    _read_documents(folder)


def _read_documents(folder: Path) -> tuple[Ledger | None, JobDescription | None]:
    """Read ledger and job; at least one of them is there."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Pass the folder of a conversion.")
    with remedy(_LEDGER_REMEDY):
        ledger = find_ledger(folder)
    job = Journal(folder).job()
    if ledger is None and job is None:
        raise CheckpointError(
            f"{folder}: has neither {LEDGER_NAME} nor {WORK_FOLDER}, so there is nothing to report on. To measure an "
            "NVFP4 checkpoint of a different tool, use `k2convert validate` with --source."
        )
    target = _recipe(ledger, job).get("target")
    if target == "int4":
        raise CheckpointError(
            f"{folder}: has the source's own weights (--to int4). There is no error to report on; `k2convert validate` "
            "compares them with the source."
        )
    if target == "bf16":
        raise CheckpointError(
            f"{folder}: holds a BF16 copy (--to bf16), which is exact. There is no error to report on."
        )
    return ledger, job


def _recipe(ledger: Ledger | None, job: JobDescription | None) -> dict[str, Any]:
    stated = {} if ledger is None else ledger.recipe
    return stated or ({} if job is None else job.recipe)


def _fingerprint(ledger: Ledger | None, job: JobDescription | None) -> dict[str, Any]:
    stated = {} if ledger is None else ledger.fingerprint
    return stated or ({} if job is None else job.fingerprint)


def can_be_validated(folder: Path) -> bool:
    """Return whether the folder holds a finished conversion with its shards."""
    return (folder / CONFIG_NAME).is_file() and any(path.name.endswith(SHARD_SUFFIX) for path in list_folder(folder))


def _why_not_validated(folder: Path) -> str:
    if not (folder / CONFIG_NAME).is_file():
        return "The servable contract was not checked: the checkpoint is not finished."
    if not can_be_validated(folder):
        return "The servable contract was not checked: the shards are not in this folder."
    return "The servable contract was not checked for this report. `k2convert validate` checks it."


def _from_records(
    records: Mapping[str, ShardRecord], folder: Path
) -> tuple[dict[str, WeightMetrics], tuple[TensorFigures, ...]]:
    tensors = tuple(
        figures_from_metrics(projection.module, projection.role, WeightMetrics.from_dict(projection.metrics))
        for _, record in sorted(records.items())
        for projection in record.projections
        if projection.metrics is not None
    )
    if not tensors:
        raise CheckpointError(f"{folder}: no converted tensor is recorded yet. Run the conversion first.")
    return summarize(records.values()), tensors


def _from_ledger(
    ledger: Ledger, folder: Path, measured: Mapping[str, MeasuredError] | None, missing: list[str]
) -> tuple[dict[str, WeightMetrics], tuple[TensorFigures, ...]]:
    if TOTAL not in ledger.totals or any(problem.startswith("totals") for problem in ledger.problems):
        problem = next((p for p in ledger.problems if p.startswith("totals")), "totals: no total")
        raise CheckpointError(f"{folder / LEDGER_NAME}: {problem}. {_LEDGER_REMEDY}")
    if measured:
        missing.append(
            f"The journal ({WORK_FOLDER}) is not in this folder. Tensors were measured again from the written bytes, "
            "so single tensors are not compared with plain and the bound."
        )
        return ledger.totals, tuple(_from_measured(module, error) for module, error in sorted(measured.items()))
    missing.append(
        f"There are no figures of single tensors: the journal ({WORK_FOLDER}) is not in this folder. Totals are those "
        f"of the ledger ({LEDGER_NAME}). With --source every tensor is measured again."
    )
    return ledger.totals, ()


def _from_measured(module: str, error: MeasuredError) -> TensorFigures:
    place = locate_projection(module)
    return TensorFigures(
        module=module,
        role=place.role if place else "unknown",
        layer=place.layer if place else None,
        expert=place.expert if place else None,
        projection=place.projection if place else None,
        num_weights=error.num_weights,
        num_nonzero=error.num_nonzero,
        equal_nonzero=error.equal_nonzero,
        sqnr_db=math.inf if error.sqnr_db is None else error.sqnr_db,
        relative_mse=error.relative_mse,
        max_error_steps=error.max_error_steps,
    )


def _provenance(
    ledger: Ledger | None,
    job: JobDescription | None,
    records: Mapping[str, ShardRecord],
    fingerprint: Mapping[str, Any],
) -> Provenance:
    recipe = _recipe(ledger, job)
    recorded = {shard: digest for record in records.values() for shard, digest in record.source_headers.items()}
    digests = {name: record.blake3 for name, record in sorted(records.items())}
    tool_version = (ledger.tool_version if ledger else "") or fingerprint.get("k2convert")
    return Provenance(
        family=_text((ledger.family if ledger else None) or recipe.get("family")),
        repo=ledger.repo if ledger else None,
        revision=_text((ledger.revision if ledger else None) or fingerprint.get("source_revision")),
        source_headers=(ledger.headers if ledger else {}) or dict(sorted(recorded.items())),
        recipe=recipe,
        fingerprint=fingerprint,
        versions={"k2convert": tool_version, **(ledger.versions if ledger else {})},
        shards={name: shard.blake3 for name, shard in ledger.shards.items()} if ledger and ledger.shards else digests,
        calibration=ledger.calibration if ledger else None,
        pruning=ledger.pruning if ledger else job.pruning if job else None,
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
