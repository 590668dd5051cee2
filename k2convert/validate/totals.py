"""The totals of a ledger, measured again.

With a rule, the figures are those of the same bytes regenerated, so every one of them is known. Otherwise they are the
decoder's, which measures fewer. If the global scale is known only from a rounded divisor, only figures of the source
remain.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, cast

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.metrics.weight_metrics import WeightMetrics, total_metrics
from k2convert.records.ledger import TOTAL
from k2convert.records.shard_record import ProjectionRecord
from k2convert.validate.decode import DecodedError
from k2convert.validate.weights import CheckedWeight

Figures = Mapping[str, Any]
TOLERANCE: Final = 1e-9  # both sides add float64 terms, in different orders
_MERGED_AT_ONCE: Final = 32
_OF_SOURCE: Final = ("num_weights", "num_blocks", "energy", "num_nonzero")


@dataclass(slots=True)
class Totals:
    """Adds up what was measured, by role. Weights may come from several threads."""

    _metrics: dict[str, list[WeightMetrics]] = field(
        default_factory=lambda: defaultdict[str, list[WeightMetrics]](list)
    )
    _num_metrics: int = 0
    _has_exact_scales: bool = True
    _lock: Lock = field(default_factory=Lock)

    def add(self, role: str, checked: CheckedWeight) -> None:
        """Add one weight."""
        with self._lock:
            self._has_exact_scales &= checked.has_exact_scale
            if checked.metrics is None:
                return
            self._num_metrics += 1
            parts = self._metrics[role]
            parts.append(checked.metrics)
            if len(parts) == _MERGED_AT_ONCE:  # a trillion weights have too many to keep
                self._metrics[role] = [total_metrics(parts)]

    def figures(self, decoded: Mapping[str, DecodedError], *, num_modules: int) -> dict[str, Figures]:
        """Return the figures by role and under "total". `decoded` are the decoder's, by the same keys."""
        measured: dict[str, Figures] = {role: _decoder_figures(error) for role, error in decoded.items()}
        if not self._has_exact_scales:
            return {role: {key: found[key] for key in _OF_SOURCE} for role, found in measured.items()}
        if self._num_metrics < num_modules:
            return measured
        again = {role: total_metrics(parts) for role, parts in self._metrics.items()}
        again[TOTAL] = total_metrics(again.values())
        return {role: {**again[role].to_dict(), **found} for role, found in measured.items()}


def _decoder_figures(error: DecodedError) -> dict[str, Any]:
    return {
        "num_weights": error.num_weights,
        "num_blocks": error.num_weights // BLOCK_SIZE,
        "energy": error.energy,
        "squared_error": error.squared_error,
        "num_nonzero": error.num_nonzero,
        "equal_nonzero": error.equal_nonzero,
        "max_error_steps": error.max_error_steps,
        **({} if error.weighted_error is None else _weighted_figures(error)),
    }


def _weighted_figures(error: DecodedError) -> dict[str, Any]:
    return {"weighted_energy": error.weighted_energy, "weighted_error": error.weighted_error}


def differing_totals(stated: Mapping[str, WeightMetrics], measured: Mapping[str, Figures]) -> Iterator[tuple[str, str]]:
    """Yield (place, problem) for every figure of a ledger that is not the measured one, with both numbers."""
    for role in stated.keys() - measured.keys():
        yield f"totals.{role}", "stated, but no such weight was measured"
    for role, figures in measured.items():
        if role not in stated:
            yield f"totals.{role}", f"missing; {figures['num_weights']:,} weights were measured"
            continue
        document = stated[role].to_dict()
        for key, value in figures.items():
            yield from _differences(f"totals.{role}.{key}", document.get(key), value)


def _differences(place: str, stated: Any, measured: Any) -> Iterator[tuple[str, str]]:
    if isinstance(stated, dict) and isinstance(measured, dict):
        left, right = cast(dict[str, int], stated), cast(dict[str, int], measured)
        for key in sorted(left.keys() | right.keys()):
            yield from _differences(f"{place}.{key}", left.get(key, 0), right.get(key, 0))
    elif not is_same_figure(cast("float | None", stated), cast("float | None", measured)):
        yield place, f"{stated!r}, but {measured!r} was measured"


def is_same_error(measured: DecodedError, recorded: Mapping[str, Any]) -> bool:
    """Return whether the figures that a conversion recorded are those of the written bytes."""
    keys = ["squared_error", "energy", "equal_nonzero", "num_nonzero"]
    if measured.weighted_error is not None:
        keys += ["weighted_energy", "weighted_error"]
    return all(is_same_figure(recorded.get(key), getattr(measured, key)) for key in keys)


def compare_journal(
    recorded: Mapping[str, ProjectionRecord], errors: Mapping[str, DecodedError]
) -> tuple[list[str], int]:
    """Compare recorded with measured figures; return the modules that differ, and how many were compared."""
    mismatches: list[str] = []
    compared = 0
    for module, projection in recorded.items():
        measured, stated = errors.get(module), projection.metrics
        if measured is None or stated is None:
            continue
        compared += 1
        if not is_same_error(measured, stated):
            mismatches.append(module)
    return mismatches, compared


def is_same_figure(stated: float | None, measured: float | None) -> bool:
    """Return whether two figures are the same but for the order of sums. Counts must be equal."""
    if stated is None or measured is None:
        return stated is measured
    if isinstance(stated, int) and isinstance(measured, int):
        return stated == measured
    return math.isclose(stated, measured, rel_tol=TOLERANCE)
