"""Errors of the whole model in a report: the evaluation, mode by mode, and the held-out errors of rule `gptq`.

A mode is how the same weights were computed: with which activations and which KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import Final

from k2convert.errors import counted, shortened
from k2convert.plan.recipe import Recipe
from k2convert.records.calibration import CalibrationRecord, LayerCalibration
from k2convert.records.evaluation import EvaluatedModel, Evaluation, EvaluationRow, WorstToken
from k2convert.report.wording import Figure, Section, Table, joined, last_part, with_error

_MOST_BEFORE: Final = 60  # characters of the text before a token
_MOST_IN_TOKEN: Final = 40


def mode_rows(evaluation: Evaluation, recipe: Recipe) -> list[tuple[str, EvaluationRow]]:
    """Return the rows with the words for their modes, the mode that the result declares first.

    The words are ours: charts cannot show a name from a file.
    """

    def differs(row: EvaluationRow) -> tuple[bool, bool]:
        model = row.model
        return model.activations != recipe.activations, (model.kv_cache == "fp8") != (recipe.kv_cache == "fp8")

    return [(row.model.mode or "as stored", row) for row in sorted(evaluation.rows, key=differs)]


def divergence_figure(evaluation: Evaluation, recipe: Recipe) -> Figure:
    """Return the divergence in the mode that the result declares."""
    mode, row = mode_rows(evaluation, recipe)[0]
    divergence = row.figures.divergence
    error = "" if divergence.standard_error is None else f"± {divergence.standard_error:.2g}, "
    detail = f"{error}of the next token, {mode}, from {_called(evaluation.reference)}"
    return Figure(f"{divergence.mean:.3g}", "KL divergence", detail)


def held_out_figure(record: CalibrationRecord) -> Figure:
    """Return the error on windows that were kept out of the fit, after the last MoE layer."""
    if not record.held_out:
        return Figure("not measured", "error of the outputs", record.measured_on)
    last = list(record.held_out.values())[-1]
    detail = f"after the last MoE layer, {record.measured_on}; {last.mse_error:.3g} by rule mse there"
    return Figure(f"{last.gptq_error:.3g}", "error of the outputs", detail)


def evaluation_sections(evaluation: Evaluation, recipe: Recipe) -> Iterator[Section]:
    """Yield figures by mode, hidden states and routing by layer, and the tokens that differ most, where measured."""
    rows = mode_rows(evaluation, recipe)
    modes = [mode for mode, _ in rows]
    yield Section(
        "Evaluation of the whole model",
        tuple(_sentences(evaluation, rows)),
        (Table(("", *modes), _figures([row for _, row in rows])),),
        charts=("positions",),
    )
    if any(row.layers for _, row in rows):
        yield Section(
            "Hidden states after each layer",
            (
                "Relative squared error of the hidden states, |h - h'|² over |h|², summed over all tokens. h are the "
                "reference's. The error of a layer contains those of the layers before it.",
                "Same experts: the share of the reference's choices of experts that the model makes too.",
            ),
            (_by_layer(rows),),
        )
    tables = [
        Table(
            ("KL", "text before", "token", "reference expects", "model expects", "window: position"),
            [_worst(token) for token in row.worst],
            summary="" if i == 0 else mode,
        )
        for i, (mode, row) in enumerate(rows)
        if row.worst
    ]
    if tables:
        sentence = f"The largest KL of single tokens, {modes[0]}. ␣ is a space at the edge of a token."
        yield Section("Tokens that differ most", (sentence,), tables)


def _sentences(evaluation: Evaluation, rows: Sequence[tuple[str, EvaluationRow]]) -> Iterator[str]:
    text = evaluation.text
    names = joined([shortened(last_part(name)) for name, _ in text.texts]) or "a text"
    means = ", ".join(f"{_divergence(row)} ({mode})" for mode, row in rows)
    yield (
        f"Measured on {counted(text.tokens, 'token')} of {names} ({counted(text.windows, 'window')} of "
        f"{text.window:,}) against {_called(evaluation.reference)}: KL {means}."
    )
    if text.dropped:
        yield f"Windows left out because their hidden states were not finite: {text.dropped:,}."
    yield (
        "KL(reference || model) of the next token is in nats, ± one standard error over windows; 0 is no difference. "
        "It ranks conversions of one model. It does not say what tasks lose: run yours."
    )


def _figures(rows: Sequence[EvaluationRow]) -> list[tuple[str, ...]]:
    figures = [row.figures for row in rows]
    kl = [model.divergence for model in figures]
    return [
        ("KL, mean", *map(_divergence, rows)),
        ("KL, median", *(f"{model.median:.3g}" for model in kl)),
        ("KL, 99 % of tokens below", *(f"{model.p99:.3g}" for model in kl)),
        ("KL, 99.9 % of tokens below", *(f"{model.p999:.3g}" for model in kl)),
        ("KL, largest", *(f"{model.maximum:.3g}" for model in kl)),
        ("perplexity", *(f"{model.perplexity:.6g}" for model in figures)),
        ("perplexity of the reference", *(f"{model.reference_perplexity:.6g}" for model in figures)),
        (
            "log-likelihood less the reference's",
            *(with_error(model.log_likelihood.mean, model.log_likelihood.standard_error) for model in figures),
        ),
        ("same most likely token", *(_share(model.top1_agreement) for model in figures)),
        ("reference's token not in the top 5", *(_share(model.left_top5) for model in figures)),
    ]


def _by_layer(rows: Sequence[tuple[str, EvaluationRow]]) -> Table:
    num_layers = max(len(row.layers) for _, row in rows)
    columns = [name for mode, _ in rows for name in (f"error, {mode}", f"same experts, {mode}")]
    cells = [(str(layer), *(cell for _, row in rows for cell in _layer(row, layer))) for layer in range(num_layers)]
    return Table(("layer", *columns), cells, summary=f"Layers ({num_layers})")


def _layer(row: EvaluationRow, number: int) -> tuple[str, str]:
    if number >= len(row.layers):
        return "", ""
    layer = row.layers[number]
    return f"{layer.relative_error:.3g}", "" if layer.routing_agreement is None else _share(layer.routing_agreement)


def _worst(token: WorstToken) -> tuple[str, ...]:
    def shown(text: str) -> str:
        is_cut = len(text) > _MOST_IN_TOKEN
        text = text[:_MOST_IN_TOKEN]
        inner = text.strip(" ")
        left = len(text) - len(text.lstrip(" "))
        return "␣" * left + _visible(inner) + "␣" * (len(text) - left - len(inner)) + ("…" if is_cut else "")

    is_cut = len(token.before) > _MOST_BEFORE
    return (
        f"{token.divergence:.3g}",
        ("…" if is_cut else "") + _visible(token.before[-_MOST_BEFORE:]),
        *map(shown, (token.token, token.reference_token, token.model_token)),
        f"{token.window:,}: {token.position:,}",
    )


def _visible(text: str) -> str:
    r"""Return text with an escape such as \n for every character that is not seen."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _divergence(row: EvaluationRow) -> str:
    return with_error(row.figures.divergence.mean, row.figures.divergence.standard_error)


