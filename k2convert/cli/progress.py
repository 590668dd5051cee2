"""Progress of a running stage, on stderr: bars on a terminal, elsewhere a line with its time every ten seconds or so.

On a terminal every phase has a row; columns are left out until a row fits the width, so nothing wraps. Elsewhere the
first line comes within half a second, then every 10 s for two minutes, then every minute.
"""

import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from k2convert.cli import console
from k2convert.cli.console import format_rate, format_seconds
from k2convert.cli.interrupts import displays
from k2convert.cli.tally import LAYER_PHASES, Meter, Tally
from k2convert.errors import counted, format_bytes, visible
from k2convert.records.events import Extent

FIRST_LINE_SECONDS: Final = 0.5
PLAIN_LINE_SECONDS: Final = 10.0
LATER_LINE_SECONDS: Final = 60.0
SOON_SECONDS: Final = 120.0
KEEP_SECONDS: Final = 2.0  # how often the summary for `status` is kept
_TICK_SECONDS: Final = 0.25
_MAX_BAR: Final = 40
_MIN_BAR: Final = 8
_MAX_NAMES: Final = 3
_MANY: Final = 20


class Display:
    """Shows how far a stage is. Use it as a context manager: it gives the Events that the stage reports to."""

    def __init__(self, what: str, extent: Extent) -> None:
        """`what` names the stage in plain lines. With --quiet it shows nothing but still counts, for `status`."""
        self._quiet = console.Asked.quiet
        self._is_live = not self._quiet and console.ERRORS.is_terminal
        self.tally = Tally(extent, note=console.notifier())
        self.rows = Rows(self.tally)
        self._lines = _Lines(what, self.tally)
        self._live: Live | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> Tally:
        if self._is_live:
            self._live = Live(self.rows, console=console.ERRORS, refresh_per_second=4, transient=True)
            self._live.start()
        self._thread.start()
        displays.append(self._end)
        return self.tally

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        displays.remove(self._end)
        self._end(has_failed=kind is not None)

    def _end(self, *, has_failed: bool = True) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        if self._live is not None:
            with suppress(OSError):  # a terminal that is gone must not end the work
                self._live.stop()
                if self.tally.has_worked:
                    console.ERRORS.print(self.rows)
        elif not self._quiet and self.tally.has_worked and (not has_failed or self._lines.has_printed):
            self._lines.print_last()

    def _tick(self) -> None:
        """Print plain lines when they are due, and keep the summary for `status`, also while nothing is reported."""
        kept = time.monotonic()
        while not self._ended.wait(_TICK_SECONDS):
            if not self._quiet and self._live is None:
                self._lines.print_if_due()
            if time.monotonic() - kept >= KEEP_SECONDS:
                kept = time.monotonic()
                self.tally.keep()


@dataclass(slots=True)
class _Lines:
    what: str
    tally: Tally
    has_printed: bool = False
    printed_at: float = 0.0
    printed: str = ""  # without the names of shards, which no later line has

    def print_if_due(self) -> None:
        seconds = self.tally.seconds
        pause = LATER_LINE_SECONDS
        if seconds < SOON_SECONDS:
            pause = PLAIN_LINE_SECONDS
        due = FIRST_LINE_SECONDS
        if self.has_printed:
            due = self.printed_at + pause
        if seconds >= due:
            self.print_now()

    def print_now(self) -> None:
        self.has_printed = True
        self.printed_at = self.tally.seconds
        text = self.text()
        self.printed = text.partition(", finished ")[0]
        console.print_event(text)

    def print_last(self) -> None:
        """Print how far the stage came, unless the line before says the same."""
        text = self.text()
        if text != self.printed:
            console.print_event(text)

    def text(self) -> str:
        tally = self.tally
        parts = [_phase_text(phase, meter, tally) for phase, meter in tally.meters.items() if meter.total]
        names = tally.new_shards
        tally.new_shards = []
        more = ""
        if len(names) > _MAX_NAMES:
            more = f" and {len(names) - _MAX_NAMES} more"
        finished = ""
        if names:
            finished = f"finished {' '.join(names[:_MAX_NAMES])}{more}"
        parts += [_shards_text(tally), finished, _eta_text(tally)]
        what = "evaluate" if "evaluate" in tally.meters else self.what
        return f"{what}: {', '.join(filter(None, parts))}"


def _phase_text(phase: str, meter: Meter, tally: Tally) -> str:
    rates = _rate_text(phase, meter)
    name = phase if len(tally.meters) > 1 else ""
    if phase == "convert" and rates and (written := tally.written.rate):
        rates = f"in {rates}, out {format_rate(written)}"
    return " ".join(part for part in (name, _percent(meter), f"({_done_text(phase, meter)})", rates) if part)


