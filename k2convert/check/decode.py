"""The error of every written NVFP4 weight against its source, by the compiled code, and the figures of a ledger.

metrics/measure.py compares source and result element by element, whatever the rule. It reads both by the conversion's
own code: what that hides the certificate finds (certificate.py).

A weight with channel exponents is q * s * 2**-a. If the global scale is known only from a rounded divisor, only figures
of the source are compared.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from k2convert.quantize.formats.bf16 import SourceWeight
from k2convert.quantize.formats.nvfp4 import decode_e4m3
from k2convert.quantize.metrics.measure import add_up, metrics_of
from k2convert.quantize.metrics.weight_metrics import MetricsSum, WeightMetrics
from k2convert.records.document import plain

_E4M3: Final = decode_e4m3(np.arange(256, dtype=np.uint8))  # any bytes, those of damaged scales too


def measure_decoded(
    source: SourceWeight,
    *,
    packed: NDArray[np.uint8],
    block_scales: NDArray[np.uint8],
    global_scale: float,
    changed_codes: int | None = None,
) -> WeightMetrics:
    """Decode NVFP4 bytes (packed [N * K/2], block_scales [N * K/16], any shape) and measure them against the source.

    `changed_codes` are those of a cast; None for other weights. Nothing is sampled.
    """
    sums = add_up(source, packed, block_scales, _E4M3 * global_scale)
    lossless = None
    if changed_codes is not None:
        lossless = int(sums.squared_error == 0.0 and sums.equal_nonzero == sums.num_nonzero)
    return replace(metrics_of(sums, block_scales), lossless_tensors=lossless, changed_codes=changed_codes)


Figures = Mapping[str, Any]
TOLERANCE: Final = 1e-9  # both sides add float64 terms, in different orders
_OF_SOURCE: Final = ("num_weights", "num_blocks", "energy", "num_nonzero")
_NOT_STATED: Final = ("sampled_blocks", "sampled_error_achieved", "sampled_error_max", "changed_codes")


def measured_figures(totals: Mapping[str, MetricsSum], *, has_exact_scales: bool) -> Mapping[str, Figures]:
    """Return the figures to compare with a ledger's, by role and under "total"."""
    documents = {role: plain(sums.total()) for role, sums in totals.items()}
    for role, document in documents.items():
        names = document.keys() - set(_NOT_STATED) if has_exact_scales else _OF_SOURCE
        documents[role] = {name: document[name] for name in names if document[name] not in (None, {})}
    return documents


def differing_totals(stated: Mapping[str, WeightMetrics], measured: Mapping[str, Figures]) -> Iterator[tuple[str, str]]:
    """Yield (place, problem) for every figure of a ledger that is not the measured one, with both numbers."""
    for role in stated.keys() - measured.keys():
        yield f"totals.{role}", "stated, but no such weight was measured"
    for role, figures in measured.items():
        if role not in stated:
            yield f"totals.{role}", f"missing, but {figures['num_weights']:,} weights were measured"
            continue
        document = plain(stated[role])
        for key, value in sorted(figures.items()):
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


def is_same_error(measured: WeightMetrics, recorded: WeightMetrics) -> bool:
    """Return whether the figures that a conversion recorded are those of the written bytes."""
    keys = ("squared_error", "energy", "equal_nonzero", "num_nonzero")
    return all(_is_same_figure(getattr(recorded, key), getattr(measured, key)) for key in keys)


def _is_same_figure(stated: float | None, measured: float | None) -> bool:
    if stated is None or measured is None:
        return stated is measured
    if isinstance(stated, int) and isinstance(measured, int):
        return stated == measured
    return math.isclose(stated, measured, rel_tol=TOLERANCE)
