"""Progress of a running stage: a bar on a terminal, a plain line every ten seconds elsewhere, nothing with --json."""

import time
from threading import Lock
from types import TracebackType
from typing import Final

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from k2convert.cli import console

PLAIN_LINE_SECONDS: Final = 10.0


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["rates"])


class Display:
    """Shows what a stage reports; implements records.events.Events. Use it as a context manager.

    `total_bytes` and `done_bytes` count bytes read. Shards are shown if `num_shards` is given.
    """

    def __init__(
        self,
        what: str,
        *,
        total_bytes: int,
        done_bytes: int = 0,
        num_shards: int = 0,
        finished_shards: int = 0,
        quiet: bool = False,
    ) -> None:
        self._what, self._quiet = what, quiet
        self._total, self._done = total_bytes, done_bytes
        self._num_shards, self._shards = num_shards, finished_shards
        self._read = self._written = self._tensors = 0
        self._lock = Lock()
        self._start = self._last = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if not quiet and console.errors_are_shown_live():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[counts]}"),
                _RateColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=console.error_console(),
            )

    def __enter__(self) -> "Display":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                self._what, total=self._total, completed=self._done, counts=self._counts(), rates=""
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._num_shards and kind is None and self._read:
            self._print_line()

    def note(self, text: str) -> None:
        """Print one line for the person watching."""
        console.print_note(text)

    def progress(self, *, bytes_in: int = 0, bytes_out: int = 0, tensors: int = 0) -> None:
        """Add what was done since the last call."""
        with self._lock:
            self._read += bytes_in
            self._written += bytes_out
            self._tensors += tensors
            self._show()

    def shard_finished(self, shard: str) -> None:  # noqa: ARG002 - only their number is shown
        """Count a shard."""
        with self._lock:
            self._shards += 1
            self._show()

    def experts_computed(self, layer: int, done: int, total: int) -> None:
        """Say how far a reference layer is, at most every ten seconds."""
        if not self._quiet and time.monotonic() - self._last >= PLAIN_LINE_SECONDS:
            self._last = time.monotonic()
            console.print_note(f"layer {layer}: {done}/{total} experts computed")

    def _show(self) -> None:
        if self._bar is not None and self._task is not None:
            done = self._done + self._read
            self._bar.update(self._task, completed=done, counts=self._counts(), rates=self._rates())
        elif time.monotonic() - self._last >= PLAIN_LINE_SECONDS:
            self._print_line()

    def _print_line(self) -> None:
        self._last = time.monotonic()
        if self._quiet:
            return
        rate = self._read / max(self._last - self._start, 1e-6)
        left = max(self._total - self._done - self._read, 0)
        eta = console.format_seconds(left / rate) if rate else "unknown"
        console.print_note(f"{self._what}: {self._counts()}, {self._rates()}, ETA {eta}")

    def _counts(self) -> str:
        if self._num_shards:
            return f"{self._shards}/{self._num_shards} shards, {self._tensors:,} tensors"
        return f"{console.format_bytes(self._done + self._read)} of {console.format_bytes(self._total)}"

    def _rates(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-6)
        read = f"{self._read / seconds / 1e9:.2f} GB/s"
        return f"in {read}, out {self._written / seconds / 1e9:.2f} GB/s" if self._num_shards else read
