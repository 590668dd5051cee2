"""Calibration in a report: rule `gptq` and pruned experts, from the ledger's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median_low
from typing import Final

from k2convert.calibration.channels import MIN_TOKENS
from k2convert.errors import counted
from k2convert.records.calibration import CalibrationRecord, GptqLayer, LayerCalibration
from k2convert.records.pruning import PruningRecord, share_words
from k2convert.report.checks import Checks
from k2convert.report.wording import Section, Table, joined, listed, percent, with_exponents

WARNING: Final = (
    "What pruning costs depends on the model, the scores and the task. Moonlight, Moonshot's small model of this "
    "architecture, keeps 79.8 % of its GSM8K-platinum score with 25 % of its experts pruned, and 17.0 % with 50 % "
    "(llm-compressor's REAP example), while Kimi K2 is reported near-lossless on code with 50 % pruned (REAP's "
    "paper, arXiv 2510.13999). The published Kimi-K2.6 with 192 of 384 experts, pruned from NVFP4, repeats a single "
    "token without end on open-ended text, at any sampling setting. Evaluate this model on your own task before you "
    "serve it."
)
"""Published facts about the cost of pruning."""

_CALIBRATION_COLUMNS: Final = (
    "layer", "tokens per expert: least", "median", "most", f"experts under {MIN_TOKENS}", "channels scaled",
)  # fmt: skip
_GPTQ_COLUMNS: Final = (
    "layer", "held-out error after the layer", "with rule mse", "from earlier layers", "gate and up: shrinkage",
    "down: corrected", "experts by shrinkage", "experts without correction",
)  # fmt: skip


def tokens_by_expert(record: CalibrationRecord) -> list[int]:
    """Return the tokens of every routed expert of every MoE layer."""
    return [tokens for layer in record.layers.values() for tokens in layer.tokens]


def channels_by_exponent(record: CalibrationRecord) -> dict[int, int]:
    """Return the number of channels by exponent, over all layers; 0 is a channel that was not scaled."""
    counts = sum((Counter(layer.exponents) for layer in record.layers.values()), Counter[int]())
    return {exponent: count for exponent, count in sorted(counts.items()) if count}


def gptq_layers(record: CalibrationRecord) -> dict[int, GptqLayer]:
    """Return what rule `gptq` did in each MoE layer, in order; empty for every other rule."""
    return {number: layer.gptq for number, layer in sorted(record.layers.items()) if layer.gptq is not None}


def shrinkages_by_layer(layers: Mapping[int, GptqLayer]) -> dict[float | None, list[int]]:
    """Return the number of experts of each layer by the shrinkage of down: ascending, then None (no correction)."""
    counts = [Counter(layer.down_shrinkages) for layer in layers.values()]
    found = {shrinkage for count in counts for shrinkage in count}
    ordered = sorted(shrinkage for shrinkage in found if shrinkage is not None)
    return {key: [count[key] for count in counts] for key in (*ordered, *([None] if None in found else []))}


def calibrated_sections(record: CalibrationRecord | None) -> Iterator[Section]:
    """Yield what was calibrated and, with rule `gptq`, what it did; nothing for a result without calibration."""
    if record is None:
        return
    rows = [_calibration_row(number, layer) for number, layer in sorted(record.layers.items())]
    found = {"tokens": tokens_by_expert(record), "exponents": channels_by_exponent(record)}
    table = Table(_CALIBRATION_COLUMNS, rows, summary=f"Layers ({len(rows)})")
    charts = [name for name, values in found.items() if values]
    yield Section("Calibration", tuple(_calibration_sentences(record)), (table,), charts)
    if layers := gptq_layers(record):
        rows = [_gptq_row(number, layer) for number, layer in layers.items()]
        table = Table(_GPTQ_COLUMNS, rows, summary=f"Layers ({len(rows)})")
        charts = ["layer_errors", "shrinkages"] if record.held_out else ["shrinkages"]
        yield Section("Rule gptq, layer by layer", tuple(_gptq_sentences(record, layers)), (table,), charts)


def _calibration_sentences(record: CalibrationRecord) -> Iterator[str]:
    texts = joined([name for name, _ in record.texts]) or "no text"
    yield (
        f"Calibrated on {record.tokens:,} tokens of {texts}, in {counted(record.windows, 'window')} of up to "
        f"{record.window:,} tokens."
    )
    if record.dropped_windows:
        yield f"Windows left out because their activations were not finite: {record.dropped_windows:,}."
    if record.imatrix:
        count = len(tokens_by_expert(record))
        fallback = sum(len(layer.fallback) for layer in record.layers.values())
        yield (
            f"{fallback:,} of {count:,} experts saw fewer than {MIN_TOKENS} tokens. The importance of their down "
            "projections is drawn toward an even one."
            if fallback
            else f"Each of the {count:,} experts saw at least {MIN_TOKENS} tokens."
        )
        if without := record.layers_without:
            yield (
                f"In {without:,} of {len(record.layers):,} MoE layers the importance of gate and up, or of down, is "
                "even, as in rule mse: on tokens that were kept out of it, the measured one lost more."
            )
    if record.smoothing:
        channels = channels_by_exponent(record)
        scaled = sum(n for exponent, n in channels.items() if exponent)
        total = sum(channels.values())
        yield (
            f"Smoothing multiplied {scaled:,} of {total:,} channels ({percent(scaled, total)}) of the norm before "
            "the experts by a power of two, and divided everything that reads them by the same. This is exact: without "
            "quantization, the model computes the same outputs. The error of FP4 activations becomes smaller."
        )


def _calibration_row(number: int, layer: LayerCalibration) -> tuple[str, ...]:
    tokens = layer.tokens or (0,)
    scaled = [f"2^{exponent}: {count:,}" for exponent, count in sorted(layer.exponents.items()) if exponent and count]
    return (
        str(number),
        f"{min(tokens):,}",
        f"{median_low(tokens):,}",
        f"{max(tokens):,}",
        listed([expert for expert, count in enumerate(layer.tokens) if count < MIN_TOKENS]),
        with_exponents(", ".join(scaled)) or "none",
    )


def _gptq_sentences(record: CalibrationRecord, layers: Mapping[int, GptqLayer]) -> Iterator[str]:
    shrinkages = [shrinkage for layer in layers.values() for shrinkage in layer.down_shrinkages]
    corrected = sum(ridge is not None for layer in layers.values() for ridge in layer.down_ridges)
    yield (
        "Rule gptq converts the layers in order. In each layer it chooses weights that keep the outputs of the "
        "INT4 model for the inputs that the layers converted before it give: later weights of a row make up for the "
        "rounding of earlier ones. Activations are not quantized meanwhile, so the same weights serve W4A16 and W4A4."
    )
    yield f"Down was corrected for what earlier rounding left over in {corrected:,} of {len(shrinkages):,} experts."
    rounded = sum(layer.shrinkage is None for layer in layers.values())
    experts = shrinkages.count(None)
    if rounded or experts:
        yield (
            f"Rounded without correction, as rule imatrix does: gate and up of {rounded:,} of {len(layers):,} layers, "
            f"down of {experts:,} of {len(shrinkages):,} experts. They saw too few tokens, or it gained nothing "
            "on tokens that it was not fitted to."
        )
    held_out = list(record.held_out.values())
    if not held_out:
        yield f"The error of the outputs: {record.measured_on}."
        return
    better = sum(not found.is_worse for found in held_out)
    yield (
        f"After the last MoE layer, the hidden states have a relative squared error of "
        f"{held_out[-1].gptq_error:.3g}, {record.measured_on}. With rule mse in that layer, they would have "
        f"{held_out[-1].mse_error:.3g}. The error is not larger than with rule mse after {better:,} of "
        f"{len(held_out):,} MoE layers. It is the mean over tokens of |h - h'|² / |h|², where h are the hidden states "
        "of the INT4 model."
    )
    if record.warning:
        yield f"Warning: {record.warning}"


def _gptq_row(number: int, layer: GptqLayer) -> tuple[str, ...]:
    measured = ("not measured", "", "")
    if (errors := layer.held_out) is not None:
        measured = tuple(f"{e:.3g}" for e in (errors.gptq_error, errors.mse_error, errors.inherited_error))
    counts = {key: count for key, (count,) in shrinkages_by_layer({number: layer}).items() if key is not None}
    return (
        str(number),
        *measured,
        "no correction" if layer.shrinkage is None else f"{layer.shrinkage:g}",
        f"{sum(ridge is not None for ridge in layer.down_ridges):,} of {len(layer.down_ridges):,}",
        ", ".join(f"{shrinkage:g}: {count:,}" for shrinkage, count in counts.items()) or "none",
        listed([expert for expert, shrinkage in enumerate(layer.down_shrinkages) if shrinkage is None]),
    )


def pruned_section(record: PruningRecord, checks: Checks | None) -> Section:
    """Return which experts were left out, what is known about the cost, and the warning."""
    kept = record.kept.num_experts
    total = record.num_source_experts
    shares = record.shares
    measured: Mapping[int, float] = checks.router_weights if checks is not None else {}
    chosen = "The list does not say by whose scores."
    if record.scores is not None:
        chosen = f"Chosen by {record.scores}."
    sentences = [
        f"{kept} of {total} routed experts are kept in each of {len(record.kept.layers)} MoE layers; "
        f"{percent(total - kept, total)} were left out. {chosen} Nothing was trained afterwards.",
        *(f"Left out of the {what}: {share_words(found)}." for what, found in shares.items()),
    ]
    if not shares:
        sentences.append(
            "The list came without scores, so it is not known which share of them was left out. A statistics file, "
            "which k2convert calibrate writes, has scores."
        )
    if measured and checks is not None:
        sentences.append(f"Left out of the router's weight, {checks.hidden_states}: {share_words(measured)}.")
        shares["router's weight, in validate,"] = dict(measured)
    rest = "The rows of pruning, under Reference layers, do."
    sentences.append(
        f"Experts are numbered here as in the result, 0 to {kept - 1}, in the source's order. The figures of weights "
        "are of the kept experts: they do not show the cost of leaving out the others. "
        f"{rest if measured else 'k2convert validate --layers all --text FILE measures that.'}"
    )
    rows = [
        [str(layer), *(f"{100 * found[layer]:.1f} %" if layer in found else "" for found in shares.values())]
        for layer in record.kept.layers
    ]
    columns = ["layer", *(f"{what} left out" for what in shares)]
    tables = (Table(columns, rows, summary=f"Layers ({len(rows)})"),) if shares else ()
    return Section("Pruned experts", (*sentences, WARNING), tables)
