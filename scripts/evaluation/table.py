"""Writes the result of an evaluation as a Markdown table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from scripts.evaluation.measure import Score


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


MODES = ("W4A16", "W4A4")
_FIGURES = ("KL", "of mse", "99.9 %", "top-1")


def calibrated_markdown(evaluation: CalibratedEvaluation) -> str:
    """Return a heading line and one table, with the figures of both modes in the row of the weights."""
    by_weights: dict[str, dict[str, CalibratedRow]] = {}
    for row in evaluation.rows:
        by_weights.setdefault(row.weights, {})[row.mode] = row
    columns = [f"{mode}: {name}" if name == _FIGURES[0] else name for mode in MODES for name in _FIGURES]
    lines = [
        f"**{evaluation.model}**, calibrated on {evaluation.calibration_tokens:,} tokens of {evaluation.calibration}, "
        f"evaluated on {evaluation.tokens:,} tokens of {evaluation.text} (perplexity of INT4: "
        f"{evaluation.source.perplexity:.2f}); divergence from the INT4 model in nats.",
        "",
        _line(["weights", *columns]),
        _line(["---", *["---:"] * len(columns)]),
    ]
    for weights, modes in by_weights.items():
        lines.append(_line([weights, *(cell for mode in MODES for cell in _cells(modes.get(mode)))]))
    return "\n".join(lines) + "\n"


def _cells(row: CalibratedRow | None) -> list[str]:
    if row is None:
        return [""] * len(_FIGURES)
    score = row.score
    return [
        _figure(score.kl_mean, ".5f"),
        _figure(row.of_mse, ".2f"),
        _figure(score.kl_p999, ".3f"),
        _figure(score.top1_agreement, ".3f"),
    ]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
