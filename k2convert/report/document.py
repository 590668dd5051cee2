"""A report's figures as plain data, for --json."""

from __future__ import annotations

import math
from typing import Any

from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.report.checks import read_checks
from k2convert.report.figures import Report, TensorFigures


def report_document(report: Report) -> dict[str, Any]:
    """Headline, totals, worst tensors and contract; figures that are not finite become None."""
    checks = None if report.validation is None else read_checks(report.validation)
    return {
        "complete": report.is_complete,
        "rule": report.rule,
        "totals": {role: _totals(metrics) for role, metrics in report.totals.items()},
        "worst": [_tensor(tensor) for tensor in report.worst],
        "contract": None
        if checks is None
        else {
            "rules": checks.verdicts.total,
            "held": checks.verdicts.held,
            "skipped": checks.verdicts.skipped,
            "failed": list(checks.verdicts.failed),
        },
        "missing": list(report.missing),
    }


def _totals(metrics: WeightMetrics) -> dict[str, Any]:
    derived = {
        "sqnr_db": metrics.sqnr_db,
        "relative_mse": metrics.relative_mse,
        "achieved_to_plain": metrics.achieved_to_plain,
        "achieved_to_bound": metrics.achieved_to_bound,
    }
    return {name: _finite(value) for name, value in derived.items()} | metrics.to_dict()


def _tensor(tensor: TensorFigures) -> dict[str, Any]:
    return {
        "module": tensor.module,
        "role": tensor.role,
        "sqnr_db": _finite(tensor.sqnr_db),
        "sqnr_plain_db": tensor.sqnr_plain_db,
        "sqnr_bound_db": tensor.sqnr_bound_db,
        "relative_mse": _finite(tensor.relative_mse),
        "max_error_steps": tensor.max_error_steps,
        "changed_share": tensor.changed_share,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
