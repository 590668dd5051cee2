"""cli.progress."""

import time
from threading import Lock
from types import TracebackType

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from k2convert.cli.console import _err, format_bytes, format_seconds, print_note

PLAIN_LINE_SECONDS = 10.0


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
