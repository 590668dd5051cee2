"""What a report says of pruned experts."""

from __future__ import annotations

from typing import Any, Final

from k2convert.records.pruning import PruningRecord
from k2convert.report.formatting import percent

WARNING: Final = (
    "What pruning costs depends on the model, the scores and the task. Moonlight, Moonshot's small model of this "
    "architecture, keeps 79.8 % of its GSM8K-platinum score with 25 % of its experts pruned, and 17.0 % with 50 % "
    "(llm-compressor's REAP example), while Kimi K2 is reported near-lossless on code with 50 % pruned (REAP's "
    "paper, arXiv 2510.13999). Measure this model on your own task before you ship it."
)
"""What is known of how much pruning costs."""


def words(record: PruningRecord) -> str:
    """Return how many experts are kept, and by whose scores."""
    chosen = "" if record.scores is None else f", chosen by {record.scores}"
    return f"{record.kept.num_experts} of {record.num_source_experts} a layer{chosen}"


def sentences(record: PruningRecord) -> tuple[str, ...]:
    """Return what was pruned, what the figures leave out, and the warning."""
    kept, total = record.kept.num_experts, record.num_source_experts
    chosen = "The list does not say by whose scores." if record.scores is None else f"Chosen by {record.scores}."
    return (
        f"{kept} of {total} routed experts are kept in each of {len(record.kept.layers)} MoE layers; "
        f"{percent(total - kept, total)} were left out. {chosen}",
        f"Experts are numbered here as in the result, 0 to {kept - 1}, in the source's order. The figures are of the "
        "kept experts: they do not say what leaving out the others costs.",
        WARNING,
    )


def pruning_document(record: PruningRecord) -> dict[str, Any]:
    """Return how many experts are kept of how many, and by whose scores, as plain data."""
    return {"kept": record.kept.num_experts, "of": record.num_source_experts, "chosen_by": record.scores}
