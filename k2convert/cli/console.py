"""Output: data on stdout, everything else on stderr. Only this module and `progress` import rich.

A command hands its result to `show`: with --json that prints a document, otherwise tables and lines.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from k2convert.errors import OutputError, visible
from k2convert.records.command import shell_line

_PIPE_WIDTH: Final = 160
_RETRY: Final = re.compile(r"; trying again in \d+ s$")
_RETRY_LINE_SECONDS: Final = 60.0
_BETWEEN: Final = 3  # a line and its blanks between two columns
_MIN_TEXT_WIDTH: Final = 12  # a column of text may wrap down to this, or to its longest word
_LONGEST_WORD: Final = 40  # a longer word, such as the path of a file, may be broken
_VERDICT_STYLES: Final = {"pass": "green", "warn": "yellow", "fail": "bold red", "skipped": "yellow", "CHANGED": "red"}

_JSON_CONTROLS: Final = {
    code: f"\\u{code:04x}" for code in range(0x7F, 0x206A) if visible(chr(code)) != chr(code)
}  # JSON itself escapes those below

_out = Console(highlight=False, soft_wrap=True)
ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)


class Output:
    """Options of the running command: `json` for documents on stdout, `quiet` for no progress on stderr."""

    json = False
    quiet = False


def set_output(*, json: bool, quiet: bool = False) -> None:
    """Take the options of the running command. A verb does this first."""
    Output.json = json
    Output.quiet = quiet


def show(result: object, *views: str | Callable[[], object]) -> None:
    """Print a result: as plain data with --json, otherwise its views, which are lines and functions that print."""
    if Output.json:
        from k2convert.records.document import shown

        document = shown(result)
        accepts_all = (sys.stdout.encoding or "").lower().startswith("utf")
        with _on_stdout():
            sys.stdout.write(
                json.dumps(document, indent=2, ensure_ascii=not accepts_all).translate(_JSON_CONTROLS) + "\n"
            )
        return
    for view in views:
        if isinstance(view, str):
            print_line(view)
        else:
            view()


def escaped(text: str, style: str = "") -> Text:
    """Return a text as the console prints it: as it is, without markup, its control characters as escapes."""
    return Text(visible(text), style=style)


@contextmanager
def _on_stdout() -> Generator[None]:
    """Flush stdout on exit; raise OutputError if the write fails."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe
        raise
    except OSError as error:
        with Path(os.devnull).open("w") as nowhere:  # the rest of the buffer would fail again at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise OutputError(
            f"standard output: writing failed ({error.strerror}). The work done before this is complete."
        ) from None


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)
) -> None:
    """Print a table on stdout. Columns in `left` are left-aligned and may wrap between words.

    No cell is ever cut: if wrapping is not enough, each row becomes a block of lines "heading: cell".
    """
    cells = [[escaped(cell, _VERDICT_STYLES.get(cell, "")) for cell in row] for row in rows]
    least = [_least_width([row[i] for row in cells], column, i in left) for i, column in enumerate(columns)]
    needed = sum(least) + _BETWEEN * (len(columns) - 1)
    is_terminal = sys.stdout.isatty()
    out = Console(highlight=False, width=None if is_terminal else max(_PIPE_WIDTH, needed))
    table = _table(columns, cells, least, left, out.width) if needed <= out.width else _blocks(columns, cells)
    with _on_stdout():
        out.print(escaped(title, "italic"), soft_wrap=not is_terminal)
        out.print(table)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Text]], least: Sequence[int], left: Sequence[int], width: int
) -> Table:
    """Return a table whose columns are as wide as there is room for, the widest being narrowed first."""
    natural = [
        max(cell_len(text) for text in (column, *(row[i].plain for row in rows))) for i, column in enumerate(columns)
    ]
    room = width - _BETWEEN * (len(columns) - 1)
    widths = natural
    for limit in range(max(natural), 0, -1):
        widths = [max(few, min(many, limit)) for few, many in zip(least, natural, strict=True)]
        if sum(widths) <= room:
            break
    table = Table(show_edge=False, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right", overflow="fold", width=widths[i])
    for row in rows:
        table.add_row(*row)
    return table


def _blocks(columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> Group:
    """Return each row as a block: its first cell, and the others with their headings. Empty cells are left out."""
    lines: list[RenderableType] = []
    for row in rows:
        for index, (column, cell) in enumerate(zip(columns, row, strict=True)):
            line = Text(f"{column}: " if column else "", overflow="fold").append_text(cell)
            if not index:
                lines.append(line)
            elif cell:
                lines.append(Padding(line, (0, 0, 0, 2), expand=False))
    return Group(*lines)


def _least_width(cells: Sequence[Text], column: str, may_wrap: bool) -> int:
    """Return the least width of a column: of its longest cell, or of a part of it, and of every word of its title."""
    longest = max((cell.cell_len for cell in cells), default=0)
    if may_wrap:
        words = (cell_len(word) for cell in cells for word in cell.plain.split())
        longest = min(longest, max(_MIN_TEXT_WIDTH, min(max(words, default=0), _LONGEST_WORD)))
    return max(longest, *map(cell_len, column.split()), 1)


def print_line(text: str) -> None:
    """Print one line of result: on stdout, where it wraps between words on a terminal; on stderr with --json."""
    if Output.json:
        print_note(text)
        return
    with _on_stdout():
        _out.print(escaped(text), soft_wrap=not _out.is_terminal)


def print_markdown(text: str) -> None:
    """Print a page of Markdown on stdout: rendered in a pager on a terminal, as it is into a pipe."""
    with _on_stdout():
        if not _out.is_terminal:
            sys.stdout.write(text)
            return
        from rich.markdown import Markdown, TableElement  # only this needs them, and they are slow to load

        class WholeTable(TableElement):  # rich's own cuts words that are longer than their column
            def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
                for table in super().__rich_console__(console, options):
                    _keep_words_whole(cast(Table, table), console, options.max_width)
                    yield table

        class Page(Markdown):
            elements = Markdown.elements | {"table_open": WholeTable}

        os.environ.setdefault("LESS", "FRX")  # as git does: colors, and no waiting for a page that fits the screen
        with _out.pager(styles=True):
            _out.print(Page(text, code_theme="ansi_dark", hyperlinks=False), soft_wrap=False)


def _keep_words_whole(table: Table, console: Console, width: int) -> None:
    """Do not wrap columns of single words if the others have room beside them; no cell is ever cut."""
    whole = [column for column in table.columns if all(" " not in str(cell).strip() for cell in column.cells)]
    needed = sum(max(console.measure(cell).maximum for cell in column.cells) for column in whole if any(column.cells))
    room = width - _MIN_TEXT_WIDTH * (len(table.columns) - len(whole)) - _BETWEEN * len(table.columns)
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = column in whole and needed <= room


def print_verdict(subject: str, more: str = "", *, passed: bool) -> None:
    style = _VERDICT_STYLES["pass" if passed else "fail"]
    with _on_stdout():
        _out.print(Text.assemble(escaped(f"{subject}: "), ("passed" if passed else "FAILED", style), more))


def print_note(text: str) -> None:
    """Print one line for the person watching on stderr. On a terminal it wraps between words."""
    _to_stderr(escaped(text))


def print_event(text: str) -> None:
    """Print one line about a running stage on stderr, with its time in UTC unless on a terminal; not with --quiet."""
    if not Output.quiet:
        print_note(text if ERRORS.is_terminal else f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {text}")


def notifier() -> Callable[[str], None]:
    """Return the printer of lines about a running stage; of those that announce a retry, it prints one a minute."""
    last = -math.inf

    def notify(line: str) -> None:
        nonlocal last
        if _RETRY.search(line):  # several connections fail together
            now = time.monotonic()
            if now - last <= _RETRY_LINE_SECONDS:
                return
            last = now
        print_event(line)

    return notify


def _to_stderr(text: Text, *, is_copied: bool = False) -> None:
    with suppress(OSError):  # a full log must not end hours of work
        ERRORS.print(text, soft_wrap=is_copied or not ERRORS.is_terminal)


def command(*words: object) -> str:
    return shell_line(map(str, words))


def own_command() -> str:
    """Return the command line of this process without --dry-run."""
    return command("k2convert", *(word for word in sys.argv[1:] if word != "--dry-run"))


def print_next(command: str) -> None:
    """Print the next command to run on stderr, in one line that can be copied; not with --json."""
    if Output.json:
        return
    _to_stderr(Text.assemble(("next: ", "dim"), escaped(command)), is_copied=True)


def print_error(message: str) -> None:
    _to_stderr(Text.assemble(("error: ", "bold red"), escaped(message)))


def format_duration(seconds: float) -> str:
    """Format how long something took: 12.3 s, or h:mm:ss from a minute on."""
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)


def format_seconds(seconds: float) -> str:
    """Format a duration as h:mm:ss."""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
