"""Stderr of a command without its lines of progress: their number depends on how busy the machine is."""

import re

_STAMPED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")


def said(errors: str) -> str:
    """Return stderr without the lines that begin with a time."""
    return "".join(line for line in errors.splitlines(keepends=True) if not _STAMPED.match(line))
