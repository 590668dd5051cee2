"""Validating a result whose shards left the disk one by one, with the source: all nineteen rules and every weight.

Each shard was compared with its source while it was converted (shard_check) and scanned before its upload
(contract.streamed). Here what was found comes together, once config, index and ledger are written.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k2convert.checkpoint.header import ShardHeader
from k2convert.checkpoint.index import Checkpoint
from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.shard_record import ProjectionRecord, ShardRecord
from k2convert.validate.contract import check_subject
from k2convert.validate.contract.scan import ScanResult
from k2convert.validate.contract.streamed import join_scans
from k2convert.validate.contract.subject import Subject, open_subject
from k2convert.validate.decode import DecodedError
from k2convert.validate.results import ValidationReport, WeightsReport
from k2convert.validate.rule_check import checkable_rule, rule_report
from k2convert.validate.totals import Figures, Totals
from k2convert.validate.validation import compare_journal
from k2convert.validate.weights import CheckedWeight


def validate_streamed(
    folder: Path,
    *,
    headers: Mapping[str, ShardHeader],
    scans: Iterable[Mapping[str, Any]],
    source: Checkpoint,
    records: Iterable[ShardRecord],
) -> ValidationReport:
    """Validate a folder that holds everything except the shards.

    `headers` are the planned ones of all shards. A scan's hash of the whole file, compared with the ledger, covers its
    header. `source` is the whole one, also of a pruned result. What no record says was compared with it fails.
    """
    checks = [(record, record.checked) for record in records if record.checked is not None and record.is_checked]
    recorded = {p.module: p for record, _ in checks for p in record.projections}
    checked = {
        module: _checked_weight(recorded[module], figures)
        for _, check in checks
        for module, figures in check.decoded.items()
    }
    errors = {module: found.error for module, found in checked.items()}
    subject = open_subject(folder, source=source, known_headers=dict(headers))
    mismatches, compared = compare_journal(recorded, errors)
    weights = WeightsReport(
        errors=errors,
        roles={module: recorded[module].role for module in errors},
        rule=rule_report(*checkable_rule(subject.ledger, subject.recipe, has_statistics=True), checked),
        journal_mismatches=tuple(mismatches),
        journal_compared=compared,
        decoder_mismatches=(),
        decoder_compared=0,
    )
    scan: ScanResult = join_scans(scans)
    scan.compared = frozenset(name for _, check in checks for name in check.copied)
    contract = check_subject(subject, scan, errors=errors, totals=_totals(subject, weights, checked))
    return ValidationReport(str(folder), contract, weights=weights, layers=None, comparison=None)


def _checked_weight(record: ProjectionRecord, figures: Mapping[str, Any]) -> CheckedWeight:
    """Rebuild what was found on one weight. Its recorded figures were those of the bytes when it was compared."""
    sampled_blocks = figures["sampled_blocks"]
    error = DecodedError(**{key: value for key, value in figures.items() if key != "sampled_blocks"})
    return CheckedWeight(
        record.module,
        error,
        num_blocks=error.num_weights // BLOCK_SIZE if sampled_blocks else 0,
        sampled_blocks=sampled_blocks,
        metrics=None if record.metrics is None else WeightMetrics.from_dict(record.metrics),
    )


def _totals(
    subject: Subject, weights: WeightsReport, checked: Mapping[str, CheckedWeight]
) -> dict[str, Figures] | None:
    """Return the measured figures by role; None if not every converted weight was measured."""
    if not checked or not checked.keys() >= {module.name for module in subject.converted}:
        return None
    totals = Totals()
    for module, found in checked.items():
        totals.add(weights.roles[module], found)
    return totals.figures(weights.totals(), num_modules=len(checked))
