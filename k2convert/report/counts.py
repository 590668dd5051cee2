"""Counts of what happened to the weights: a table of the report."""

from __future__ import annotations

from typing import Final

import numpy as np

from k2convert.quantize.formats.nvfp4 import BLOCKS_PER_GROUP, decode_e4m3
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.report.wording import Table, percent

NOT_COUNTED: Final = "not counted"
_SMALLEST_NORMAL_BYTE = 0x08
_LARGEST_BYTE = 0x7E


def counts_table(metrics: WeightMetrics) -> Table:
    """Return how many weights, blocks and groups changed or did not, and what the scales are."""
    changed = metrics.num_nonzero - metrics.equal_nonzero
    histogram = metrics.scale_histogram
    subnormal = sum(n for byte, n in histogram.items() if byte < _SMALLEST_NORMAL_BYTE)
    blocks = metrics.num_blocks
    codes = metrics.num_codes
    steps = "" if metrics.max_error_steps is None else f"{metrics.max_error_steps:.2f} INT4 steps"
    extremes = [b for b in (metrics.min_scale_byte, metrics.max_scale_byte) if b is not None]
    values = decode_e4m3(np.array(extremes, dtype=np.uint8)).tolist()
    of_source: tuple[tuple[str, ...], ...] = (
        _count("INT4 codes recoverable", metrics.recoverable_codes, codes, "round(w'/s) is the source's code"),
        _count("codes of magnitude 5 or 7", metrics.num_five_or_seven, codes, "E2M1 has neither with other integers"),
        _count("codes of -8", metrics.num_minus_eight, codes, "allowed, but never written by the model's training"),
        _count(
            "blocks clipped to the normal scales", metrics.blocks_outside_normal, blocks,
            "a scale below 2⁻⁶ or above 448 would have given less error",
        ),
        _count("tensors with a wide scale spread", metrics.scale_spread_exceeded, None, "INT4 scales differ by > 2¹³"),
        ("largest error of a weight", steps or NOT_COUNTED, "", "in steps of its INT4 grid"),
    )  # fmt: skip
    if (tensors := metrics.cast_tensors) is not None:
        below = "scales of the expert differ by > 2¹⁷"
        groups = blocks // BLOCKS_PER_GROUP
        of_source = (
            _count("tensors without a change", metrics.lossless_tensors, tensors, "by the written bytes, read back"),
            _count("tensors with rounded codes", metrics.below_window_tensors, tensors, below),
            _count(
                "groups with rounded codes", metrics.below_window_groups, groups, "rounded to the least block scale"
            ),
            _count("tensors with subnormal scales", metrics.subnormal_tensors, tensors, "exact, see below"),
            _count("groups of zeros", metrics.empty_groups, groups, "of 32 weights"),
        )
    rows = (
        _count("non-zero weights changed", changed, metrics.num_nonzero, "their value is not the source's"),
        _count("blocks reproduced exactly", metrics.equal_blocks, blocks, "all 16 values, blocks of zeros included"),
        *of_source,
        _count("blocks with a subnormal scale", subnormal, blocks, "Marlin kernels on Hopper flush them to zero"),
        _count("blocks at 448", histogram.get(_LARGEST_BYTE, 0), blocks, "the largest scale"),
        ("block scales used", " to ".join(f"{v:g}" for v in values) or NOT_COUNTED, "", "smallest and largest"),
    )  # fmt: skip
    return Table(("", "count", "share", "meaning"), rows)


def _count(label: str, value: int | None, of: int | None, meaning: str) -> tuple[str, ...]:
    shown = NOT_COUNTED if value is None else f"{value:,}"
    return label, shown, percent(value, of) if of and value is not None else "", meaning
