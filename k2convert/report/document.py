"""Figures as plain data, for --json."""

from __future__ import annotations

import math
from typing import Any

from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.report.calibration import calibration_document
from k2convert.report.checks import read_checks
from k2convert.report.figures import Report, TensorFigures
from k2convert.report.pruning import pruning_document


def figures_document(report: Report) -> dict[str, Any]:
    """Return totals, worst tensors and contract of a report; figures that are not finite become None."""
    checks = None if report.validation is None else read_checks(report.validation)
    found, pruning = report.provenance.calibration, report.provenance.pruning
    return {
        "complete": report.is_complete,
        "rule": report.rule,
        "totals": {role: metrics_document(metrics) for role, metrics in report.totals.items()},
        "worst": [_tensor_document(tensor) for tensor in report.worst],
        "contract": None
        if checks is None
        else {
            "rules": checks.verdicts.total,
            "held": checks.verdicts.held,
            "skipped": checks.verdicts.skipped,
            "failed": list(checks.verdicts.failed),
            "passed": checks.has_passed,
        },
        "missing": list(report.missing),
        **({} if found is None else {"calibration": calibration_document(found)}),
        **({} if pruning is None else {"pruning": pruning_document(pruning)}),
    }


def metrics_document(metrics: WeightMetrics) -> dict[str, Any]:
    """Return metrics with the derived ratios; ratios that are not finite become None."""
    ratios = {
        "sqnr_db": metrics.sqnr_db,
        "relative_mse": metrics.relative_mse,
        "achieved_to_plain": metrics.achieved_to_plain,
        "achieved_to_bound": metrics.achieved_to_bound,
    }
    if metrics.weighted_sqnr_db is not None:
        ratios["weighted_sqnr_db"] = metrics.weighted_sqnr_db
    return metrics.to_dict() | {name: finite_or_none(value) for name, value in ratios.items()}


def _tensor_document(tensor: TensorFigures) -> dict[str, Any]:
    return {
        "module": tensor.module,
        "role": tensor.role,
        "sqnr_db": finite_or_none(tensor.sqnr_db),
        "sqnr_plain_db": tensor.sqnr_plain_db,
        "sqnr_bound_db": tensor.sqnr_bound_db,
        "relative_mse": finite_or_none(tensor.relative_mse),
        "max_error_steps": tensor.max_error_steps,
        "changed_share": tensor.changed_share,
    }


def finite_or_none(value: float) -> float | None:
    """Return a number as JSON can hold it: None if it is infinite or NaN."""
    return value if math.isfinite(value) else None
