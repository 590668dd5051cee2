"""The only file that imports rich. Data goes to stdout, everything else to stderr; `--json` prints data alone."""

import json
import os
import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from k2convert.errors import OutputError

_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def _on_stdout() -> Generator[None]:
    """Let what is printed within the block out at once; OutputError where there is no room for it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough
        raise
    except OSError as error:
        with Path(os.devnull).open("w") as nowhere:  # what is left in the buffer would fail again at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise OutputError(
            f"standard output: writing failed ({error.strerror}). What was done before is done."
        ) from None


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    with _on_stdout():
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)
) -> None:
    """A table on stdout; columns are right-aligned but for those in `left`."""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    with _on_stdout():
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


def print_line(text: str) -> None:
    """One line of result on stdout."""
    with _on_stdout():
        _out.print(Text(text))


def print_note(text: str) -> None:
    """One line for the person watching, on stderr."""
    _to_stderr(Text(text))


def _to_stderr(text: Text) -> None:
    with suppress(OSError):  # hours of work do not end because a log has no room
        _err.print(text)


def command(*words: object) -> str:
    """A command line to paste into a shell, every word quoted that needs it."""
    return shlex.join(map(str, words))


def own_command(*, without: str) -> str:
    """The command line this process was called with, but for one flag."""
    return command("k2convert", *(word for word in sys.argv[1:] if word != without))


def print_next(command: str) -> None:
    """The command that follows, on stderr."""
    _to_stderr(Text.assemble(("next: ", "dim"), command))


def print_error(message: str) -> None:
    """A refusal or failure, on stderr."""
    _to_stderr(Text.assemble(("error: ", "bold red"), message))


def format_bytes(count: float) -> str:
    """Decimal units, as disks and the Hub count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def format_seconds(seconds: float) -> str:
    """h:mm:ss."""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
