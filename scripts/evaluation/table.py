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


@dataclass(frozen=True, slots=True)
class CalibratedRow:
    """One calibrated conversion; `of_mse` is its mean KL as a share of data-free mse's in the same mode."""

    weights: str
    mode: str
    of_mse: float
    score: Score


@dataclass(frozen=True, slots=True)
class CalibratedEvaluation:
    """All calibrated conversions of one model: calibrated on one text and evaluated on another one."""

    model: str
    calibration: str
    calibration_tokens: int
    text: str
    tokens: int
    source: Score
    rows: tuple[CalibratedRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


_CALIBRATED_COLUMNS = ("weights", "mode", "mean KL", "of mse", "99.9 % KL", "top-1 agreement", "perplexity")


def calibrated_markdown(evaluation: CalibratedEvaluation) -> str:
    """Return a heading line and one table."""
    lines = [
        f"**{evaluation.model}**, calibrated on {evaluation.calibration_tokens:,} tokens of {evaluation.calibration}, "
        f"evaluated on {evaluation.tokens:,} tokens of {evaluation.text} (perplexity of INT4: "
        f"{evaluation.source.perplexity:.2f}); divergence from the INT4 model in nats.",
        "",
        _line(_CALIBRATED_COLUMNS),
        _line(["---", "---", *["---:"] * (len(_CALIBRATED_COLUMNS) - 2)]),
    ]
    for row in evaluation.rows:
        score = row.score
        figures = (
            _figure(score.kl_mean, ".5f"),
            _figure(row.of_mse, ".2f"),
            _figure(score.kl_p999, ".3f"),
            _figure(score.top1_agreement, ".3f"),
            _figure(score.perplexity, ".2f"),
        )
        lines.append(_line([row.weights, row.mode, *figures]))
    return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
