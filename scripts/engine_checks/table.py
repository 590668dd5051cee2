"""The results as one Markdown table: a line for each engine, layout and activation mode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from scripts.engine_checks.agreement import Agreement
from scripts.engine_checks.variants import K2, MSE, RULES, Variant

_HEAD = (
    "| engine | layout | activations | checkpoints | checks "
    "| perplexity | by scripts/eval | KL, mse | KL, max | greedy text |",
    "|---|---|---|" + "---:|" * 7,
)


@dataclass(frozen=True, slots=True)
class Result:
    """One checkpoint in one engine. `title` is the engine with its version; `failed` says which checks failed."""

    title: str
    variant: Variant
    num_checks: int
    failed: tuple[str, ...]
    agreement: Agreement | None
    is_known_to_be_wrong: bool


def markdown(results: Iterable[Result]) -> str:
    """Return the table; lines are in the order in which engines first appear."""
    lines = list(_HEAD)
    for _, group in groupby(results, key=_row):
        lines.append(f"| {' | '.join(_cells(list(group)))} |")
    return "\n".join(lines) + "\n"


def _row(result: Result) -> tuple[str, str, str]:
    return result.title, result.variant.layout, result.variant.activations


def _cells(group: list[Result]) -> tuple[str, ...]:
    first = next((r for r in group if (r.variant.form, r.variant.rule) == (K2, MSE)), group[0])
    agreements = [(result.variant.rule, result.agreement) for result in group if result.agreement is not None]
    failed = sum(len(result.failed) for result in group)
    checks = f"{sum(result.num_checks for result in group):,}"
    figures = ("", "", "", "", "")
    if agreements and first.agreement is not None:
        texts = [agreement.same_text for _, agreement in agreements if agreement.same_text is not None]
        figures = (
            f"{first.agreement.perplexity:.4f}",
            f"{first.agreement.expected_perplexity:.4f}",
            *(_largest([agreement.kl for rule, agreement in agreements if rule == wanted]) for wanted in RULES),
            "" if not texts else "same" if all(texts) else "differs",
        )
    if first.is_known_to_be_wrong:
        checks = "known defect"
    elif failed:
        checks = f"**{failed} of {checks} failed**"
    return *_row(first), str(len(group)), checks, *figures


def _largest(values: list[float]) -> str:
    return f"{max(values):.1e}" if values else ""
