"""The part of the model card about pruned experts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from k2convert.checkpoint.names import LEDGER_NAME

_REAP = re.compile(r"\bREAP\b")


@dataclass(frozen=True, slots=True)
class CardPruning:
    """How many experts of each layer are kept, of how many, and in one phrase whose scores chose them."""

    num_kept: int
    num_experts: int
    scores: str | None
    warning: str
    """What is known of how much pruning costs."""
    left_out: tuple[str, ...]
    """Sentences on the shares that were left out."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The shares of each layer; no rows if they are not known."""


def pruning_tags(pruning: CardPruning | None) -> tuple[str, ...]:
    """Return tags for the Hub. The ecosystem's word `reap` is for REAP's scores only."""
    if pruning is None:
        return ()
    return ("pruned", "reap") if pruning.scores is not None and _REAP.search(pruning.scores) else ("pruned",)


def described_base(base: str, pruning: CardPruning | None) -> str:
    """Return how the card's first sentence begins."""
    if pruning is None:
        return f"{base} with"
    return f"{base} with {pruning.num_kept} of its {pruning.num_experts} experts per layer, and with"


def pruning_section(pruning: CardPruning | None) -> str:
    """Return the section about the experts that were left out; empty for a result with all experts."""
    if pruning is None:
        return ""
    chosen = f"chosen by {_plain(pruning.scores)}" if pruning.scores else "the list does not say by whose scores"
    left_out = "".join(f"- {sentence.removesuffix('.')}\n" for sentence in pruning.left_out)
    return f"""
## What was pruned

- Kept: {pruning.num_kept} of {pruning.num_experts} routed experts in each layer, {chosen}. The others were left out
{left_out}- The kept experts are numbered 0 to {pruning.num_kept - 1}, in the source's order. Routers have their rows
- Nothing was trained afterwards. `{LEDGER_NAME}` lists the kept experts by their numbers in the source

**Measure it before you use it.** {pruning.warning}
{_by_layer(pruning)}"""


def _by_layer(pruning: CardPruning) -> str:
    if not pruning.rows:
        return ""
    lines = (" | ".join(cells) for cells in (pruning.columns, ["---"] * len(pruning.columns), *pruning.rows))
    table = "\n".join(f"| {line} |" for line in lines)
    return f"\n<details><summary>Left out by layer</summary>\n\n{table}\n\n</details>\n"


def size_note(pruning: CardPruning | None) -> str:
    """Return the sentence that compares the result's size with the source's."""
    if pruning is None:
        return "It is not smaller than the INT4 source: both take 4.5 bits for each converted weight."
    return (
        f"It is smaller than the INT4 source only by the {pruning.num_experts - pruning.num_kept} of "
        f"{pruning.num_experts} experts per layer that were left out: both take 4.5 bits for each converted weight."
    )


def _plain(text: str) -> str:
    """Return text of a ledger as Markdown shows it unchanged."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", text).replace(r"\<", "&lt;").replace(r"\&", "&amp;")
