"""Fetch, convert, upload, remove: the stages of a job, overlapping, in bounded disk.

One thread admits shards as the room allows, and fetches their sources if there is a fetch stage. Workers convert. If
there is an upload stage, two threads upload and commit in groups. The stages are callables: nothing here knows the Hub
or the formats. The first failure stops everything. What was finished stays finished, and the next run continues.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from k2convert.job.resources import Item
from k2convert.records.events import SILENT

_POLL_SECONDS: Final = 0.2
_LEAVE_SECONDS: Final = 10.0
NUM_UPLOADS: Final = 2  # plain LFS sends the parts of a file one by one, and hashing one file leaves the line idle


class UploadStage(Protocol):
    """Uploads shards, then commits several of them at a time. Two threads upload; one thread at a time commits."""

    @property
    def num_pending(self) -> int:
        """Shards that are sent but not committed."""
        ...

    def upload(self, name: str) -> None:
        """Send the bytes of one shard."""

    def is_group_due(self) -> bool: ...

    def commit(self) -> list[str]:
        """Commit what was sent; returns the shards whose local copies are no longer needed."""
        ...


@dataclass(frozen=True, slots=True)
class Stages:
    """Stages of a shard. `fetch` and `convert` return early when the stop event is set."""

    fetch: Callable[[str], None] | None  # None for a local source
    convert: Callable[[Item], None]
    drop_source: Callable[[str], None]  # removes a file that is no longer needed, as the next
    drop_output: Callable[[str], None]
    uploads: UploadStage | None  # None for a local destination
    num_workers: int = 1  # threads that convert
    waits: Callable[[str, str], None] = SILENT.waits  # gets what a phase waits for; empty when it goes on


class Pipeline:
    """One run over the remaining items. `run` returns when all are through, or raises the first failure."""

    def __init__(
        self,
        items: Sequence[Item],
        *,
        stages: Stages,
        room: int,
        source_bytes: Mapping[str, int],
        stop: threading.Event,
        to_upload: Sequence[Item] = (),
    ) -> None:
        """Take `room` bytes of disk at most. `to_upload` are items that an earlier run converted."""
        self._items = tuple(items)
        self._source_bytes = source_bytes
        self._stages = stages
        self._stop = stop
        self._room = room
        self._sizes = {item.name: item.output_bytes for item in (*items, *to_upload)}
        self._changed = threading.Condition()  # guards everything below
        self._used = sum(item.output_bytes for item in to_upload)
        self._uses = Counter(source for item in items for source in item.sources)  # how many items need each
        self._held = set[str]()  # source shards
        self._is_blocked = False  # for lack of room
        self._to_convert = deque[Item]()
        self._num_to_convert = len(self._items)  # also those that are not fetched yet, or in work
        self._to_upload = deque(to_upload)
        self._num_to_upload = len(self._items) + len(to_upload)
        self._num_uploading = 0
        self._is_committing = False
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Do everything. An interrupt in the calling thread stops the other threads and is raised again."""
        works = [self._admit_all, *[self._convert_all] * self._stages.num_workers]
        if self._stages.uploads is not None:
            works += [self._upload_all] * NUM_UPLOADS
        threads = [threading.Thread(target=work, daemon=True) for work in works]
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
            deadline = time.monotonic() + _LEAVE_SECONDS  # an upload inside the library cannot be cancelled
            for thread in filter(threading.Thread.is_alive, threads):  # an interrupt may come before all have started
                thread.join(max(deadline - time.monotonic(), 0))
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _guarded(self) -> Generator[None]:
        """Stop everything if the block, which is all that a thread does, fails."""
        try:
            yield
        except BaseException as error:  # raised again in the waiting thread
            self._halt(error)

    def _halt(self, failure: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = failure
            self._stop.set()
            self._changed.notify_all()

    def _wait(self, is_ready: Callable[[], bool], phase: str, reason: str) -> bool:
        """Wait, holding the lock, until `is_ready`; False if the run stops. Others see which phase waits, and why."""
        is_told = False
        while not self._stop.is_set():
            if is_ready():
                if is_told:
                    self._stages.waits(phase, "")
                return True
            if not is_told:
                self._stages.waits(phase, reason)
                is_told = True
            self._changed.wait(_POLL_SECONDS)
        return False

    def _need(self, item: Item) -> int:
        fresh = sum(self._source_bytes.get(s, 0) for s in item.sources if s not in self._held)
        return fresh + item.output_bytes

    def _has_room(self, item: Item) -> bool:
        return self._used + self._need(item) <= self._room

    def _admit_all(self) -> None:
        with self._guarded():
            for item in self._items:
                with self._changed:
                    self._is_blocked = True
                    if not self._wait(lambda item=item: self._has_room(item), "download", "waits for room"):
                        return
                    self._is_blocked = False
                    self._used += self._need(item)
                    fresh = [source for source in item.sources if source not in self._held]
                    self._held.update(fresh)
                if self._stages.fetch is not None:
                    for source in fresh:
                        self._stages.fetch(source)
                with self._changed:
                    self._to_convert.append(item)
                    self._changed.notify_all()

    def _convert_all(self) -> None:
        queue = self._to_convert
        with self._guarded():
            while True:
                with self._changed:
                    is_due = self._wait(
                        lambda: bool(queue) or self._num_to_convert == 0, "convert", "waits for a shard"
                    )
                    if not is_due or not queue:
                        return
                    item = queue.popleft()
                self._stages.convert(item)
                with self._changed:
                    self._uses.subtract(item.sources)
                    finished = [source for source in item.sources if self._uses[source] == 0]
                for source in finished:
                    self._stages.drop_source(source)
                with self._changed:
                    self._held.difference_update(finished)
                    self._used -= sum(self._source_bytes.get(source, 0) for source in finished)
                    self._num_to_convert -= 1
                    self._to_upload.append(item)
                    self._changed.notify_all()

    def _upload_all(self) -> None:
        uploads = self._stages.uploads
        assert uploads is not None
        queue = self._to_upload

        def has_work() -> bool:  # or never will have
            return bool(queue) or self._num_to_upload == 0 or self._must_commit(uploads)

        with self._guarded():
            while True:
                with self._changed:
                    if not self._wait(has_work, "upload", "waits for a shard") or self._num_to_upload == 0:
                        return
                    item = queue.popleft() if queue else None
                    if item is None:
                        self._is_committing = True
                    else:
                        self._num_uploading += 1
                if item is None or self._upload(uploads, item):
                    self._stages.waits("upload", "commits")
                    names = uploads.commit()
                    self._stages.waits("upload", "")
                    if self._stop.is_set():  # another run may use the copies by now
                        return
                    for name in names:
                        self._stages.drop_output(name)
                    with self._changed:
                        self._used -= sum(self._sizes[name] for name in names)
                        self._num_to_upload -= len(names)
                        self._is_committing = False
                        self._changed.notify_all()

    def _upload(self, uploads: UploadStage, item: Item) -> bool:
        """Send one shard; returns whether this thread has to commit now."""
        uploads.upload(item.name)
        with self._changed:
            self._num_uploading -= 1
            must_commit = not self._is_committing and uploads.is_group_due() and not self._stop.is_set()
            if must_commit:
                self._is_committing = True
            self._changed.notify_all()
        return must_commit

    def _must_commit(self, uploads: UploadStage) -> bool:
        """With nothing to send, commit if a group is due, if room is needed, or if nothing more will come."""
        is_last = self._num_to_convert == 0 and self._num_uploading == 0
        is_wanted = self._is_blocked or is_last or uploads.is_group_due()
        return not self._is_committing and uploads.num_pending > 0 and is_wanted
