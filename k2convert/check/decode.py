"""The error of every written NVFP4 weight against its source, by the compiled code, and the figures of a ledger.

metrics/measure.py compares source and result element by element, whatever the rule. It reads both by the conversion's
own code: what that hides the certificate finds (certificate.py).

A weight with channel exponents is q * s * 2**-a. `Totals` are those of a ledger, measured again. If the global scale is
known only from a rounded divisor, only figures of the source remain.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import BLOCK_SIZE
from k2convert.quantize.formats.bf16 import SourceWeight
from k2convert.quantize.formats.nvfp4 import decode_e4m3
from k2convert.quantize.metrics.measure import add_up
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.records.document import plain
from k2convert.records.ledger import TOTAL, DecodedError, doubt_of

F64 = NDArray[np.float64]


_E4M3: Final = decode_e4m3(np.arange(256, dtype=np.uint8))  # any bytes, those of damaged scales too
COUNTED: Final = ("equal_blocks", "recoverable_codes", "num_five_or_seven", "num_minus_eight")
"""Counts that a ledger states beside the error; the last three are of INT4 weights."""


@dataclass(frozen=True, slots=True)
class MeasuredWeight:
    """Measurements of one written weight.

    `counts` are those of `COUNTED`, `scales` how often each byte of a block scale occurs. `has_exact_scale` is false if
    a rounded divisor was all there is to tell the global scale from. `doubt` is what makes the source's codes doubtful.
    """

    error: DecodedError
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    scales: Mapping[int, int] = field(default_factory=dict[int, int])
    has_exact_scale: bool = True
    doubt: str = ""


def measure_decoded(
    source: SourceWeight,
    *,
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    global_scale: float,
    has_exact_scale: bool = True,
    changed_codes: int | None = None,
) -> MeasuredWeight:
    """Decode NVFP4 bytes (packed [N * K/2], block_scales [N * K/16], any shape) and measure them against the source.

    `changed_codes` are those of a cast; None for other weights.
    """
    num_weights = source.shape[0] * source.shape[1]
    sums = add_up(source, packed, block_scales, _E4M3 * global_scale)
    error = DecodedError(
        num_weights=num_weights,
        num_nonzero=sums.num_nonzero,
        equal_nonzero=sums.equal_nonzero,
        energy=sums.energy,
        squared_error=sums.squared_error,
        max_error_steps=sums.max_error_steps,
        changed_codes=changed_codes,
    )
    counts = {key: getattr(sums, key) for key in COUNTED} | {"lossless_tensors": error.lossless_tensors}
    histogram = np.bincount(block_scales.reshape(-1), minlength=256)
    return MeasuredWeight(
        error,
        counts={key: count for key, count in counts.items() if count is not None},
        scales={byte: int(histogram[byte]) for byte in np.flatnonzero(histogram).tolist()},
        has_exact_scale=has_exact_scale,
        doubt=doubt_of(sums.num_minus_eight, num_weights),
    )


Figures = Mapping[str, Any]
TOLERANCE: Final = 1e-9  # both sides add float64 terms, in different orders
_OF_SOURCE: Final = ("num_weights", "num_blocks", "energy", "num_nonzero")


class Totals:
    """Adds up counts by role. Weights may come from several threads."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._scales: dict[str, Counter[int]] = defaultdict(Counter)
        self._has_exact_scales = True
        self._lock = Lock()

    def add(self, role: str, weight: MeasuredWeight) -> None:
        """Add one weight."""
        with self._lock:
            self._has_exact_scales &= weight.has_exact_scale
            for key in (role, TOTAL):
                self._counts[key].update(weight.counts)
                self._scales[key].update(weight.scales)

    def figures(self, errors: Mapping[str, DecodedError]) -> Mapping[str, Figures]:
        """Return the figures by role and under "total". `errors` are the measured ones, by the same keys."""
        measured: dict[str, dict[str, Any]] = {
            role: plain(error) | {"num_blocks": error.num_weights // BLOCK_SIZE} for role, error in errors.items()
        }
        if not self._has_exact_scales:
            return {role: {key: figures[key] for key in _OF_SOURCE} for role, figures in measured.items()}
        for role, figures in measured.items():
            figures.update(self._counts[role])
            if scales := self._scales[role]:
                figures["scale_histogram"] = {str(byte): count for byte, count in scales.items()}
        return measured


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
    sums = ("energy", "squared_error")
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
    keys = ("squared_error", "energy", "equal_nonzero", "num_nonzero")
    return all(_is_same_figure(getattr(recorded, key), getattr(measured, key)) for key in keys)


def _is_same_figure(stated: float | None, measured: float | None) -> bool:
    if stated is None or measured is None:
        return stated is measured
    if isinstance(stated, int) and isinstance(measured, int):
        return stated == measured
    return math.isclose(stated, measured, rel_tol=TOLERANCE)
