"""The card's section about memory: what weights and KV cache take, and which GPUs hold them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardNeeds:
    """A sentence, a table and a note, as they are shown."""

    summary: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def needs_section(needs: CardNeeds | None) -> str:
    """Return the section; empty if nothing is known."""
    if needs is None:
        return ""
    lines = [needs.columns, ("---", "---", *("---:" for _ in needs.columns[2:])), *needs.rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(["## Needs", needs.summary, *([table] if needs.rows else []), needs.note])