def _share(share: float) -> str:
    return f"{100 * share:.2f} %"


def _called(model: EvaluatedModel) -> str:
    return shortened(model.name if "://" in model.name else last_part(model.name))


def tokens_by_expert(record: CalibrationRecord) -> list[int]:
    """Return the tokens of every routed expert of every MoE layer."""
    return [tokens for layer in record.layers.values() for tokens in layer.tokens]


def calibration_section(record: CalibrationRecord) -> Section:
    """Return which text was read, the tokens per expert and, with rule `gptq`, the held-out errors by layer."""
    columns = ["layer", "tokens per expert: least", "median", "most"]
    if record.gptq:
        columns += ["held-out error after the layer", "with rule mse", "from earlier layers"]
    rows = [_calibrated_layer(number, layer) for number, layer in sorted(record.layers.items())]
    table = Table(columns, rows, summary=f"Layers ({len(rows)})")
    return Section("Calibration", tuple(_calibration_sentences(record)), (table,), charts=("tokens",))


def _calibrated_layer(number: int, layer: LayerCalibration) -> tuple[str, ...]:
    tokens = layer.tokens or (0,)
    cells = (str(number), f"{min(tokens):,}", f"{median_low(tokens):,}", f"{max(tokens):,}")
    if layer.gptq is None:
        return cells
    if (errors := layer.gptq.held_out) is None:
        return (*cells, "not measured", "", "")
    return (*cells, *(f"{e:.3g}" for e in (errors.gptq_error, errors.mse_error, errors.inherited_error)))


def _calibration_sentences(record: CalibrationRecord) -> Iterator[str]:
    texts = joined([shortened(last_part(name)) for name, _ in record.texts]) or "no text"
    yield (
        f"Calibrated on {record.tokens:,} tokens of {texts}, in {counted(record.windows, 'window')} of up to "
        f"{record.window:,} tokens."
    )
    if record.dropped_windows:
        yield f"Windows left out because their activations were not finite: {record.dropped_windows:,}."
    if record.exponents_digest is not None:
        yield (
            "Smoothing multiplied channels of the norm before the experts by powers of two, and divided everything "
            "that reads them by the same. This is exact: without quantization, the model computes the same outputs. "
            "The error of FP4 activations becomes smaller."
        )
    if not record.gptq:
        return
    yield (
        "Rule `gptq` converts the layers in order. In each layer it chooses weights that keep the outputs of the "
        "INT4 model for the inputs that the layers converted before it give: later weights of a row make up for the "
        "rounding of earlier ones."
    )
    held_out = list(record.held_out.values())
    if not held_out:
        yield f"The error of the outputs: {record.measured_on}."
        return
    better = sum(not errors.is_worse for errors in held_out)
    yield (
        f"After the last MoE layer, the hidden states have a relative squared error of "
        f"{held_out[-1].gptq_error:.3g}, {record.measured_on}. With rule mse in that layer, they would have "
        f"{held_out[-1].mse_error:.3g}. The error is not larger than with rule mse after {better:,} of "
        f"{len(held_out):,} MoE layers. It is the mean over tokens of |h - h'|² / |h|², where h are the hidden states "
        "of the INT4 model."
    )
    if record.warning:
        yield f"Warning: {record.warning}"
