"""The scheduler: everything gets through, never more than the room, nothing twice, and the first failure stops it."""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from k2convert.errors import ArgumentError, parse_size
from k2convert.job.pipeline import Pipeline, Stages
from k2convert.job.resources import Item, least_room


@dataclass
class Disk:
    files: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, size: int) -> None:
        with self.lock:
            assert name not in self.files
            self.files[name] = size
            self.peak = max(self.peak, sum(self.files.values()))

    def drop(self, name: str) -> None:
        with self.lock:
            del self.files[name]

    def stages(self, source_bytes: dict[str, int]) -> dict[str, Any]:
        """Stages that fetch sources to this disk, write results there and remove both."""
        return {
            "fetch": lambda source: self.add(source, source_bytes[source]),
            "convert": lambda item: self.add(item.name, item.output_bytes),
            "drop_source": self.drop,
            "drop_output": self.drop,
        }


@dataclass
class Branch:
    """Commits what was sent when four shards wait; `delay` is how long sending and committing take, in seconds."""

    delay: float = 0.0
    on_upload: Callable[[str], None] = lambda _: None
    sent: list[str] = field(default_factory=list)
    committed: list[str] = field(default_factory=list)
    commits: int = 0
    most_uploads: int = 0
    uploading: set[str] = field(default_factory=set)
    committing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_pending(self) -> int:
        return len(self.sent)

    def upload(self, name: str) -> None:
        self.on_upload(name)
        self.uploading.add(name)
        self.most_uploads = max(self.most_uploads, len(self.uploading))
        time.sleep(self.delay)
        self.uploading.discard(name)
        self.sent.append(name)

    def is_group_due(self) -> bool:
        return len(self.sent) >= 4

    def commit(self) -> list[str]:
        assert self.committing.acquire(blocking=False), "two commits at once"
        group = list(self.sent)
        time.sleep(self.delay)
        del self.sent[: len(group)]
        self.committed += group
        self.commits += 1
        self.committing.release()
        return group


def pipeline(
    items: list[Item],
    room: int,
    source_bytes: dict[str, int],
    *,
    stop: threading.Event | None = None,
    to_upload: list[Item] | None = None,
    **stages: Any,
) -> Pipeline:
    """A pipeline with one worker, whose stages do nothing unless given."""
    chosen: dict[str, Any] = dict.fromkeys(("fetch", "convert", "drop_source", "drop_output"), lambda _: None)
    chosen |= {"uploads": None, "num_workers": 1} | stages
    stop = stop or threading.Event()
    return Pipeline(
        items, room=room, source_bytes=source_bytes, stages=Stages(**chosen), stop=stop, to_upload=to_upload or []
    )


def chain(number: int) -> tuple[list[Item], dict[str, int]]:
    return [Item(f"o{i}", (f"s{i}",), 10) for i in range(number)], {f"s{i}": 10 for i in range(number)}


def make_job(seed: int) -> tuple[list[Item], dict[str, int]]:
    choice = random.Random(seed)
    sources = {f"s{i}": choice.randrange(1, 100) for i in range(choice.randrange(1, 12))}
    names = list(sources)
    items: list[Item] = []
    for i in range(choice.randrange(1, 15)):
        needed = tuple(sorted(choice.sample(names, k=min(len(names), choice.randrange(1, 3)))))
        items.append(Item(f"o{i}", needed, choice.randrange(1, 100)))
    return items, sources


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("publish", [True, False])
def test_any_job_that_fits_ends_within_its_room(seed: int, publish: bool) -> None:
    items, sources = make_job(seed)
    least = least_room(items, source_bytes=sources, outputs_leave=publish)
    room = least + random.Random(seed).choice([0, 0, 50, 500])
    disk = Disk()
    branch = Branch()
    converted = Counter[str]()

    def convert(item: Item) -> None:
        assert all(source in disk.files for source in item.sources)
        disk.add(item.name, item.output_bytes)
        converted[item.name] += 1

    stages = disk.stages(sources) | {"convert": convert, "num_workers": 1 + seed % 3}
    pipeline(items, room, sources, uploads=branch if publish else None, **stages).run()
    assert disk.peak <= room
    assert converted == Counter(item.name for item in items)
    assert sorted(branch.committed) == (sorted(converted) if publish else [])
    assert set(disk.files) == (set() if publish else set(converted))


@pytest.mark.parametrize("stage", ["fetch", "convert", "upload"])
def test_the_first_failure_stops_everything_and_is_raised(stage: str) -> None:
    items, sources = chain(8)
    calls = Counter[str]()

    def fail_at(name: str) -> None:
        calls[name] += 1
        if name == stage and calls[name] == 3:
            raise OSError("no more")

    stop = threading.Event()
    stages: dict[str, Any] = {"fetch": lambda _: fail_at("fetch"), "convert": lambda _: fail_at("convert")}
    branch = Branch(on_upload=lambda _: fail_at("upload"))
    with pytest.raises(OSError, match="no more"):
        pipeline(items, 40, sources, stop=stop, uploads=branch, **stages).run()
    assert stop.is_set()
    assert calls[stage] == 3


