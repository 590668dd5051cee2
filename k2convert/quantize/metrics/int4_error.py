"""Measuring a converted weight: the metrics of an INT4 weight from its pair table.

Everything is computed from integer tables, in float64, in ascending key order, and added with math.fsum. So equal
tables give equal metrics to the last bit, on every backend and with any number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.choices import Rule
from k2convert.quantize.formats.int4 import NUM_MAGNITUDES, Int4Weight, SourceWeight
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.metrics.bf16_error import measure_bf16_error
from k2convert.quantize.metrics.pair_counts import PairCounts, count_pairs, pair_values, sum_by_pair
from k2convert.quantize.metrics.sampled_error import SampledError, sample_error
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules import RULES
from k2convert.quantize.rules.column_search import MAX_IMPORTANCE
from k2convert.quantize.rules.magnitude import Magnitude

MAX_SCALE_SPREAD: Final = 2.0**13


@dataclass(frozen=True, slots=True)
class PairFigures:
    """The figures that follow from a table of pairs under a rule and a global scale; fields as in WeightMetrics."""

    energy: float
    squared_error: float
    num_nonzero: int
    equal_nonzero: int
    recoverable_codes: int
    max_error_steps: float
    weighted_energy: float | None = None
    weighted_error: float | None = None


def measure_error(
    source: SourceWeight,
    result: Nvfp4Weight,
    *,
    rule: Rule,
    magnitude: Magnitude,
    sample_seed: int,
    importance: NDArray[np.uint8] | None = None,
) -> WeightMetrics:
    """Measure `result`, which must be the result of `rule` for `source`, against the exact q * s or the BF16 weight.

    `importance` is that of the columns, uint8 [K], if the rule was given one.

    `magnitude` is that of all tensors that share the global scale; `sample_seed` is the CRC-32 of the tensor's name.
    """
    if not isinstance(source, Int4Weight):
        return measure_bf16_error(source, result, magnitude=magnitude, sample_seed=sample_seed, importance=importance)
    counts = count_pairs(source, result, rule=rule, importance=importance)
    sampled = sample_error(source, result, rule=rule, magnitude=magnitude, sample_seed=sample_seed)
    return finish_metrics(counts, rule=rule, global_scale=result.global_scale, magnitude=magnitude, sampled=sampled)


def finish_metrics(
    counts: PairCounts,
    *,
    rule: Rule,
    global_scale: float,
    magnitude: Magnitude,
    sampled: SampledError,
    figures: PairFigures | None = None,
) -> WeightMetrics:
    """Put the metrics of a weight together from its pair counts.

    `figures` are those of the counts, if a kernel has computed them already.
    """
    figures = figures or pair_figures(counts, rule=rule, global_scale=global_scale)
    n_Pk = counts.magnitude_counts
    scales_P = counts.scales
    histogram = np.bincount(counts.scale_bytes, weights=counts.num_blocks, minlength=1).astype(np.int64)
    used_bytes = [int(byte) for byte in np.flatnonzero(histogram)]
    live_P = (n_Pk[:, 1:].sum(axis=1) > 0) & (scales_P > 0)
    least_scale = float(scales_P[live_P].min()) if live_P.any() else math.inf
    return WeightMetrics(
        num_weights=int(n_Pk.sum()),
        num_blocks=int(counts.num_blocks.sum()),
        energy=figures.energy,
        squared_error=figures.squared_error,
        num_nonzero=figures.num_nonzero,
        equal_nonzero=figures.equal_nonzero,
        equal_blocks=counts.equal_blocks,
        num_codes=int(n_Pk.sum()),
        max_error_steps=figures.max_error_steps,
        recoverable_codes=figures.recoverable_codes,
        num_five_or_seven=int(n_Pk[:, 5].sum() + n_Pk[:, 7].sum()),
        num_minus_eight=int(n_Pk[:, 8].sum()),
        blocks_outside_normal=counts.outside_normal if RULES[rule].count_outside_normal else None,
        scale_spread_exceeded=int(magnitude.scale_max / least_scale > MAX_SCALE_SPREAD),
        min_scale_byte=used_bytes[0] if used_bytes else None,
        max_scale_byte=used_bytes[-1] if used_bytes else None,
        scale_histogram=tuple((byte, int(histogram[byte])) for byte in used_bytes),
        sampled_blocks=sampled.num_blocks,
        sampled_error_achieved=sampled.achieved,
        sampled_error_plain=sampled.plain,
        sampled_error_bound=sampled.bound,
        weighted_energy=figures.weighted_energy,
        weighted_error=figures.weighted_error,
    )


def pair_figures(counts: PairCounts, *, rule: Rule, global_scale: float) -> PairFigures:
    """Evaluate a table of pairs in float64, pairs in ascending order of the key."""
    wanted_Pk, written_Pk = pair_values(counts.keys, rule=rule, global_scale=global_scale)
    n_Pk = counts.magnitude_counts
    scales_P = counts.scales
    with np.errstate(invalid="ignore", divide="ignore"):
        steps_Pk = np.where(scales_P[:, None] > 0, written_Pk / scales_P[:, None], 0.0)
        error_steps_Pk = np.where(scales_P[:, None] > 0, np.abs(wanted_Pk - written_Pk) / scales_P[:, None], 0.0)
    nonzero_Pk = wanted_Pk != 0
    importance_Pk = counts.importance_sums
    has_importance = importance_Pk is not None
    return PairFigures(
        energy=sum_by_pair(n_Pk * (wanted_Pk * wanted_Pk)),
        squared_error=sum_by_pair(n_Pk * (wanted_Pk - written_Pk) ** 2),
        num_nonzero=int(n_Pk[nonzero_Pk].sum()),
        equal_nonzero=int(n_Pk[nonzero_Pk & (wanted_Pk == written_Pk)].sum()),
        recoverable_codes=int(n_Pk[np.rint(steps_Pk) == np.arange(NUM_MAGNITUDES)].sum()),
        max_error_steps=float(error_steps_Pk[n_Pk > 0].max(initial=0.0)),
        weighted_energy=sum_by_pair(importance_Pk * wanted_Pk**2) / MAX_IMPORTANCE if has_importance else None,
        weighted_error=(
            sum_by_pair(importance_Pk * (wanted_Pk - written_Pk) ** 2) / MAX_IMPORTANCE if has_importance else None
        ),
    )
