"""The refusals of typer, in its own form but in plain words."""

import io
import re
from typing import Any, Final

import typer

from k2convert.errors import visible

# typer has it from click, or from its own copy of click
UsageError: Final[type[Exception]] = typer.BadParameter.__bases__[0]

_SAME_THING: Final[dict[str, str]] = {
    **dict.fromkeys(("convert", "quantize", "resume"), "run"),
    **dict.fromkeys(("check", "verify"), "validate"),
    **dict.fromkeys(("info", "show"), "inspect"),
    **dict.fromkeys(("push", "upload"), "publish"),
}
"""Words that other tools have for a command, where the spelling does not give it away."""


def explain_usage(error: Any) -> str:
    """Return what to print for a UsageError: usage and message; nothing if it printed help itself."""
    shown = io.StringIO()
    error.show(file=shown)
    if "Error: " not in shown.getvalue():
        return shown.getvalue()
    *lines, message = shown.getvalue().rstrip("\n").split("Error: ", 1)
    message = " ".join(message.split()).replace(": Value error, ", ": ")
    missing = re.fullmatch(r"No such command '(\w+)'\.", message)
    if missing and missing[1] in _SAME_THING:
        message += f" Did you mean '{_SAME_THING[missing[1]]}'?"
    return f"{lines[0]}Error: {visible(message)}\n"