def _percent(meter: Meter) -> str:
    """Return the share in percent; of many layers, which take long, with a decimal."""
    is_long = meter.layers is not None and len(meter.layers.costs) > _MANY
    if is_long and meter.share < 1:
        return f"{int(1000 * meter.share) / 10} %"
    return f"{int(100 * meter.share)} %"


def _done_text(phase: str, meter: Meter) -> str:
    if phase == "layers":
        return f"{meter.done:,} of {meter.total:,} experts"
    if phase in LAYER_PHASES:
        total = meter.total // meter.unit - (phase == "evaluate")  # its head is counted, but it is no layer
        return f"{min(meter.done // meter.unit, total)} of {total} layers"
    if phase == "ask":
        return f"{meter.done:,} of {meter.total:,} tokens"
    done = format_bytes(min(meter.done, meter.total)).split(" ")
    total = format_bytes(meter.total).split(" ")
    return f"{done[0] if done[1] == total[1] else ' '.join(done)} of {' '.join(total)}"


def _rate_text(phase: str, meter: Meter) -> str:
    rate = meter.rate
    if rate is None or meter.done >= meter.total:
        return ""
    if phase in LAYER_PHASES:
        return format_layer_rate(rate)
    if rate == 0:
        return "" if phase == "layers" else "stalled"
    if phase == "ask":
        return f"{rate:,.0f} tokens/s"
    if phase == "layers":
        return f"{rate:.1f} experts/s"
    return format_rate(rate)


def format_layer_rate(per_hour: float) -> str:
    return f"{per_hour:,.{0 if per_hour >= _MANY else 1}f} layers/hour"


def _shards_text(tally: Tally) -> str:
    if tally.num_shards:
        return f"{tally.shards} of {counted(tally.num_shards, 'shard')}"
    return ""


def _eta_text(tally: Tally) -> str:
    left = tally.seconds_left
    if left and round(left):
        return f"ETA {format_seconds(left)}"
    return ""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a terminal: one for each phase, and one for the whole."""

    tally: Tally

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tally = self.tally
        cells = [
            (phase, _percent(meter), _done_text(phase, meter), _rate_text(phase, meter))
            for phase, meter in tally.meters.items()
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        # Of phase, percent, amount and rate the least important go first, and so do those of the whole.
        choices = ([0, 1, 2, 3], [0, 1, 3], [0, 1])
        shown = next((c for c in choices if sum(widths[i] + 2 for i in c) + _MIN_BAR <= options.max_width), choices[-1])
        used = sum(widths[i] for i in shown) + 2 * len(shown)
        bar = min(options.max_width - used, _MAX_BAR)
        table = Table.grid(padding=(0, 2, 0, 0))
        for i in range(4):
            if i in shown:
                table.add_column(no_wrap=True, justify="left" if i == 0 else "right")
            if i == 0 and bar >= _MIN_BAR:
                table.add_column(no_wrap=True, width=bar)
        for row, meter in zip(cells, tally.meters.values(), strict=True):
            bars = [ProgressBar(total=1.0, completed=meter.share, width=bar)] if bar >= _MIN_BAR else []
            first, *rest = (Text(row[i]) for i in shown)
            table.add_row(first, *bars, *rest)
        yield table
        tensors = f"{tally.tensors:,} tensors" if tally.tensors else ""
        texts = (_shards_text(tally), _eta_text(tally), f"running for {format_seconds(tally.seconds)}", tensors)
        parts = list(filter(None, texts))
        while len(parts) > 1 and len(", ".join(parts)) > options.max_width:
            parts.pop()
        yield Text(", ".join(parts), no_wrap=True, overflow="crop")


def waiting(text: str) -> ExitStack:
    """Show what a command waits for, until the result is closed: a spinner, or one line after half a second."""
    shown = ExitStack()
    if console.Asked.quiet:
        return shown
    if console.ERRORS.is_terminal:
        status = Status(Text(visible(text), no_wrap=True, overflow="ellipsis"), console=console.ERRORS)
        status.start()
        stop = partial(_stop, status)
        displays.append(stop)
        shown.callback(stop)
        shown.callback(displays.remove, stop)
    else:
        timer = threading.Timer(FIRST_LINE_SECONDS, console.print_event, (text,))
        timer.daemon = True
        timer.start()
        shown.callback(timer.cancel)
    return shown


def _stop(status: Status) -> None:
    with suppress(OSError):
        status.stop()
