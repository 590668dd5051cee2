"""The error of a conversion: counts and sums for one tensor, or added up over many.

Only sums are stored and every ratio is derived, so totals over any set of tensors are as exact as a single one.
Errors are against the exact source: q * s for INT4 sources, the BF16 value otherwise. This module needs only the
standard library, because --help imports it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar, cast

from k2convert.errors import quoted

T = TypeVar("T", int, float)

WEIGHTED: Final = ("weighted_energy", "weighted_error")
"""The fields that a record has only if columns had an importance: both or none."""


@dataclass(frozen=True, slots=True)
class WeightMetrics:
    """Figures of one converted tensor, or of several together.

    A field is None if it has no meaning for the source or rule: figures about INT4 codes for a BF16 source,
    blocks_outside_normal for a rule that does not count them, and the extreme scales of a tensor without elements. The
    two weighted sums are left out of a record if they are None.
    """

    num_weights: int
    num_blocks: int
    energy: float
    """Sum of w**2."""
    squared_error: float
    """Sum of (w - w')**2."""
    num_nonzero: int
    equal_nonzero: int
    """Non-zero weights whose value did not change."""
    equal_blocks: int
    """Blocks in which no value changed, blocks of zeros included."""
    num_codes: int | None
    """INT4 codes in the source: num_weights, or None for a BF16 source."""
    max_error_steps: float | None
    """Largest |w - w'| / s."""
    recoverable_codes: int | None
    """Codes with round(w' / s) == q, zeros included."""
    num_five_or_seven: int | None
    """Codes with |q| of 5 or 7, which E2M1 cannot represent together with other integers."""
    num_minus_eight: int | None
    blocks_outside_normal: int | None
    """Blocks that an E4M3 scale outside the normal range would have served strictly better."""
    scale_spread_exceeded: int | None
    """1 if the source scales of the set that shares g differ by more than 2**13; totals count tensors."""
    min_scale_byte: int | None
    max_scale_byte: int | None
    scale_histogram: tuple[tuple[int, int], ...]
    """(E4M3 byte, number of blocks), ascending, without empty entries."""
    sampled_blocks: int
    sampled_error_achieved: float
    sampled_error_max: float
    """Squared error of the `max` rule on the sampled blocks."""
    sampled_error_bound: float
    """No choice of scales, even real-valued, gives less squared error on the sampled blocks."""
    weighted_energy: float | None = None
    """Sum of importance / 255 * w**2, if the rule was given the importance of channels."""
    weighted_error: float | None = None
    """Sum of importance / 255 * (w - w')**2, likewise."""

    @property
    def relative_mse(self) -> float:
        """squared_error / energy."""
        return ratio(self.squared_error, self.energy)

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio, 10 log10(energy / squared_error); infinite if nothing changed."""
        return decibels(self.energy, self.squared_error)

    @property
    def weighted_sqnr_db(self) -> float | None:
        """The SQNR of the weighted sums; None if there are none."""
        if self.weighted_energy is None or self.weighted_error is None:
            return None
        return decibels(self.weighted_energy, self.weighted_error)

    @property
    def achieved_to_max(self) -> float:
        """Squared error as a share of max's, on the sampled blocks; about 0.5 for `mse`."""
        return ratio(self.sampled_error_achieved, self.sampled_error_max)

    @property
    def achieved_to_bound(self) -> float:
        """Squared error as a multiple of the bound, on the sampled blocks; about 1.13 for `mse`."""
        return ratio(self.sampled_error_achieved, self.sampled_error_bound)

    @property
    def sqnr_max_db(self) -> float | None:
        """The SQNR of `max`: this one, shifted by the ratio of errors on the sampled blocks; None if not known."""
        return self._shifted(self.sampled_error_max)

    @property
    def sqnr_bound_db(self) -> float | None:
        """The SQNR of the bound, in the same way."""
        return self._shifted(self.sampled_error_bound)

    def _shifted(self, other_error: float) -> float | None:
        if not math.isfinite(self.sqnr_db) or self.sampled_error_achieved <= 0.0 or other_error <= 0.0:
            return None
        return self.sqnr_db + 10.0 * math.log10(self.sampled_error_achieved / other_error)

    def to_dict(self) -> dict[str, object]:
        """Return the stored fields, ready for JSON; `from_dict` restores an equal object."""
        record: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in WEIGHTED:
            if record[name] is None:
                del record[name]
        record["scale_histogram"] = {str(byte): count for byte, count in self.scale_histogram}
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> WeightMetrics:
        """Rebuild metrics from `to_dict`; ValueError if a field is missing or unknown."""
        odd = _odd_names(record)
        if odd:
            raise ValueError(f"not a metrics record: {odd} are missing or unknown")
        values = dict(record)
        histogram = cast(Mapping[str, int], values["scale_histogram"])
        values["scale_histogram"] = tuple((int(byte), count) for byte, count in histogram.items())
        return cls(**values)  # pyright: ignore[reportArgumentType]


_OPTIONAL = {field.name: "None" in str(field.type) for field in fields(WeightMetrics)}


def _odd_names(record: Mapping[str, object]) -> list[str]:
    """Return the names that are missing from a record or unknown, sorted."""
    names = _OPTIONAL.keys() if any(name in record for name in WEIGHTED) else _OPTIONAL.keys() - set(WEIGHTED)
    return sorted(record.keys() ^ names)


def check_metrics(record: Mapping[str, Any] | None, *, where: str) -> None:
    """Check that a record is None or has the form of `WeightMetrics.to_dict()`; ValueError naming a field."""
    if record is None:
        return
    odd = _odd_names(record)
    if odd:
        raise ValueError(f"{where}: metrics: {quoted(odd)} missing or unknown")
    for name, value in record.items():
        if name == "scale_histogram":
            is_right = isinstance(value, dict) and _is_histogram(cast(dict[str, Any], value))
        else:
            # `value >= 0` is false for NaN.
            may_be_none = _OPTIONAL[name] and name not in WEIGHTED
            is_right = (type(value) in (int, float) and value >= 0) or (value is None and may_be_none)
        if not is_right:
            raise ValueError(f"{where}: metrics: {name} is {quoted(record[name])}")


def _is_histogram(value: dict[str, Any]) -> bool:
    """Return whether this maps non-negative E4M3 bytes, in decimal, to counts."""
    bytes_are_right = all(byte.isdecimal() and len(byte) <= 3 and int(byte) <= 127 for byte in value)
    return bytes_are_right and all(type(count) is int and count >= 0 for count in value.values())


def total_metrics(parts: Iterable[WeightMetrics]) -> WeightMetrics:
    """Add up the metrics of several tensors; the order does not matter. ValueError if there are none.

    Optional figures are summed over the parts that have them, so `recoverable_codes / num_codes` stays right in a mix.
    """
    metrics = tuple(parts)
    if not metrics:
        raise ValueError("no metrics to add up")
    histogram: Counter[int] = Counter()
    for part in metrics:
        histogram.update(dict(part.scale_histogram))
    return WeightMetrics(
        num_weights=sum(part.num_weights for part in metrics),
        num_blocks=sum(part.num_blocks for part in metrics),
        energy=math.fsum(part.energy for part in metrics),
        squared_error=math.fsum(part.squared_error for part in metrics),
        num_nonzero=sum(part.num_nonzero for part in metrics),
        equal_nonzero=sum(part.equal_nonzero for part in metrics),
        equal_blocks=sum(part.equal_blocks for part in metrics),
        num_codes=_optional(sum, (part.num_codes for part in metrics)),
        max_error_steps=_optional(max, (part.max_error_steps for part in metrics)),
        recoverable_codes=_optional(sum, (part.recoverable_codes for part in metrics)),
        num_five_or_seven=_optional(sum, (part.num_five_or_seven for part in metrics)),
        num_minus_eight=_optional(sum, (part.num_minus_eight for part in metrics)),
        blocks_outside_normal=_optional(sum, (part.blocks_outside_normal for part in metrics)),
        scale_spread_exceeded=_optional(sum, (part.scale_spread_exceeded for part in metrics)),
        min_scale_byte=_optional(min, (part.min_scale_byte for part in metrics)),
        max_scale_byte=_optional(max, (part.max_scale_byte for part in metrics)),
        scale_histogram=tuple(sorted(histogram.items())),
        sampled_blocks=sum(part.sampled_blocks for part in metrics),
        sampled_error_achieved=math.fsum(part.sampled_error_achieved for part in metrics),
        sampled_error_max=math.fsum(part.sampled_error_max for part in metrics),
        sampled_error_bound=math.fsum(part.sampled_error_bound for part in metrics),
        weighted_energy=_optional(math.fsum, (part.weighted_energy for part in metrics)),
        weighted_error=_optional(math.fsum, (part.weighted_error for part in metrics)),
    )


def _optional(combine: Callable[[list[T]], T], values: Iterable[T | None]) -> T | None:
    present = [value for value in values if value is not None]
    return combine(present) if present else None


def ratio(numerator: float, denominator: float) -> float:
    """Return numerator / denominator; 0 if both are zero, infinity if only the denominator is."""
    if denominator == 0.0:
        return 0.0 if numerator == 0.0 else math.inf
    return numerator / denominator


def decibels(energy: float, error: float) -> float:
    """Return 10 log10(energy / error); infinity without error, -infinity if the error is not finite or energy is 0."""
    if error == 0.0:
        return math.inf
    if not math.isfinite(error):
        return -math.inf
    return 10.0 * math.log10(energy / error) if energy > 0.0 else -math.inf
