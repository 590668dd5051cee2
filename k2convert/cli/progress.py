"""Progress of a running stage, on stderr: bars on a terminal, elsewhere a line with its time every ten seconds or so.

The first line comes within half a second, then one every 10 s for two minutes, then every minute. The ETA is by the
median of the last three shards: the stages of a shard take minutes and wait for each other, so the last seconds say
little. The first shard of a run, which fills the stages, does not count. Layers are timed as wholes, without the first:
it is often a small one, and the first steps of a layer say nothing of its end.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from statistics import median
from types import TracebackType
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, Task, TextColumn
from rich.status import Status
from rich.table import Column
from rich.text import Text

from k2convert.cli import console
from k2convert.cli.console import format_seconds
from k2convert.cli.interrupts import displays
from k2convert.errors import counted, format_bytes, visible
from k2convert.records.events import Events, Extent, Keep, Phase

LAYER_PHASES: Final[tuple[Phase, ...]] = ("calibrate", "evaluate")  # phases that count the tokens of every layer
BYTE_PHASES: Final[tuple[Phase, ...]] = ("convert", "copy", "check")  # of which a stage has one: bytes that are read
FIRST_LINE_SECONDS: Final = 0.5
PLAIN_LINE_SECONDS: Final = 10.0
LATER_LINE_SECONDS: Final = 60.0
SOON_SECONDS: Final = 120.0
KEEP_SECONDS: Final = 2.0  # between two summaries for `status`
RATE_SECONDS: Final = 180.0  # a rate is that of the last 1,000 steps, none of which is older than this
STALLED_SECONDS: Final = 20.0
PACE_SHARDS: Final = 3  # by whose pace the rest is reckoned
MIN_ETA_SECONDS: Final = 4.0  # the first second of a stage is not like the others
_TICK_SECONDS: Final = 0.25
_MARKS: Final = 32  # of a shard: what is kept of its steps
_MANY: Final = 20
_WIDE: Final = 80  # columns, from which on a row has its amounts and a long bar


class Meter:
    """One kind of work of a stage: bytes, experts, or the tokens of every layer.

    A layer has `unit` tokens, a shard about `unit` bytes; 1 for work without parts.
    """

    def __init__(self, bars: Progress, phase: str, total: int, done: int, *, unit: int = 1) -> None:
        bars.add_task(phase, total=total, completed=done, meter=self)
        self._bars = bars
        self.task: Task = bars.tasks[-1]
        self.phase = phase
        self.total = total
        self.done = done
        self.unit = unit
        self.is_moving = False  # after the first new work
        self.waits = ""  # what it does or waits for, until it counts again
        self._began_at: float | None = None
        self._last_at = 0.0  # the last step, or the end of the last layer
        self._steps = 0
        self._new = 0  # work since it began
        self._shards = deque[tuple[float, int]](maxlen=PACE_SHARDS + 1)  # when the last ended, at how much new work
        self._marks = deque[tuple[float, int]]()  # the same of the steps of one shard

    @property
    def has_layers(self) -> bool:
        return self.phase in LAYER_PHASES

    def start(self) -> None:
        """Begin to measure now, not with the first work; layers begin at the end of the first."""
        if self._began_at is None and not self.has_layers:
            self._began_at = self._last_at = self.task.get_time()

    def add(self, amount: int, *, is_new: bool = True) -> None:
        """Count work, less than 0 for an upload that failed. Work that is not new raises `done`, but no rate."""
        self.waits = ""
        before = self.done // self.unit
        self.done += amount
        if not is_new:
            self.task.completed += amount
            return
        self._bars.advance(self.task.id, amount)
        self.is_moving = True
        steps = self.done // self.unit - before if self.has_layers else amount
        if not steps:
            return
        self._last_at = self.task.get_time()
        if self._began_at is None:
            self._began_at = self._last_at
            return
        self._steps += 1
        ended = self._new // self.unit
        self._new += steps
        if self.unit == 1 or self.has_layers:
            return
        for past in (self._shards, self._marks):
            while past and past[-1][1] > self._new:
                past.pop()
        mark = (self._last_at, self._new)
        if self._new // self.unit > ended:
            self._shards.append(mark)
        if not self._marks or self._new - self._marks[-1][1] >= self.unit // _MARKS:
            self._marks.append(mark)
            while self._new - self._marks[0][1] > self.unit:
                self._marks.popleft()

    @property
    def rate(self) -> float | None:
        """Work a second, or layers an hour; None if it has stopped or is not known."""
        if self._began_at is None or not self._steps:
            return None
        elapsed = self._last_at - self._began_at
        if self.has_layers:
            return 3600 * self._new / max(elapsed, 1.0)
        if self.task.get_time() - self._last_at > max(STALLED_SECONDS, 3 * elapsed / self._steps):
            return None
        return self.task.speed

    @property
    def share(self) -> float:
        """Share that is done: 0.0 to 1.0, and 1.0 only when all is done."""
        return min(self.done / self.total, 1.0) if self.total else 1.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest takes at the pace of the last shards, or of all work where there are too few of them.

        0.0 when done, None if the pace is not known.
        """
        if self.done >= self.total:
            return 0.0
        if self._began_at is None or not self._new:
            return None
        now = self.task.get_time()
        elapsed = self._last_at - self._began_at
        waited = now - self._last_at
        if elapsed + waited < MIN_ETA_SECONDS or (waited > max(STALLED_SECONDS, elapsed) and not self.has_layers):
            return None
        if len(self._shards) > 1:
            return self._left_by_shards(now)
        left = self.total - self.done
        if self.has_layers:
            left = self.total // self.unit - self.done // self.unit
        pace = elapsed / self._new
        return max(left * pace - min(waited, pace if self.has_layers else waited), 0.0)

    def _left_by_shards(self, now: float) -> float:
        """Return the seconds that the rest takes by the median: an outage makes one slow, the first fills the stages.

        Most work of a shard comes at once, then it waits. So the end is that of the step that promises the earliest,
        but a shard takes no longer than the pace.
        """
        pace = median((at - before) / (new - old) for (before, old), (at, new) in pairwise(self._shards))
        end = self.total - self.done + self._new
        promised = min(at + pace * (end - new) for at, new in (*self._marks, (self._last_at, self._new)))
        return max(promised - now, pace * (end - self._new - self.unit), 0.0)

    @property
    def percent(self) -> str:
        return f"{int(100 * self.share)} %"

    @property
    def amount(self) -> str:
        if self.phase == "layers":
            return f"{self.done:,} of {self.total:,} experts"
        if self.has_layers:
            total = self.total // self.unit - (self.phase == "evaluate")  # its head is counted, but it is no layer
            return f"{min(self.done // self.unit, total)} of {total} layers"
        done = format_bytes(min(self.done, self.total)).split(" ")
        whole = format_bytes(self.total).split(" ")
        return f"{done[0] if done[1] == whole[1] else ' '.join(done)} of {' '.join(whole)}"

    @property
    def speed(self) -> str:
        """The rate in words, or what it waits for; empty if neither is known, or of no interest any more."""
        if self.waits:
            return self.waits
        rate = self.rate
        if rate is None or self.done >= self.total:
            return ""
        if self.has_layers:
            return format_layer_rate(rate)
        if self.phase == "layers":
            return f"{rate:.1f} experts/s"
        return f"{format_bytes(rate)}/s"


