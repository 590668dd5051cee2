"""The error of a conversion: counts and sums for one tensor, or added up over many.

Only sums are stored and every ratio is derived, so totals over any set of tensors are as exact as a single one.
Errors are against the exact source: q * s for INT4 sources, the BF16 value otherwise. This module needs only the
standard library, because --help imports it.
"""

from __future__ import annotations

import math
import pickle
from array import array
from collections import Counter, UserDict
from dataclasses import dataclass, fields, replace
from typing import Any

from k2convert.errors import counted


@dataclass(frozen=True, slots=True)
class WeightMetrics:
    """Figures of one converted tensor, or of several together.

    A field is None if it has no meaning for the source or rule: figures about INT4 codes for a BF16 source,
    blocks_outside_normal for a rule that does not count them, and the extreme scales of a tensor without elements. The
    fields after the sampled ones are left out of a record if they are None.
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
    scale_histogram: dict[int, int]
    """E4M3 byte -> number of blocks, ascending, without empty entries."""
    sampled_blocks: int
    """Blocks whose error is compared with that of `max`: all for `max` itself, none of a cast."""
    sampled_error_achieved: float
    sampled_error_max: float
    """Squared error of the `max` rule on the sampled blocks."""
    empty_groups: int | None = None
    """Of an MXFP4 source that was cast: groups of 32 without a code that is not zero. So are all fields below."""
    below_window_groups: int | None = None
    """Groups whose scale is more than 17 powers of two below the largest of their set, so that codes were rounded."""
    subnormal_groups: int | None = None
    """Groups with an exact block scale below 2**-6, which Marlin flushes to zero."""
    min_source_byte: int | None = None
    """The least scale byte of a group that is not empty."""
    max_source_byte: int | None = None
    cast_tensors: int | None = None
    """1; totals count tensors, here and below."""
    below_window_tensors: int | None = None
    """1 if a group is below the window."""
    subnormal_tensors: int | None = None
    lossless_tensors: int | None = None
    """1 if the written bytes were read back and every value is the source's, 0 if not; None if they were not read."""
    changed_codes: int | None = None
    """Of written bytes that were read back: bytes of codes in the window that differ."""

    @property
    def is_zero(self) -> bool:
        """Return whether source and result are nothing but zeros, so that there is no ratio of them."""
        return self.energy == self.squared_error == 0.0

    @property
    def relative_mse(self) -> float:
        """squared_error / energy."""
        return ratio(self.squared_error, self.energy)

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio, 10 log10(energy / squared_error); infinite if nothing changed."""
        return decibels(self.energy, self.squared_error)

    @property
    def cast_words(self) -> str | None:
        """One sentence on the tensors that were cast; None if none was."""
        if self.cast_tensors is None:
            return None
        tensors = counted(self.cast_tensors, "tensor")
        if self.lossless_tensors is None:
            in_window = self.cast_tensors - (self.below_window_tensors or 0)
            words = f"{in_window:,} of {tensors} were converted without loss"
        elif self.lossless_tensors == self.cast_tensors:
            words = f"All {tensors} are lossless: read back, every value is the source's"
        else:
            words = f"{self.lossless_tensors:,} of {tensors} are lossless: read back, every value is the source's"
        if self.below_window_groups:
            groups = counted(self.below_window_groups, "group")
            words += (
                f"; {self.below_window_tensors:,} had codes rounded in {groups}, as the scales of an expert differ "
                "by more than 2^17"
            )
        if self.subnormal_tensors:
            words += f"; {self.subnormal_tensors:,} have subnormal block scales, which are exact"
        return f"{words}."

    @property
    def achieved_to_max(self) -> float:
        """Squared error as a share of max's, on the sampled blocks; about 0.5 for `mse`, NaN without a sample."""
        return math.nan if self.sampled_blocks == 0 else ratio(self.sampled_error_achieved, self.sampled_error_max)

    @property
    def sqnr_max_db(self) -> float | None:
        """The SQNR of `max`: this one, shifted by the ratio of errors on the sampled blocks; None if not known."""
        if not math.isfinite(self.sqnr_db) or self.sampled_error_achieved <= 0.0 or self.sampled_error_max <= 0.0:
            return None
        return self.sqnr_db + 10.0 * math.log10(self.sampled_error_achieved / self.sampled_error_max)


class PackedMetrics(UserDict[str, WeightMetrics]):
    """Figures by module in a third of their memory, without histograms, each made when it is asked for."""

    data: dict[str, Any]  # bytes

    def __getitem__(self, key: str) -> WeightMetrics:
        return WeightMetrics(*pickle.loads(self.data[key]))

    def __setitem__(self, key: str, item: WeightMetrics) -> None:
        plain = replace(item, scale_histogram={})
        self.data[key] = pickle.dumps(tuple[Any, ...](getattr(plain, field.name) for field in fields(plain)))


class MetricsSum:
    """Adds up the metrics of tensors; the order does not matter. It keeps 8 bytes of a figure that is not a count.

    Optional figures are summed over the parts that have them, so `recoverable_codes / num_codes` stays right in a mix.
    """

    def __init__(self) -> None:
        self._extremes: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._reals: dict[str, array[float]] = {}
        self._histogram: Counter[int] = Counter()

    def add(self, part: WeightMetrics) -> None:
        """Add one tensor, or several together."""
        self._histogram.update(part.scale_histogram)
        for name in _SUMMED:
            value = getattr(part, name)
            if value is None:
                continue
            if name in _EXTREMES:
                self._extremes[name] = _EXTREMES[name](self._extremes.get(name, value), value)
            elif isinstance(value, float):
                self._reals.setdefault(name, array("d")).append(value)
            else:
                self._counts[name] += value

    def total(self) -> WeightMetrics:
        """Return the sum; ValueError if nothing was added."""
        if not self._counts:
            raise ValueError("no metrics to add up")
        sums = {name: math.fsum(values) for name, values in self._reals.items()}
        histogram = dict(sorted(self._histogram.items()))
        figures: dict[str, Any] = {**dict.fromkeys(_SUMMED), **self._extremes, **self._counts, **sums}
        return WeightMetrics(**figures, scale_histogram=histogram)


_SUMMED = tuple(field.name for field in fields(WeightMetrics) if field.name != "scale_histogram")
_EXTREMES = {name: {"min": min, "max": max}[name[:3]] for name in _SUMMED if name.startswith(("min_", "max_"))}


def ratio(numerator: float, denominator: float) -> float:
    """Return numerator / denominator; 0 if both are zero, infinity if only the denominator is."""
    if denominator == 0.0:
        return 0.0 if numerator == 0.0 else math.inf
    return numerator / denominator


def decibels(energy: float, error: float) -> float:
    """Return 10 log10(energy / error); infinity without error, -infinity if the error is not finite or energy is 0."""
    if error == 0.0:
        return math.inf
    if energy > 0.0 and math.isfinite(error):
        return 10.0 * math.log10(energy / error)
    return -math.inf
