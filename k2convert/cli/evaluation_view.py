"""An evaluation as tables: figures of every model, errors by layer, and the tokens that differ most."""

from collections.abc import Sequence
from dataclasses import replace

from k2convert.cli.console import print_line, print_table
from k2convert.records.evaluation import EvaluatedModel, Evaluation, EvaluationRow, Verdict

_SHOWN_LAYERS = 3
_SHOWN_TOKENS = 3


def show_evaluation(found: Evaluation) -> None:
    """Print the figures of every model, its worst layers and tokens."""
    text = found.text
    names = ", ".join(name for name, _ in text.texts)
    dropped = ""
    if text.dropped:
        dropped = f", {text.dropped:,} windows dropped"
    print_table(
        f"against {found.reference.name}, on {text.tokens:,} tokens of {names}{dropped}",
        ("model", "KL, nats", "+-", "99.9 %", "max", "perplexity", "same top 1, %", "left top 5, %"),
        [(label, *_figures(row)) for label, row in zip(row_labels(found.rows), found.rows, strict=True)],
    )
    if found.rows:
        print_line(f"perplexity of {found.reference.name}: {found.rows[0].figures.reference_perplexity:.3f}")
    for verdict in found.verdicts:
        print_line(_verdict_line(verdict))
    if any(row.layers for row in found.rows):
        _show_layers(found.rows)
    for row in found.rows:
        for token in row.worst[:_SHOWN_TOKENS]:
            print_line(
                f"{_called(row.model)}: KL {token.divergence:.3f} after {token.before[-40:]!r}: text {token.token!r}, "
                f"reference {token.reference_token!r}, model {token.model_token!r}"
            )


def _figures(row: EvaluationRow) -> tuple[str, ...]:
    figures = row.figures
    divergence = figures.divergence
    return (
        f"{divergence.mean:.5f}",
        "" if divergence.standard_error is None else f"{divergence.standard_error:.5f}",
        f"{divergence.p999:.3f}",
        f"{divergence.maximum:.3f}",
        f"{figures.perplexity:.3f}",
        f"{100 * figures.top1_agreement:.2f}",
        f"{100 * figures.left_top5:.2f}",
    )


def row_labels(rows: Sequence[EvaluationRow]) -> list[str]:
    """Return model and mode of each row in few letters: without the folders above, if that tells models apart."""
    short = {row.model.name: row.model.name.rstrip("/").rpartition("/")[2] for row in rows}
    is_clear = len(set(short.values())) == len(short)
    return [_called(replace(row.model, name=short[row.model.name]) if is_clear else row.model) for row in rows]


def _verdict_line(verdict: Verdict) -> str:
    """Say which of two models is nearer to the reference, or that the text does not tell."""
    nearer, farther = (_called(model) for model in (verdict.nearer, verdict.farther))
    found = verdict.difference
    error = ""
    if found.standard_error is not None:
        error = f" +- {found.standard_error:.2g}"
    if verdict.is_clear:
        return f"{nearer} is nearer than {farther}: its KL is {found.mean:.2g}{error} less, on the same tokens"
    return f"{nearer} and {farther} are not told apart: their KL differs by {found.mean:.2g}{error} on the same tokens"


def _called(model: EvaluatedModel) -> str:
    return " ".join(filter(None, (model.name, model.mode)))


def _show_layers(rows: Sequence[EvaluationRow]) -> None:
    cells: list[tuple[str, ...]] = []
    for label, row in zip(row_labels(rows), rows, strict=True):
        errors = [layer.relative_error for layer in row.layers]
        routing = [layer.routing_agreement for layer in row.layers if layer.routing_agreement is not None]
        steps = sorted(range(len(errors)), key=lambda n: errors[n] - (errors[n - 1] if n else 0.0), reverse=True)
        cells.append(
            (
                label,
                f"{errors[-1]:.5f}",
                ", ".join(map(str, steps[:_SHOWN_LAYERS])),
                f"{100 * min(routing):.2f} %" if routing else "",
            )
        )
    columns = ("model", "error after the last layer", "grows most in layers", "least routing agreement")
    print_table("hidden states: relative squared error", columns, cells, left=(0, 2))
