"""Progress of a running stage: counts by phase, rates over the last seconds, and an ETA when there is one.

A layer pass counts the operations of layers, and how long whole layers took: the first steps of a layer say nothing of
the rest.

A rate is measured over the last WINDOW_SECONDS. Work that arrives in large lumps, such as whole shards, is measured
over the last three lumps. Without new work for that long the rate is 0. The ETA is by all new work since it began:
the stages of a shard take minutes and wait for each other, so the last seconds say little.
"""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

from k2convert.records.events import Extent, Keep, Phase

WINDOW_SECONDS: Final = 20.0
MIN_SECONDS: Final = 1.0  # there is no rate before this much time was measured
MIN_ETA_SECONDS: Final = 4.0  # the first second of a stage is not like the others
LAYER_PHASES: Final[tuple[Phase, ...]] = ("calibrate", "evaluate")  # phases that count the tokens of every layer
BYTE_PHASES: Final[tuple[Phase, ...]] = ("convert", "copy", "check")  # of which a stage has one: bytes that are read
_LUMPS: Final = 3
_PACE_LAYERS: Final = 8  # the last ones, by which the rest is judged
_SAMPLE_SECONDS: Final = 0.25  # work within this time counts as one sample


@dataclass(slots=True)
class Meter:
    """Counts one kind of work in bytes (or experts, or tokens of every layer, of which a layer has `unit`)."""

    total: int
    done: int = 0
    clock: Callable[[], float] = time.monotonic  # seconds
    unit: int = 1
    can_wait: bool = False  # for other work: it is not stalled when it stops
    is_moving: bool = False  # after the first new work
    layers: "Layers | None" = None
    _samples: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    _began_at: float | None = None
    _new: int = 0  # work since then

    def add(self, amount: int, *, is_new: bool = True) -> None:
        """Count work. Work that is not new raises `done`, but no rate."""
        now = self.clock()
        self.done += amount
        if not is_new:
            self._samples = deque((at, done + amount) for at, done in self._samples)
            return
        self.is_moving = True
        if self._began_at is None:
            self._began_at = now
        else:
            self._new += amount
        if self.layers is not None:
            self.layers.reach(self.done / self.unit, now)
        if len(self._samples) > 1 and now - self._samples[-2][0] < _SAMPLE_SECONDS:
            self._samples.pop()
        self._samples.append((now, self.done))  # the first: when this work began is not known
        self._drop_old(now)

    def _drop_old(self, now: float) -> None:
        while len(self._samples) > _LUMPS + 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()

    def start(self) -> None:
        """Begin to measure now, not with the first work."""
        if self._began_at is None:
            self._began_at = self.clock()
        if not self._samples:
            self._samples.append((self.clock(), self.done))
        if self.layers is not None:
            self.layers.reach(self.done / self.unit, self.clock())

    @property
    def rate(self) -> float | None:
        """Work a second over the window, or layers an hour; 0.0 if it has stopped, None if it waits or is not known."""
        if self.layers is not None:
            return self.layers.per_hour
        now = self.clock()
        self._drop_old(now)
        if len(self._samples) < 2 or now - self._samples[0][0] < MIN_SECONDS:
            return None
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        gap = (last_at - first_at) / (len(self._samples) - 1)
        if now - last_at > max(WINDOW_SECONDS, _LUMPS * gap):
            return None if self.can_wait else 0.0
        return (last - first) / (now - first_at)

    @property
    def share(self) -> float:
        """Share that is done: 0.0 to 1.0, and 1.0 only when all is done."""
        if self.layers is not None and self.done < self.total:
            return self.layers.share(self.done / self.unit)
        if self.total:
            return min(self.done / self.total, 1.0)
        return 1.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest takes at the mean pace since it began; 0.0 when done, None if it stands still."""
        if self.done >= self.total:
            return 0.0
        now = self.clock()
        if self.layers is not None:
            return self.layers.seconds_left(now)
        if self._began_at is None or not self._new or now - self._began_at < MIN_ETA_SECONDS:
            return None
        last_at = self._samples[-1][0]
        if now - last_at > max(WINDOW_SECONDS, last_at - self._began_at):
            return None
        pace = (last_at - self._began_at) / self._new
        return max(pace * (self.total - self.done) - (now - last_at), 0.0)


@dataclass(slots=True)
class Layers:
    """When each layer was done, and the `costs` of each; the head of an evaluation is the last."""

    costs: tuple[float, ...]
    _ends: deque[tuple[float, int]] = field(default_factory=lambda: deque[tuple[float, int]](maxlen=_PACE_LAYERS + 1))

    def reach(self, position: float, now: float) -> None:
        """Take how far the layer pass is: the first call begins it."""
        layer = int(position)
        if not self._ends or layer > self._ends[-1][1]:
            self._ends.append((now, layer))

    def share(self, position: float) -> float:
        """Return the part of the operations that is done."""
        layer = int(position)
        done = sum(self.costs[:layer]) + (position - layer) * sum(self.costs[layer : layer + 1])
        return done / sum(self.costs)

    @property
    def per_hour(self) -> float | None:
        """Layers an hour; None before one was done."""
        if len(self._ends) < 2:
            return None
        (first_at, first), (last_at, last) = self._ends[0], self._ends[-1]
        return 3600 * (last - first) / max(last_at - first_at, MIN_SECONDS)

    def seconds_left(self, now: float) -> float | None:
        """Return how long the rest takes; None before a layer was done that has about as much to do as most have."""
        if len(self._ends) < 2:
            return None
        (first_at, first), (last_at, last) = self._ends[0], self._ends[-1]
        measured = self.costs[first:last]
        if max(measured) < sorted(self.costs)[len(self.costs) // 2] / 2:
            return None
        pace = (last_at - first_at) / sum(measured)
        own = max(pace * self.costs[last] - (now - last_at), 0.0)
        return own + pace * sum(self.costs[last + 1 :])


class Tally:
    """Counts what a stage reports; implements records.events.Events. `note` takes lines for the person watching."""

    def __init__(
        self, extent: Extent, *, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._note = note
        self._clock = clock
        self._keep: Keep | None = None
        self._lock = Lock()
        self._start = clock()
        self.written = Meter(0, clock=clock)
        self.tensors = 0
        self.new_shards: list[str] = []
        self._set(extent)

    def _set(self, extent: Extent) -> None:
        can_wait = any(layer_pass in extent.phases for layer_pass in LAYER_PHASES)
        self.meters: dict[Phase, Meter] = {}
        for phase, (total, done) in extent.phases.items():
            meter = Meter(total, done, self._clock, can_wait=can_wait)
            if phase in LAYER_PHASES:
                meter.unit = extent.layer_tokens
                meter.can_wait = False
                meter.layers = Layers(extent.layer_costs or (1.0,) * (total // meter.unit))
            self.meters[phase] = meter
        self.num_shards = extent.shards
        self.shards = extent.finished_shards
        if extent.num_experts:
            self.meters["layers"] = Meter(extent.num_experts, 0, self._clock)

    def note(self, text: str) -> None:
        self._note(text)

    def begun(self, extent: Extent, *, keep: Keep | None = None) -> None:
        with self._lock:
            self._set(extent)
            self._keep = keep
            self.new_shards.clear()
            next(iter(self.meters.values())).start()
        self.keep()

    def progress(self, *, bytes_in: int = 0, bytes_out: int = 0, tensors: int = 0) -> None:
        with self._lock:
            for phase in BYTE_PHASES:
                self._count(phase, bytes_in)
            self.written.add(bytes_out)
            self.tensors += tensors

    def transferred(self, *, downloaded: int = 0, uploaded: int = 0, is_new: bool = True) -> None:
        with self._lock:
            if downloaded:
                self._count("download", downloaded, is_new=is_new)
            if uploaded:
                self._count("upload", uploaded, is_new=is_new)

    def _count(self, phase: Phase, amount: int, *, is_new: bool = True) -> None:
        if phase in self.meters:
            self.meters[phase].add(amount, is_new=is_new)

    def shard_finished(self, shard: str) -> None:
        with self._lock:
            self.shards += 1
            self.new_shards.append(shard)

    def experts_computed(self, layer: int, done: int, total: int) -> None:  # noqa: ARG002 - they come in order
        with self._lock:
            if "layers" in self.meters:
                self.meters["layers"].start()
                self._count("layers", 1)

    def tokens_computed(self, tokens: int) -> None:
        with self._lock:
            for phase in (*LAYER_PHASES, "ask"):
                self._count(phase, tokens)

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
            is_in_layers = any(m.done < m.total for phase, m in self.meters.items() if phase in LAYER_PHASES)
            left = {phase: m.seconds_left for phase, m in self.meters.items() if not (is_in_layers and m.can_wait)}
        known = [seconds for seconds in left.values() if seconds is not None]
        if len(known) < len(left) or not any(meter.done for meter in self.meters.values()):
            return None
        if "layers" in left:
            return sum(known)
        return max(known)

    def keep(self) -> None:
        """Store a summary for other processes, if the stage has a place for it."""
        if self._keep is not None:
            self._keep(json.dumps(self.summary()))

    def summary(self) -> dict[str, Any]:
        with self._lock:
            phases = {
                phase: {
                    "done": meter.done,
                    "total": meter.total,
                    "rate": None if (r := meter.rate) is None else round(r, 1 if phase in LAYER_PHASES else None),
                    **({"unit": meter.unit} if phase in LAYER_PHASES else {}),
                }
                for phase, meter in self.meters.items()
            }
        left = self.seconds_left
        return {
            "shards": self.num_shards,
            "finished_shards": self.shards,
            "phases": phases,
            "seconds": round(self.seconds),
            "seconds_left": None if left is None else round(left),
        }