def format_layer_rate(per_hour: float) -> str:
    return f"{per_hour:,.{0 if per_hour >= _MANY else 1}f} layers/hour"


class Display(Events):
    """Counts what a stage reports, and shows how far it is while it is used as a context manager."""

    def __init__(
        self,
        extent: Extent,
        *,
        clock: Callable[[], float] = time.monotonic,
        screen: Console = console.ERRORS,
    ) -> None:
        """With --quiet it shows nothing but still counts, for `status`."""
        self._note = console.notifier()
        self._clock = clock
        self._is_quiet = console.Output.quiet
        self._live: Live | None = None
        self._printed_at: float | None = None
        self._printed = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._keep: Keep | None = None
        self._lock = threading.Lock()
        self._start = clock()
        self._screen = screen
        self._bars = _bars(screen, clock)
        self.tensors = 0
        self._set(extent)

    def _set(self, extent: Extent) -> None:
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        self.meters: dict[str, Meter] = {}
        for phase, (total, done) in extent.phases.items():
            unit = 1
            if phase in LAYER_PHASES:
                unit = extent.layer_tokens
            elif extent.shards:
                unit = max(total // extent.shards, 1)
            self.meters[phase] = Meter(self._bars, phase, total, done, unit=unit)
        if extent.num_experts:
            self.meters["layers"] = Meter(self._bars, "layers", extent.num_experts, 0)
        self.num_shards = extent.shards
        self.shards = extent.finished_shards

    def note(self, text: str) -> None:
        self._note(text)

    def begun(self, extent: Extent, *, keep: Keep | None = None) -> None:
        with self._lock:
            self._set(extent)
            self._keep = keep
            next(iter(self.meters.values())).start()
        self.keep()

    def progress(self, *, bytes_in: int = 0, bytes_out: int = 0, tensors: int = 0) -> None:  # noqa: ARG002
        with self._lock:
            for phase in BYTE_PHASES:
                self._add(phase, bytes_in)
            self.tensors += tensors

    def transferred(self, *, downloaded: int = 0, uploaded: int = 0, is_new: bool = True) -> None:
        with self._lock:
            self._add("download", downloaded, is_new=is_new)
            self._add("upload", uploaded, is_new=is_new)

    def waits(self, phase: str, reason: str) -> None:
        with self._lock:
            if phase in self.meters:
                self.meters[phase].waits = reason

    def _add(self, phase: str, amount: int, *, is_new: bool = True) -> None:
        if amount and phase in self.meters:
            self.meters[phase].add(amount, is_new=is_new)

    def shard_finished(self, shard: str) -> None:  # noqa: ARG002
        with self._lock:
            self.shards += 1

    def experts_computed(self, layer: int, done: int, total: int) -> None:  # noqa: ARG002 - they come in order
        with self._lock:
            if "layers" in self.meters:
                self.meters["layers"].start()
                self._add("layers", 1)

    def tokens_computed(self, tokens: int) -> None:
        with self._lock:
            for phase in LAYER_PHASES:
                self._add(phase, tokens)

    @property
    def has_worked(self) -> bool:
        return self.tensors > 0 or any(meter.is_moving for meter in self.meters.values())

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    @property
    def seconds_left(self) -> float | None:
        """The ETA: of a job's slowest phase, or the sum for a validation, without what waits for a layer pass."""
        with self._lock:
            meters = list(self.meters.values())
            is_in_layers = any(meter.has_layers and meter.done < meter.total for meter in meters)
            left = [meter.seconds_left for meter in meters if meter.has_layers or not is_in_layers]
        known = [seconds for seconds in left if seconds is not None]
        if len(known) < len(left) or not any(meter.done for meter in meters):
            return None
        if "layers" in self.meters:
            return sum(known)
        return max(known)

    def keep(self) -> None:
        """Store a summary for other processes, if the stage has a place for it."""
        if self._keep is not None:
            self._keep(json.dumps(self.summary()))

    def summary(self) -> dict[str, Any]:
        """Return how far the stage is, as `status` reads it."""
        phases: dict[str, dict[str, Any]] = {}
        with self._lock:
            for phase, meter in self.meters.items():
                rate = meter.rate
                if rate is not None:
                    rate = round(rate, 1 if meter.has_layers else None)
                phases[phase] = {"done": meter.done, "total": meter.total, "rate": rate}
                if meter.has_layers:
                    phases[phase]["unit"] = meter.unit
        left = self.seconds_left
        return {
            "shards": self.num_shards,
            "finished_shards": self.shards,
            "phases": phases,
            "seconds": round(self.seconds),
            "seconds_left": None if left is None else round(left),
        }

    def line(self) -> str:
        """Return a line of a log: every phase, shards and the ETA."""
        meters = [meter for meter in self.meters.values() if meter.total]
        parts = [f"{meter.phase}: {meter.percent} ({meter.amount}) {meter.speed}".rstrip() for meter in meters]
        parts += [self._shards_text(), self._eta_text()]
        return ", ".join(filter(None, parts))

    def _shards_text(self) -> str:
        return f"{self.shards} of {counted(self.num_shards, 'shard')}" if self.num_shards else ""

    def _eta_text(self) -> str:
        left = self.seconds_left
        return f"ETA {format_seconds(left)}" if left and round(left) else ""

    def rows(self) -> Group:
        """Return the rows of a terminal: one for each phase, and one for the whole."""
        tensors = f"{self.tensors:,} tensors" if self.tensors else ""
        texts = (self._shards_text(), self._eta_text(), f"running for {format_seconds(self.seconds)}", tensors)
        parts = list(filter(None, texts))
        while len(parts) > 1 and len(", ".join(parts)) > self._screen.width:
            parts.pop()
        whole = Text(", ".join(parts), no_wrap=True, overflow="crop")
        return Group(self._bars.make_tasks_table(self._bars.tasks), whole)

    def __enter__(self) -> "Display":
        if not self._is_quiet and self._screen.is_terminal:
            self._live = Live(console=self._screen, refresh_per_second=4, transient=True, get_renderable=self.rows)
            self._live.start()
        self._thread.start()
        displays.append(self._end)
        return self

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
                if self.has_worked:
                    self._screen.print(self.rows())
            return
        is_shown = not self._is_quiet and self.has_worked and (not has_failed or self._printed_at is not None)
        if is_shown and self.line() != self._printed:
            console.print_event(self.line())

    def _tick(self) -> None:
        """Print plain lines when they are due, and keep the summary for `status`, also while nothing is reported."""
        kept_at = time.monotonic()
        while not self._ended.wait(_TICK_SECONDS):
            if not self._is_quiet and self._live is None and self.seconds >= self._due():
                self._printed_at = self.seconds
                self._printed = self.line()
                console.print_event(self._printed)
            if time.monotonic() - kept_at >= KEEP_SECONDS:
                kept_at = time.monotonic()
                self.keep()

    def _due(self) -> float:
        """Return when the next line is due, in seconds since the start."""
        if self._printed_at is None:
            return FIRST_LINE_SECONDS
        return self._printed_at + (PLAIN_LINE_SECONDS if self.seconds < SOON_SECONDS else LATER_LINE_SECONDS)


def _bars(screen: Console, clock: Callable[[], float]) -> Progress:
    """Return rich's tasks and columns, which Display shows; a narrow terminal has no amounts."""
    is_wide = screen.width >= _WIDE
    names = ("phase", "percent", *(("amount",) if is_wide else ()), "speed")
    texts = {
        name: TextColumn(
            f"{{task.fields[meter].{name}}}",
            markup=False,
            table_column=Column(no_wrap=True, justify="left" if name == "phase" else "right"),
        )
        for name in names
    }
    bar = BarColumn(24 if is_wide else 8)
    first, *others = texts.values()
    return Progress(first, bar, *others, console=screen, speed_estimate_period=RATE_SECONDS, get_time=clock)


def waiting(text: str) -> ExitStack:
    """Show what a command waits for, until the result is closed: a spinner, or one line after half a second."""
    shown = ExitStack()
    if console.Output.quiet:
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