class Interrupt(BaseException):
    """What a signal handler raises."""


def test_an_interrupt_while_the_threads_are_being_started_is_passed_on() -> None:
    """Raised by a real signal, which the first thread sends while many others are still to be started."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise Interrupt

    def fetch(_source: str) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        stop.wait(10)

    items = [Item("o", ("s",), 1)]
    stop = threading.Event()
    job = pipeline(items, 10, {"s": 1}, stop=stop, fetch=fetch, num_workers=200)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt):
            job.run()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert stop.is_set()


def test_stages_overlap() -> None:
    """Fetching one shard, converting the previous one and uploading the one before meet at the same time."""
    items, sources = chain(8)
    meeting = threading.Barrier(3)

    def meet_at(name: str, expected: str) -> None:
        if name == expected:
            meeting.wait(timeout=300)

    pipeline(
        items,
        100,
        sources,
        fetch=lambda source: meet_at(source, "s5"),
        convert=lambda item: meet_at(item.name, "o4"),
        uploads=Branch(on_upload=lambda name: meet_at(name, "o3")),
    ).run()
    assert not meeting.broken


def test_a_phase_says_what_it_waits_for() -> None:
    """Room for one shard: the next one waits until the first has left the disk, and the uploads wait for shards."""
    items, sources = chain(3)
    told = list[tuple[str, str]]()
    blocked = [threading.Event(), threading.Event()]

    def waits(phase: str, reason: str) -> None:
        told.append((phase, reason))
        if reason == "waits for room":
            next(event for event in blocked if not event.is_set()).set()

    def convert(item: Item) -> None:
        if item is not items[-1]:
            blocked[items.index(item)].wait(timeout=300)

    pipeline(items, 20, sources, convert=convert, uploads=Branch(), waits=waits).run()
    reasons = {phase: [reason for of, reason in told if of == phase] for phase in ("download", "convert", "upload")}
    assert reasons["download"] == 2 * ["waits for room", ""]
    assert set(reasons["convert"]) <= {"waits for a shard", ""}
    assert "commits" in reasons["upload"]
    assert reasons["upload"][-1] == ""


def test_a_local_source_has_no_fetch_stage() -> None:
    items = chain(5)[0]
    converted = list[str]()
    pipeline(items, 50, {}, fetch=None, convert=lambda item: converted.append(item.name), num_workers=2).run()
    assert sorted(converted) == [item.name for item in items]


def test_two_shards_are_uploaded_at_once_and_committed_in_groups() -> None:
    (items, sources), disk, branch = chain(24), Disk(), Branch(delay=0.02)
    pipeline(items, 10**9, sources, uploads=branch, **disk.stages(sources)).run()
    assert sorted(branch.committed) == sorted(item.name for item in items)
    assert branch.most_uploads == 2
    assert branch.commits <= 24 // 4 + 1
    assert not disk.files


def test_uploads_left_by_an_earlier_run_are_finished_first() -> None:
    branch = Branch()
    dropped = list[str]()
    waiting = [Item("old", ("gone",), 10)]
    pipeline([], 5, {}, drop_output=dropped.append, uploads=branch, to_upload=waiting).run()
    assert branch.committed == dropped == ["old"]


ITEMS = (Item("a", ("1",), 100), Item("b", ("2",), 300), Item("c", ("3",), 100))
SOURCES = {"1": 100, "2": 290, "3": 100}


def test_the_least_room() -> None:
    assert least_room(ITEMS, source_bytes=SOURCES, outputs_leave=True) == 590, "the largest shard and its result"
    assert least_room(ITEMS, source_bytes=SOURCES, outputs_leave=False) == 100 + 290 + 300, "results that stay"
    assert least_room(ITEMS, source_bytes={}, outputs_leave=True) == 300, "local sources need none"
    items = (Item("a", ("1", "2"), 10), Item("b", ("3",), 10), Item("c", ("1",), 10))
    needed = least_room(items, source_bytes={"1": 100, "2": 50, "3": 70}, outputs_leave=True)
    assert needed == 100 + 70 + 10, "a source that several shards need stays until the last"


def test_sizes_are_read_as_people_write_them() -> None:
    for text, count in (("200GB", 200 * 10**9), ("1.5TB", 15 * 10**11), ("64GiB", 64 << 30), ("3 mb", 3 * 10**6)):
        assert parse_size(text) == count
    for text in ("", "GB", "-1GB", "1XB", "all", "9" * 400 + "GB"):
        with pytest.raises(ArgumentError, match="not a size"):
            parse_size(text)
