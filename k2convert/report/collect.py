"""Gathering a report's figures from a destination: the journal where it is, the ledger alone where it is not.

A folder that was published and downloaded again has the ledger (k2convert.json) and no journal (.k2convert/): totals
and provenance are there, figures of single tensors are not, unless the shards were measured against the source just
now. A conversion under way has the journal and no ledger yet. What is missing is said, never filled in.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from k2convert.checkpoint.files import mapping_or_empty, read_json_file
from k2convert.checkpoint.names import CONFIG_NAME, LEDGER_NAME, WORK_FOLDER
from k2convert.errors import CheckpointError
from k2convert.quantize.metrics.weight_metrics import WeightMetrics, total_metrics
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord
from k2convert.report.figures import Provenance, Report, TensorFigures, figures_from_metrics, heat_maps, locate

_MAY_BE_NONE = frozenset(
    {
        "num_codes", "max_error_steps", "recoverable_codes", "num_five_or_seven", "num_minus_eight",
        "blocks_outside_normal", "scale_spread_exceeded", "min_scale_byte", "max_scale_byte",
    }
)  # fmt: skip
_JOB_NAME = "job.json"


class MeasuredError(Protocol):
    """A tensor's error as measured from written bytes; see kernels.decode."""

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
) -> Report:
    """Gather everything about `folder`; `measured` stands in, by module, for a journal that is not there.

    Raises CheckpointError where the folder holds no conversion of ours, a BF16 copy, or figures that are no numbers.
    """
    ledger, job = _read_documents(folder)
    digest = fingerprint_digest(mapping_or_empty(ledger.get("fingerprint") or job.get("fingerprint")))
    records = {name: found for name, found in Journal(folder).records().items() if found.fingerprint == digest}
    missing: list[str] = []
    planned = max(len(mapping_or_empty(ledger.get("shards"))), len(mapping_or_empty(job.get("shards"))), len(records))
    finished = planned if ledger else len(records)
    if len(records) == planned:
        totals, tensors = _from_records(records, folder)
    else:
        totals, tensors = _from_partial(folder, ledger, records, measured, missing)
    if finished < planned:
        missing.append(
            f"The conversion is not finished: only {finished} of {planned} shards are done and counted here."
        )
    maps = heat_maps(tensors)
    if tensors and not maps:
        missing.append("No map of layers and experts: the names recorded are not those of a Kimi K2 model's experts.")
    if validation is None:
        missing.append(_why_not_validated(folder))
    return Report(
        provenance=_provenance(ledger, job, records),
        totals=totals,
        tensors=tensors,
        maps=maps,
        finished_shards=finished,
        num_shards=planned,
        validation=validation,
        missing=tuple(missing),
    )


def check_folder(folder: Path) -> None:
    """Refuse what no report can be made of; raises CheckpointError. Cheap: called before hours of measuring."""
    _read_documents(folder)


def _read_documents(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ledger and job, at least one of which is there."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Give the folder of a conversion.")
    ledger = read_json_file(folder / LEDGER_NAME) if (folder / LEDGER_NAME).exists() else {}
    job = read_json_file(folder / WORK_FOLDER / _JOB_NAME) if (folder / WORK_FOLDER / _JOB_NAME).exists() else {}
    if not ledger and not job:
        raise CheckpointError(
            f"{folder}: neither {LEDGER_NAME} nor {WORK_FOLDER} is here, so there is nothing to report on. Somebody "
            "else's NVFP4 checkpoint is measured by `k2convert validate` with --source."
        )
    if mapping_or_empty(ledger.get("recipe") or job.get("recipe")).get("target") == "bf16":
        raise CheckpointError(f"{folder}: holds a BF16 copy (--to bf16): an exact dequantisation, with no error in it.")
    return ledger, job


def can_be_validated(folder: Path) -> bool:
    """Whether the folder holds a finished conversion with its shards: one the contract can be checked on."""
    return (folder / CONFIG_NAME).is_file() and next(folder.glob("*.safetensors"), None) is not None


def _why_not_validated(folder: Path) -> str:
    if not (folder / CONFIG_NAME).is_file():
        return "The servable contract is not checked: it is a finished checkpoint's."
    if not can_be_validated(folder):
        return "The servable contract is not checked: the shards are not in this folder."
    return "The servable contract was not checked for this report: `k2convert validate` does."


