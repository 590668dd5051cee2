"""The error of written NVFP4 bytes against their source. The decoder shares nothing with the code that wrote them.

metrics/measure.py compares source and result element by element, whatever the rule. Here it gets its own table of E4M3
numbers, and any bytes, those of damaged scales too.

A weight with channel exponents is q * s * 2**-a. Importance w weights the sums a second time, by w / 255 per column.

`Totals` are those of a ledger, measured again. With a rule, the figures are those of the same bytes regenerated, so
every one of them is known. Otherwise they are the decoder's, which measures fewer. If the global scale is known only
from a rounded divisor, only figures of the source remain.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.formats.bf16 import SourceWeight
from k2convert.quantize.metrics.measure import add_up
from k2convert.quantize.metrics.weight_metrics import WeightMetrics, total_metrics
from k2convert.quantize.rules.search_int4 import MAX_IMPORTANCE
from k2convert.records.document import plain
from k2convert.records.ledger import TOTAL, DecodedError

F64 = NDArray[np.float64]


def _e4m3_values() -> F64:
    """All 256 E4M3 numbers by the definition (bias 7, no infinities, 0x7F and 0xFF are NaN)."""
    values = np.empty(256)
    for byte in range(128):
        exponent = byte >> 3
        mantissa = byte & 7
        values[byte] = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    values[127] = np.nan
    values[128:] = -values[:128]
    return values


_E4M3 = _e4m3_values()


def measure_decoded(
    source: SourceWeight,
    *,
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    global_scale: float,
    importance: NDArray[np.uint8] | None = None,
) -> DecodedError:
    """Decode NVFP4 bytes (packed [N * K/2], block_scales [N * K/16], any shape) and measure them against the source.

    `importance` [K] adds the weighted sums.
    """
    found = add_up(source, packed, block_scales, _E4M3 * global_scale, importance)
    return DecodedError(
        num_weights=source.shape[0] * source.shape[1],
        num_nonzero=found.num_nonzero,
        equal_nonzero=found.equal_nonzero,
        energy=found.energy,
        squared_error=found.squared_error,
        max_error_steps=found.max_error_steps,
        weighted_energy=None if importance is None else found.weighted_energy / MAX_IMPORTANCE,
        weighted_error=None if importance is None else found.weighted_error / MAX_IMPORTANCE,
    )


Figures = Mapping[str, Any]
TOLERANCE: Final = 1e-9  # both sides add float64 terms, in different orders
_MERGED_AT_ONCE: Final = 32
_OF_SOURCE: Final = ("num_weights", "num_blocks", "energy", "num_nonzero")


class Totals:
    """Adds up what was measured, by role. Weights may come from several threads."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[WeightMetrics]] = {}
        self._num_metrics = 0
        self._has_exact_scales = True
        self._lock = Lock()

    def add(self, role: str, metrics: WeightMetrics | None, *, has_exact_scale: bool) -> None:
        """Add one weight."""
        with self._lock:
            self._has_exact_scales &= has_exact_scale
            if metrics is None:
                return
            self._num_metrics += 1
            parts = self._metrics.setdefault(role, [])
            parts.append(metrics)
            if len(parts) == _MERGED_AT_ONCE:  # a trillion weights have too many to keep
                self._metrics[role] = [total_metrics(parts)]

    def figures(self, decoded: Mapping[str, DecodedError], *, num_modules: int) -> dict[str, Figures]:
        """Return the figures by role and under "total". `decoded` are the decoder's, by the same keys."""
        measured: dict[str, Figures] = {
            role: plain(error) | {"num_blocks": error.num_weights // BLOCK_SIZE} for role, error in decoded.items()
        }
        if not self._has_exact_scales:
            return {role: {key: found[key] for key in _OF_SOURCE} for role, found in measured.items()}
        if self._num_metrics < num_modules:
            return measured
        again = {role: total_metrics(parts) for role, parts in self._metrics.items()}
        again[TOTAL] = total_metrics(again.values())
        return {role: {**plain(again[role]), **found} for role, found in measured.items()}


def total_errors(errors: Mapping[str, DecodedError], roles: Mapping[str, str]) -> dict[str, DecodedError]:
    """Add up errors by role and under "total"; empty if there are none."""
    by_role: dict[str, list[DecodedError]] = defaultdict(list)
    for module, error in errors.items():
        by_role[roles[module]].append(error)
    if errors:
        by_role = dict(sorted(by_role.items())) | {TOTAL: list(errors.values())}

    def add(found: list[DecodedError], key: str, total: Callable[[list[Any]], Any]) -> Any:
        known = [value for value in (getattr(error, key) for error in found) if value is not None]
        return total(known) if known else None

    counts = ("num_weights", "num_nonzero", "equal_nonzero")
    sums = ("energy", "squared_error", "weighted_energy", "weighted_error")
    how = dict.fromkeys(counts, sum) | dict.fromkeys(sums, math.fsum) | {"max_error_steps": max}
    return {
        role: DecodedError(**{key: add(found, key, total) for key, total in how.items()})
        for role, found in by_role.items()
    }


def differing_totals(stated: Mapping[str, WeightMetrics], measured: Mapping[str, Figures]) -> Iterator[tuple[str, str]]:
    """Yield (place, problem) for every figure of a ledger that is not the measured one, with both numbers."""
    for role in stated.keys() - measured.keys():
        yield f"totals.{role}", "stated, but no such weight was measured"
    for role, figures in measured.items():
        if role not in stated:
            yield f"totals.{role}", f"missing, but {figures['num_weights']:,} weights were measured"
            continue
        document = plain(stated[role])
        for key, value in figures.items():
            if key in document or key != "lossless_tensors":  # a local run does not read back what it wrote
                yield from _differences(f"totals.{role}.{key}", document.get(key), value)


def _differences(place: str, stated: Any, measured: Any) -> Iterator[tuple[str, str]]:
    if isinstance(stated, dict) and isinstance(measured, dict):
        left = cast(dict[str, int], stated)
        right = cast(dict[str, int], measured)
        for key in sorted(left.keys() | right.keys()):
            yield from _differences(f"{place}.{key}", left.get(key, 0), right.get(key, 0))
    elif not _is_same_figure(cast("float | None", stated), cast("float | None", measured)):
        yield place, f"{stated!r}, but {measured!r} was measured"


def is_same_error(measured: DecodedError, recorded: WeightMetrics) -> bool:
    """Return whether the figures that a conversion recorded are those of the written bytes."""
    weighted = () if measured.weighted_error is None else ("weighted_energy", "weighted_error")
    keys = ("squared_error", "energy", "equal_nonzero", "num_nonzero", *weighted)
    return all(_is_same_figure(getattr(recorded, key), getattr(measured, key)) for key in keys)


def _is_same_figure(stated: float | None, measured: float | None) -> bool:
    if stated is None or measured is None:
        return stated is measured
    if isinstance(stated, int) and isinstance(measured, int):
        return stated == measured
    return math.isclose(stated, measured, rel_tol=TOLERANCE)
