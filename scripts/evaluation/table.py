"""Writes the result of an evaluation as a Markdown table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scripts.evaluation.measure import Score


@dataclass(frozen=True, slots=True)
class Row:
    """One variant of a model; `weight_sqnr_db` covers all INT4 weights and is None for the source."""

    weights: str
    activations: str
    weight_sqnr_db: float | None
    score: Score


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All variants of one model on one text."""

    model: str
    text: str
    tokens: int
    positions: int
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


_COLUMNS = ("weights", "activations", "weight SQNR, dB", "perplexity", "mean KL", "99.9 % KL", "top-1 agreement")


def markdown(evaluation: Evaluation) -> str:
    """Return a heading line and one table."""
    lines = [
        f"**{evaluation.model}**, {evaluation.text}: {evaluation.tokens:,} tokens in windows of 256, "
        f"{evaluation.positions:,} predictions; divergence from the INT4 model in nats.",
        "",
        _line(_COLUMNS),
        _line(["---", "---", *["---:"] * (len(_COLUMNS) - 2)]),
    ]
    for row in evaluation.rows:
        score = row.score
        figures = (
            _figure(row.weight_sqnr_db, ".2f"),
            _figure(score.perplexity, ".2f"),
            _figure(score.kl_mean, ".5f"),
            _figure(score.kl_p999, ".3f"),
            _figure(score.top1_agreement, ".3f"),
        )
        lines.append(_line([row.weights, row.activations, *figures]))
    return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
