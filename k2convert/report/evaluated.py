"""Evaluation in a report: the figures of every mode, layer by layer, and the tokens that differ most.

A mode is how the same weights were computed: with which activations and which KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from k2convert.errors import counted, shortened
from k2convert.plan.recipe import Recipe
from k2convert.records.evaluation import EvaluatedModel, Evaluation, EvaluationRow, WorstToken
from k2convert.report.wording import Section, Table, joined, last_part, with_error

_MOST_BEFORE: Final = 60  # characters of the text before a token
_MOST_IN_TOKEN: Final = 40


def mode_rows(evaluation: Evaluation, recipe: Recipe) -> list[tuple[str, EvaluationRow]]:
    """Return the rows with the words for their modes, the mode that the result declares first.

    The words are ours: charts cannot show a name from a file.
    """

    def differs(row: EvaluationRow) -> tuple[bool, bool]:
        model = row.model
        return model.activations != recipe.activations, (model.kv_cache == "fp8") != (recipe.kv_cache == "fp8")

    def mode(model: EvaluatedModel) -> str:
        computed = "as stored"
        if model.activations is not None:
            computed = model.activations.upper()
        if model.kv_cache is None:
            return computed
        return f"{computed}, {model.kv_cache.upper()} KV cache"

    return [(mode(row.model), row) for row in sorted(evaluation.rows, key=differs)]


def is_routed(rows: Sequence[tuple[str, EvaluationRow]]) -> bool:
    """Return whether experts were chosen in any layer."""
    return any(layer.routing_agreement is not None for _, row in rows for layer in row.layers)


def headline_words(evaluation: Evaluation, recipe: Recipe) -> tuple[str, str, str]:
    """Return value, label and detail of the divergence in the mode that the result declares."""
    mode, row = mode_rows(evaluation, recipe)[0]
    found = row.figures.divergence
    error = ""
    if found.standard_error is not None:
        error = f"± {found.standard_error:.2g}, "
    detail = f"{error}of the next token, {mode}, from {_called(evaluation.reference)}"
    return f"{found.mean:.3g}", "KL divergence", detail


def evaluation_section(evaluation: Evaluation, recipe: Recipe) -> Section:
    """Return what was measured on which text, and its figures by mode. The card has it too."""
    rows = mode_rows(evaluation, recipe)
    parts = [{(p.first, p.stop): f"{p.mean:.3g}" for p in row.figures.divergence.by_position} for _, row in rows]
    positions = sorted({place for found in parts for place in found})
    by_position = [(f"{a:,} to {b - 1:,}", *(found.get((a, b), "") for found in parts)) for a, b in positions]
    modes = [mode for mode, _ in rows]
    return Section(
        "Evaluation of the whole model",
        tuple(_sentences(evaluation, rows)),
        (
            Table(("", *modes), _figures([row for _, row in rows])),
            Table(("positions", *(f"KL, {mode}" for mode in modes)), by_position, summary="KL by position"),
        ),
        charts=("divergences", "positions"),
    )


def detail_sections(evaluation: Evaluation, recipe: Recipe) -> Iterator[Section]:
    """Yield hidden states and routing by layer, and the tokens that differ most; what was not measured is left out."""
    rows = mode_rows(evaluation, recipe)
    num_layers = max(len(row.layers) for _, row in rows)
    if num_layers:
        columns = [words for mode, _ in rows for words in (f"error, {mode}", f"same experts, {mode}")]
        table = [(str(layer), *(cell for _, row in rows for cell in _layer(row, layer))) for layer in range(num_layers)]
        routing = "Same experts: the share of the reference's choices of experts that the model makes too."
        yield Section(
            "Hidden states after each layer",
            (
                "Relative squared error of the hidden states, |h - h'|² over |h|², summed over all tokens. h are the "
                "reference's. The error of a layer contains those of the layers before it.",
                *((routing,) if is_routed(rows) else ()),
            ),
            (Table(("layer", *columns), table, summary=f"Layers ({num_layers})"),),
            charts=("hidden_errors", "routing") if is_routed(rows) else ("hidden_errors",),
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
        sentence = f"The largest KL of single tokens, {rows[0][0]}. ␣ is a space at the edge of a token."
        yield Section("Tokens that differ most", (sentence,), tables)


def _sentences(evaluation: Evaluation, rows: Sequence[tuple[str, EvaluationRow]]) -> Iterator[str]:
    text = evaluation.text
    reference = _called(evaluation.reference)
    names = joined([shortened(last_part(name)) for name, _ in text.texts]) or "a text"
    where = f"on {counted(text.tokens, 'token')} of {names} ({counted(text.windows, 'window')} of {text.window:,})"
    found = ", ".join(f"{_divergence(row)} ({mode})" for mode, row in rows)
    yield f"Measured {where} against {reference}: KL {found}."
    if text.dropped:
        yield f"Windows left out because their hidden states were not finite: {text.dropped:,}."
    yield (
        "KL(reference || model) of the next token is in nats, ± one standard error over windows; 0 is no difference. "
        "It ranks conversions of one model. It does not say what tasks lose: run yours."
    )


def _figures(rows: Sequence[EvaluationRow]) -> list[tuple[str, ...]]:
    found = [row.figures for row in rows]
    kl = [figures.divergence for figures in found]
    return [
        ("KL, mean", *map(_divergence, rows)),
        ("KL, median", *(f"{one.median:.3g}" for one in kl)),
        ("KL, 99 % of tokens below", *(f"{one.p99:.3g}" for one in kl)),
        ("KL, 99.9 % of tokens below", *(f"{one.p999:.3g}" for one in kl)),
        ("KL, largest", *(f"{one.maximum:.3g}" for one in kl)),
        ("perplexity", *(f"{one.perplexity:.6g}" for one in found)),
        ("perplexity of the reference", *(f"{one.reference_perplexity:.6g}" for one in found)),
        (
            "log-likelihood less the reference's",
            *(with_error(one.log_likelihood.mean, one.log_likelihood.standard_error) for one in found),
        ),
        ("same most likely token", *(_share(one.top1_agreement) for one in found)),
        ("reference's token not in the top 5", *(_share(one.left_top5) for one in found)),
    ]


def _layer(row: EvaluationRow, number: int) -> tuple[str, str]:
    if number >= len(row.layers):
        return "", ""
    found = row.layers[number]
    return f"{found.relative_error:.3g}", "" if found.routing_agreement is None else _share(found.routing_agreement)


def _worst(found: WorstToken) -> tuple[str, ...]:
    def shown(text: str) -> str:
        cut = len(text) > _MOST_IN_TOKEN
        text = text[:_MOST_IN_TOKEN]
        inner = text.strip(" ")
        left = len(text) - len(text.lstrip(" "))
        return "␣" * left + _visible(inner) + "␣" * (len(text) - left - len(inner)) + ("…" if cut else "")

    cut = len(found.before) > _MOST_BEFORE
    return (
        f"{found.divergence:.3g}",
        ("…" if cut else "") + _visible(found.before[-_MOST_BEFORE:]),
        *map(shown, (found.token, found.reference_token, found.model_token)),
        f"{found.window:,}: {found.position:,}",
    )


def _visible(text: str) -> str:
    r"""Return text with an escape such as \n for every character that is not seen."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _divergence(row: EvaluationRow) -> str:
    return with_error(row.figures.divergence.mean, row.figures.divergence.standard_error)


def _share(share: float) -> str:
    return f"{100 * share:.2f} %"


def _called(model: EvaluatedModel) -> str:
    if "://" in model.name:
        return shortened(model.name)
    return shortened(last_part(model.name))
