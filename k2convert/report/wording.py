"""Numbers as text, and the parts that page, report.md and model card are made of: figures, sections and tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_MOST_LISTED: Final = 12


class Figure(NamedTuple):
    """A headline figure, such as "22.62 dB", "SQNR", and a sentence on it."""

    value: str
    label: str
    detail: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text.

    words     the columns that are aligned at the left: they have words, the others numbers
    summary   the table is folded under it
    is_code   all but the first column are names and digests
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[int] = (0,)
    summary: str = ""
    is_code: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report."""

    title: str
    sentences: Sequence[str]
    tables: Sequence[Table] = ()


def percent(part: int, whole: int) -> str:
    """Return a share; "0 %" and "100 %" only if the share is exactly that, "" if there is no whole."""
    if not whole:
        return ""
    share = 100 * part / whole
    if part > 0 and share < 0.001:
        return "< 0.001 %"
    if part < whole and share > 99.999:
        return "> 99.999 %"
    digits = 0 if part in (0, whole) else 1 if 1 <= share <= 99 else 3
    return f"{share:.{digits}f} %"


def with_error(mean: float, error: float | None) -> str:
    """Return "0.01230 ± 0.00041", with two digits of a standard error; without one, three digits."""
    if not error:
        return f"{mean:.3g}"
    digits = 1 - math.floor(math.log10(error))
    if 0 <= digits <= 8 and abs(mean) < 1e6:
        return f"{mean:.{digits}f} ± {error:.{digits}f}"
    return f"{mean:.3g} ± {error:.2g}"


def joined(names: Sequence[str]) -> str:
    """Return "a, b and c", or "a, b and 7 more" for many; nothing for none."""
    if len(names) > _MOST_LISTED:
        return f"{', '.join(names[:_MOST_LISTED])} and {len(names) - _MOST_LISTED:,} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def last_part(path: object) -> str:
    """Return the name at the end of a path: a report is given to others, so it must not show local paths."""
    return str(path).rstrip("/").rsplit("/", 1)[-1]
