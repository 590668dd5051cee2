"""The only file that imports rich. Data goes to stdout, everything else to stderr; `--json` prints data alone."""

import json
import os
import shlex
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from k2convert.errors import OutputError

_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)
PLAIN_LINE_SECONDS = 10.0


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


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        out = task.fields["bytes_out"] / task.elapsed if task.elapsed else 0.0
        rate = task.fields["fresh"] / task.elapsed if task.elapsed else 0.0
        return Text(f"in {rate / 1e9:.2f} GB/s  out {out / 1e9:.2f} GB/s")


class RunDisplay:
    """Progress of a long pass: a live bar on a terminal, a plain line every ten seconds elsewhere, or nothing."""

    def __init__(self, *, what: str, num_shards: int, finished: int, total_bytes: int, done_bytes: int, quiet: bool):
        self._lock = Lock()
        self._start = self._last = time.monotonic()
        self._num_shards, self._shards, self._tensors = num_shards, finished, 0
        self._total, self._done, self._fresh, self._out = total_bytes, done_bytes, 0, 0
        self._what, self._quiet = what, quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if not quiet and _err.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[shards]}/{task.fields[num_shards]} shards  {task.fields[tensors]:,} tensors"),
                _RateColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=_err,
            )

    def __enter__(self) -> "RunDisplay":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                self._what,
                total=self._total,
                completed=self._done,
                shards=self._shards,
                num_shards=self._num_shards,
                tensors=0,
                fresh=0,
                bytes_out=0,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self._quiet and kind is None and self._fresh:
            self._print_line()

    def advance(self, *, bytes_in: int, bytes_out: int, tensors: int, shard_finished: bool) -> None:
        """Add what was done since the last call; thread-safe."""
        with self._lock:
            self._fresh += bytes_in
            self._out += bytes_out
            self._tensors += tensors
            self._shards += shard_finished
            if self._bar is not None and self._task is not None:
                self._bar.update(
                    self._task,
                    completed=self._done + self._fresh,
                    shards=self._shards,
                    tensors=self._tensors,
                    fresh=self._fresh,
                    bytes_out=self._out,
                )
            elif not self._quiet and time.monotonic() - self._last >= PLAIN_LINE_SECONDS:
                self._print_line()

    def _print_line(self) -> None:
        self._last = time.monotonic()
        seconds = max(self._last - self._start, 1e-6)
        rate = self._fresh / seconds
        left = max(self._total - self._done - self._fresh, 0)
        eta = format_seconds(left / rate) if rate else "unknown"
        print_note(
            f"{self._what}: {self._shards}/{self._num_shards} shards, {self._tensors:,} tensors, "
            f"in {rate / 1e9:.2f} GB/s, out {self._out / seconds / 1e9:.2f} GB/s, ETA {eta}"
        )


class PassDisplay:
    """Progress of one pass over a folder's bytes, by bytes."""

    def __init__(self, *, what: str, total_bytes: int, quiet: bool) -> None:
        self._lock = Lock()
        self._start = self._last = time.monotonic()
        self._what, self._total, self._done, self._quiet = what, total_bytes, 0, quiet
        self._bar: Progress | None = None
        if not quiet and _err.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), _RateColumn(), TextColumn("ETA"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=_err)
            self._task = self._bar.add_task(what, total=total_bytes, fresh=0, bytes_out=0)

    def __enter__(self) -> "PassDisplay":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """Add bytes dealt with; thread-safe."""
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done, fresh=self._done)
            elif not self._quiet and now - self._last >= PLAIN_LINE_SECONDS:
                self._last = now
                rate = self._done / max(now - self._start, 1e-6)
                eta = format_seconds(max(self._total - self._done, 0) / rate) if rate else "unknown"
                done, total = format_bytes(self._done), format_bytes(self._total)
                print_note(f"{self._what}: {done} of {total}, {rate / 1e9:.2f} GB/s, ETA {eta}")


class LayerNotes:
    """Progress of reference layers: a line every ten seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def advance(self, layer: int, done: int, experts: int) -> None:
        """Say which expert of which layer has been computed, if the last word was a while ago."""
        if time.monotonic() - self._last >= PLAIN_LINE_SECONDS:
            self._last = time.monotonic()
            print_note(f"layer {layer}: {done}/{experts} experts computed")
