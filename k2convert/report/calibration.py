"""What a report says of the calibration: the texts, the tokens of each expert, and the channels that were scaled."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from k2convert.calibrate.columns import MIN_TOKENS
from k2convert.records.calibration import CalibrationRecord, LayerCalibration
from k2convert.report.feedback import feedback_document
from k2convert.report.formatting import counted, percent, with_exponents

LAYER_COLUMNS = ("layer", "tokens an expert: least", "median", "most", f"experts under {MIN_TOKENS}", "channels scaled")
_MOST_EXPERTS = 12


def tokens_by_expert(record: CalibrationRecord) -> list[int]:
    """Return the tokens of every routed expert of every MoE layer."""
    return [tokens for layer in record.layers.values() for tokens in layer.tokens]


def channels_by_exponent(record: CalibrationRecord) -> dict[int, int]:
    """Return the number of channels by exponent, over all layers; 0 is a channel that was not scaled."""
    counts: Counter[int] = Counter()
    for layer in record.layers.values():
        counts.update(layer.exponents)
    return {exponent: count for exponent, count in sorted(counts.items()) if count}


def sentences(record: CalibrationRecord) -> tuple[str, ...]:
    """Return what was done, one thing a sentence."""
    found = [
        f"Calibrated on {record.tokens:,} tokens of {_listed([name for name, _ in record.texts])}, in "
        f"{counted(record.windows, 'window')} of up to {record.window:,} tokens.",
    ]
    if record.dropped_windows:
        found.append(f"Windows left out because their activations were not finite: {record.dropped_windows:,}.")
    experts = tokens_by_expert(record)
    if record.weighted:
        fallback = sum(len(layer.fallback) for layer in record.layers.values())
        found.append(
            f"{fallback:,} of {len(experts):,} experts saw fewer than {MIN_TOKENS} tokens. The importance of their "
            "down projections is drawn toward an even one."
            if fallback
            else f"Each of the {len(experts):,} experts saw at least {MIN_TOKENS} tokens."
        )
    channels = channels_by_exponent(record)
    if record.norm_scaling:
        scaled, total = sum(n for exponent, n in channels.items() if exponent), sum(channels.values())
        found.append(
            f"Norm scaling multiplied {scaled:,} of {total:,} channels ({percent(scaled, total)}) by a power of two in "
            "the norm before the experts, and divided by it what reads them. This is exact: without quantization, the "
            "model computes the same outputs. FP4 activations lose less."
        )
    return tuple(found)


def layer_rows(record: CalibrationRecord) -> list[tuple[str, ...]]:
    """Return one row per MoE layer."""
    return [_layer_row(number, layer) for number, layer in sorted(record.layers.items())]


def _layer_row(number: int, layer: LayerCalibration) -> tuple[str, ...]:
    tokens = layer.tokens or (0,)
    few = [expert for expert, count in enumerate(layer.tokens) if count < MIN_TOKENS]
    names = [str(expert) for expert in few[:_MOST_EXPERTS]]
    rest = len(few) - len(names)
    listed = ", ".join(names) + (f" and {rest:,} more" if rest else "")
    counts = [
        with_exponents(f"2^{exponent}: {count:,}")
        for exponent, count in sorted(layer.exponents.items())
        if exponent and count
    ]
    return (
        str(number),
        f"{min(tokens):,}",
        f"{statistics.median(tokens):,.0f}",
        f"{max(tokens):,}",
        listed or "none",
        ", ".join(counts) or "none",
    )


def facts(record: CalibrationRecord | None) -> tuple[tuple[str, str], ...]:
    """Return what identifies the calibration, as (label, value); empty without one."""
    if record is None:
        return ()
    return (
        ("statistics (blake3)", record.statistics),
        *((f"text {name} (blake3)", digest) for name, digest in record.texts),
        ("seed of the windows", str(record.seed)),
        *((("norm exponents (blake3)", record.exponents_digest),) if record.exponents_digest is not None else ()),
    )


def calibration_document(record: CalibrationRecord) -> Mapping[str, Any]:
    """Return the figures as plain data, for --json."""
    experts = tokens_by_expert(record)
    return {
        "texts": [name for name, _ in record.texts],
        "tokens": record.tokens,
        "weighted": record.weighted,
        "norm_scaling": record.norm_scaling,
        "experts": len(experts),
        "least_tokens": min(experts, default=0),
        "median_tokens": statistics.median(experts) if experts else 0,
        "fallback_experts": {str(n): list(layer.fallback) for n, layer in record.layers.items() if layer.fallback},
        "channels": {str(exponent): count for exponent, count in channels_by_exponent(record).items()},
        **({"feedback": feedback_document(record)} if record.feedback else {}),
    }


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "no text"