def _from_records(
    records: Mapping[str, ShardRecord], folder: Path
) -> tuple[dict[str, WeightMetrics], tuple[TensorFigures, ...]]:
    by_role: dict[str, list[WeightMetrics]] = defaultdict(list)
    tensors: list[TensorFigures] = []
    for shard, record in sorted(records.items()):
        for projection in record.projections:
            if projection.metrics is None:
                continue
            try:
                metrics = WeightMetrics.from_dict(projection.metrics)
                tensors.append(figures_from_metrics(projection.module, projection.role, metrics))
            except (ValueError, TypeError, AttributeError) as error:
                where = f"{folder / WORK_FOLDER}: record of {shard}: {projection.module}"
                raise CheckpointError(f"{where}: not figures of this version ({error}). Convert again.") from None
            by_role[projection.role].append(metrics)
    if not tensors:
        raise CheckpointError(f"{folder}: no converted tensor is recorded yet. Run the conversion first.")
    totals = {role: total_metrics(found) for role, found in sorted(by_role.items())}
    if len(totals) > 1:
        return totals | {"total": total_metrics([m for found in by_role.values() for m in found])}, tuple(tensors)
    return totals | {"total": next(iter(totals.values()))}, tuple(tensors)


def _from_partial(
    folder: Path,
    ledger: Mapping[str, Any],
    records: Mapping[str, ShardRecord],
    measured: Mapping[str, MeasuredError] | None,
    missing: list[str],
) -> tuple[dict[str, WeightMetrics], tuple[TensorFigures, ...]]:
    if not ledger:
        return _from_records(records, folder)
    stated = mapping_or_empty(ledger.get("totals"))
    totals = {
        role: read_metrics(mapping_or_empty(m), where=f"{folder / LEDGER_NAME}: totals") for role, m in stated.items()
    }
    if "total" not in totals:
        raise CheckpointError(f"{folder / LEDGER_NAME}: states no totals. Measure the folder: `k2convert validate`.")
    if measured:
        missing.append(
            f"The journal ({WORK_FOLDER}) did not travel with this folder: tensors were measured again from the "
            "written bytes, without the comparison with plain and the bound tensor by tensor."
        )
        return totals, tuple(_from_measured(module, error) for module, error in sorted(measured.items()))
    missing.append(
        f"Figures of single tensors are not here: the journal ({WORK_FOLDER}) did not travel with this folder, and the "
        f"totals are the ledger's ({LEDGER_NAME}). With --source every tensor is measured again."
    )
    return totals, ()


def _from_measured(module: str, error: MeasuredError) -> TensorFigures:
    place = locate(module)
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


def read_metrics(document: Mapping[str, Any], *, where: str) -> WeightMetrics:
    """Metrics out of a file that somebody else may have written; CheckpointError where they are not all numbers."""
    try:
        metrics = WeightMetrics.from_dict(document)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: not figures of this version ({error}). Convert or download again.") from None
    for name, value in document.items():
        if name == "scale_histogram" or (value is None and name in _MAY_BE_NONE):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value < 0:
            raise CheckpointError(f"{where}: {name} is {value!r}, expected a count. Convert or download again.")
    if any(not 0 <= byte <= 127 or type(count) is not int or count < 0 for byte, count in metrics.scale_histogram):
        raise CheckpointError(f"{where}: scale_histogram is not one of E4M3 bytes. Convert or download again.")
    return metrics


def _provenance(ledger: Mapping[str, Any], job: Mapping[str, Any], records: Mapping[str, ShardRecord]) -> Provenance:
    fingerprint = mapping_or_empty(ledger.get("fingerprint") or job.get("fingerprint"))
    source = mapping_or_empty(ledger.get("source"))
    recorded = {shard: digest for record in records.values() for shard, digest in record.source_headers.items()}
    headers = mapping_or_empty(source.get("headers")) or dict(sorted(recorded.items()))
    shards = {
        name: mapping_or_empty(entry).get("blake3") for name, entry in mapping_or_empty(ledger.get("shards")).items()
    }
    version = ledger.get("k2convert") or fingerprint.get("k2convert")
    return Provenance(
        family=_text(source.get("family") or mapping_or_empty(job.get("recipe")).get("family")),
        repo=_text(source.get("repo")),
        revision=_text(source.get("revision") or fingerprint.get("source_revision")),
        source_headers={str(name): str(digest) for name, digest in headers.items()},
        recipe=mapping_or_empty(ledger.get("recipe") or job.get("recipe")),
        fingerprint=fingerprint,
        versions={"k2convert": version, **mapping_or_empty(ledger.get("versions"))},
        shards={name: str(digest) for name, digest in shards.items()}
        or {name: record.blake3 for name, record in sorted(records.items())},
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
