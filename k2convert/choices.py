"""The names of the two rules a weight can be converted by."""

from __future__ import annotations

from typing import Final, Literal, get_args

Rule = Literal["optimal", "plain"]
"""`optimal`: the best E4M3 scale of every block. `plain`: bit for bit the usual pipeline."""

RULES: Final[tuple[Rule, ...]] = get_args(Rule)
