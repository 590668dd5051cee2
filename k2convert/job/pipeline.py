"""Fetch, convert, upload, delete: the shards of a streamed job, overlapping, in bounded disk.

One thread fetches ahead as far as the room goes, workers convert, two threads upload and commit in groups. What the
stages do is given as callables; nothing here knows the Hub or the formats. The first failure stops everything; what was
finished stays finished, and doing the job again continues it.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from k2convert.job.room import DiskPlan, Item, shrinking_need

_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 10.0
NUM_UPLOADS = 2  # plain LFS sends a file's parts one after the other, and hashing one file leaves the line idle


class Publisher(Protocol):
    """The uploading side: bytes first, then commits that make several shards certain at once.

    Several threads upload, and one of them at a time commits meanwhile.
    """

    @property
    def num_pending(self) -> int:
        """Shards sent but not committed."""
        ...

    def upload(self, name: str) -> None:
        """Send one shard's bytes."""

    def is_group_due(self) -> bool:
        """Whether what was sent should be committed now."""
        ...

    def commit(self) -> list[str]:
        """Commit what was sent; returns the shards whose local copies are no longer needed."""
        ...


@dataclass(frozen=True, slots=True)
class Stages:
    """What happens to a shard. `fetch` and `convert` end early when the stop event they were given is set."""

    fetch: Callable[[str], None]
    convert: Callable[[Item, bool], None]
    drop_source: Callable[[str], None]
    drop_output: Callable[[str], None]
    publisher: Publisher | None


class Pipeline:
    """One run over the items that are left; `run` returns when all are through, or raises the first failure."""

    def __init__(
        self,
        items: Sequence[Item],
        *,
        disk: DiskPlan,
        source_bytes: Mapping[str, int],
        room: int,
        stages: Stages,
        num_workers: int,
        stop: threading.Event,
        waiting: Sequence[Item] = (),
    ) -> None:
        """`waiting` are items converted by an earlier run whose upload is still to be done."""
        self._items, self._disk, self._source_bytes = tuple(items), disk, source_bytes
        self._room, self._stages, self._stop = room, stages, stop
        self._num_workers = max(num_workers, 1)
        self._changed = threading.Condition()
        self._uses = Counter(source for item in items for source in item.sources)
        self._held: set[str] = set()
        self._used = sum(item.output_bytes for item in waiting)
        self._sizes = {item.name: item.output_bytes for item in (*items, *waiting)}
        self._fetched: deque[Item] = deque()
        self._converted: deque[Item] = deque(waiting)
        self._left_to_convert, self._left_to_leave = len(self._items), len(self._items) + len(waiting)
        self._is_blocked = self._is_committing = False
        self._num_uploading = 0
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Do it all. An interrupt in the calling thread stops the others and is passed on."""
        works = [self._fetch_all, *[self._convert_all] * self._num_workers]
        if self._stages.publisher is not None:
            works += [self._upload_all] * NUM_UPLOADS
        threads = [threading.Thread(target=self._guard, args=(work,), daemon=True) for work in works]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_POLL_SECONDS)
        except BaseException as error:
            self._halt(error)
            raise
        finally:
            deadline = time.monotonic() + _LEAVE_SECONDS  # an upload inside the library cannot be called off
            for thread in filter(threading.Thread.is_alive, threads):  # an interrupt may come before all are started
                thread.join(max(deadline - time.monotonic(), 0))
        if self._failure is not None:
            raise self._failure

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again in the thread that waits
            self._halt(error)

    def _halt(self, failure: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = failure
            self._stop.set()
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """Wait, holding the lock, until `ready`; False when everything is to stop."""
        while not self._stop.is_set():
            if ready():
                return True
            self._changed.wait(_POLL_SECONDS)
        return False

    def _need(self, item: Item) -> int:
        if item.name in self._disk.shrinking:
            return shrinking_need(item, self._source_bytes)
        fresh = sum(self._source_bytes.get(s, 0) for s in item.sources if s not in self._held)
        return fresh + item.output_bytes

    def _fetch_all(self) -> None:
        for item in self._items:
            with self._changed:
                self._is_blocked = True
                if not self._wait(lambda item=item: self._used + self._need(item) <= self._room):
                    return
                self._is_blocked = False
                self._used += self._need(item)
                fresh = [source for source in item.sources if source not in self._held]
                self._held.update(fresh)
            for source in fresh:
                self._stages.fetch(source)
            with self._changed:
                self._fetched.append(item)
                self._changed.notify_all()

    def _convert_all(self) -> None:
        while True:
            with self._changed:
                if not self._wait(lambda: bool(self._fetched) or self._left_to_convert == 0) or not self._fetched:
                    return
                item = self._fetched.popleft()
            self._stages.convert(item, item.name in self._disk.shrinking)
            self._release_sources(item)

    def _release_sources(self, item: Item) -> None:
        with self._changed:
            self._uses.subtract(item.sources)
            finished = [source for source in item.sources if self._uses[source] == 0]
        for source in finished:
            self._stages.drop_source(source)
        with self._changed:
            self._held.difference_update(finished)
            if item.name in self._disk.shrinking:
                self._used += item.output_bytes - shrinking_need(item, self._source_bytes)
            else:
                self._used -= sum(self._source_bytes.get(source, 0) for source in finished)
            self._left_to_convert -= 1
            self._converted.append(item)
            self._changed.notify_all()

    def _upload_all(self) -> None:
        publisher = self._stages.publisher
        assert publisher is not None
        while True:
            with self._changed:
                if not self._wait(lambda: self._has_upload_work(publisher)) or self._left_to_leave == 0:
                    return
                item = self._converted.popleft() if self._converted else None
                self._is_committing |= item is None
                self._num_uploading += item is not None
            commits = item is None
            if item is not None:
                publisher.upload(item.name)
                with self._changed:
                    self._num_uploading -= 1
                    commits = not self._is_committing and publisher.is_group_due()
                    self._is_committing |= commits
                    self._changed.notify_all()
            if commits:
                self._drop(publisher.commit())

    def _has_upload_work(self, publisher: Publisher) -> bool:
        """A shard to send, a group to commit, or nothing ever again."""
        return bool(self._converted) or self._left_to_leave == 0 or self._must_commit(publisher)

    def _must_commit(self, publisher: Publisher) -> bool:
        """With nothing to send: commit when a group is due, when room is wanted, or when nothing more will come."""
        is_last = self._left_to_convert == 0 and self._num_uploading == 0
        wanted = self._is_blocked or is_last or publisher.is_group_due()
        return not self._is_committing and publisher.num_pending > 0 and wanted

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._stages.drop_output(name)
        with self._changed:
            self._used -= sum(self._sizes[name] for name in names)
            self._left_to_leave -= len(names)
            self._is_committing = False
            self._changed.notify_all()
