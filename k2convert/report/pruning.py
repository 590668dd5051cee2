"""The part of a report about pruned experts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from k2convert.records.pruning import PruningRecord, share_words
from k2convert.report.checks import Checks
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
    return f"{record.kept.num_experts} of {record.num_source_experts} per layer{chosen}"


def sentences(record: PruningRecord, checks: Checks | None = None) -> tuple[str, ...]:
    """Return what was pruned, the shares left out, what the figures do not show, and the warning."""
    kept, total = record.kept.num_experts, record.num_source_experts
    chosen = "The list does not say by whose scores." if record.scores is None else f"Chosen by {record.scores}."
    if checks is not None and checks.router_weights:
        shares = [f"Left out of the router's weight, {checks.hidden_states}: {share_words(checks.router_weights)}."]
        measured = "The rows of pruning, under Reference layers, do."
    else:
        shares, measured = [], "k2convert validate --layers all --text FILE measures that."
    return (
        f"{kept} of {total} routed experts are kept in each of {len(record.kept.layers)} MoE layers; "
        f"{percent(total - kept, total)} were left out. {chosen}",
        *left_out_sentences(record),
        *shares,
        f"Experts are numbered here as in the result, 0 to {kept - 1}, in the source's order. The figures of weights "
        f"are of the kept experts: they do not say what leaving out the others costs. {measured}",
        WARNING,
    )


def left_out_sentences(record: PruningRecord) -> tuple[str, ...]:
    """Return which share of the scores, and of the router's weight, was left out, or that this is not known."""
    if record.left_out is None:
        return (
            "The list came without scores, so it is not known which share of them was left out. A statistics file, "
            "which k2convert calibrate makes, has scores.",
        )
    return tuple(f"Left out of the {what}: {share_words(shares)}." for what, shares in record.shares.items())


def layer_table(record: PruningRecord, checks: Checks | None = None) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the shares left out of each layer; no rows if none is known."""
    shares = record.shares
    if checks is not None and checks.router_weights:
        shares["router's weight, in validate,"] = dict(checks.router_weights)
    rows = [
        [str(layer), *(f"{100 * found[layer]:.1f} %" if layer in found else "" for found in shares.values())]
        for layer in record.kept.layers
    ]
    return ["layer", *(f"{what} left out" for what in shares)], rows if shares else []


def pruning_document(record: PruningRecord) -> dict[str, Any]:
    """Return how many experts are kept of how many, by whose scores, and the shares left out, as plain data."""
    found = {"kept": record.kept.num_experts, "of": record.num_source_experts, "chosen_by": record.scores}
    if record.left_out is None:
        return found
    return found | {"left_out": {str(layer): asdict(part) for layer, part in record.left_out.items()}}
