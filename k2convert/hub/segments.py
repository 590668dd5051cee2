"""A half-downloaded file, NAME.part, and the record of its parts on disk, NAME.part.json.

The file has its final size from the start. The record has the file's sha256 and size, the segment length, and one bit
per segment. A bit is set only after the segment's bytes were synced, so a record is never ahead of its file. The sha256
of the whole file decides in the end: a lost or wrong record costs time, not correctness.
"""

import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from k2convert.checkpoint.files import mapping_or_empty, write_all, write_atomically, writing
from k2convert.checkpoint.folders import check_no_link
from k2convert.errors import DiskFullError, format_bytes
from k2convert.hub.source import RemoteFile
from k2convert.machine import PAGE_BYTES

MAX_SEGMENT_BYTES = 8 << 20
MIN_SEGMENT_BYTES = 64 << 10
RECORD_SECONDS = 0.5
RECORD_SECONDS_LARGE = 3.0  # each record waits for the disk, and for a large file that takes longer
LARGE_BYTES = 256 << 20


def segment_bytes_for(num_bytes: int) -> int:
    """Bytes of a segment, the most that a killed process loses: a file / 64, at most 8 MB, in multiples of 64 KB."""
    step = MIN_SEGMENT_BYTES
    return min(MAX_SEGMENT_BYTES, max(step, -(-num_bytes // (64 * step)) * step))


def range_segment_bytes(num_bytes: int) -> int:
    """The length of a segment if only ranges of a file are fetched: short, so that little else is, and not millions."""
    if num_bytes < LARGE_BYTES:
        return PAGE_BYTES
    return MIN_SEGMENT_BYTES


class PartialFile:
    """A file that several threads fill; each of them may call `claim`, `write`, `finish` and `release`."""

    def __init__(
        self, path: Path, record_path: Path, file: RemoteFile, segment_bytes: int, descriptor: int, done: bytearray
    ) -> None:
        self.path = path
        self.record_path = record_path
        self.file = file
        self.segment_bytes = segment_bytes
        self.descriptor = descriptor
        self.done = done
        self._taken = bytearray(done)
        self._lock = threading.Condition()
        self._writing = threading.Lock()
        self._recorded: bytes = bytes(done)
        self._recorded_at = time.monotonic()

    def end_of(self, segment: int) -> int:
        return min((segment + 1) * self.segment_bytes, self.file.num_bytes)

    def keep_only(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch only the segments that a byte range [begin, end) touches. Call it before the first `claim`."""
        left_out = bytearray(b"\x01" * len(self.done))
        for begin, end in ranges:
            first = begin // self.segment_bytes
            stop = -(-end // self.segment_bytes)
            left_out[first:stop] = bytes(stop - first)
        with self._lock:
            self.done[:] = left_out
            self._taken[:] = left_out

    def claim(self, *, max_bytes: int) -> range | None:
        """Take the first run of free segments, of about `max_bytes` at most; None when every segment is taken."""
        with self._lock:
            first = self._taken.find(0)
            if first < 0:
                return None
            limit = min(len(self._taken), first + -(-max_bytes // self.segment_bytes))
            after = self._taken.find(1, first, limit)
            run = range(first, limit if after < 0 else after)
            self._taken[run.start : run.stop] = b"\x01" * len(run)
            return run

    def finish(self, segment: int) -> None:
        with self._lock:
            self.done[segment] = 1
            self._lock.notify_all()

    def release(self, segments: range) -> None:
        """Let another request claim the segments of a failed one that did not arrive."""
        with self._lock:
            for segment in segments:
                self._taken[segment] = self.done[segment]
            self._lock.notify_all()

    def write(self, data: memoryview, position: int) -> None:
        """Write all of `data` at `position`; raises DiskFullError, DestinationWriteError."""
        # The kernel lets only one thread at a time write to a file; the others would spin.
        with self._writing, writing(self.path):
            write_all(self.descriptor, data, position)

    def wait(self, seconds: float) -> None:
        """Return when a segment was finished or released, or after `seconds`."""
        with self._lock:
            self._lock.wait(seconds)

    def wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def is_complete(self) -> bool:
        with self._lock:
            return 0 not in self.done

    @property
    def num_done(self) -> int:
        """Number of bytes in finished segments."""
        with self._lock:
            done = sum(self.done) * self.segment_bytes
            short = len(self.done) * self.segment_bytes - self.file.num_bytes
            if self.done and self.done[-1]:
                return done - short
            return done

    def frontier(self) -> int:
        """Number of bytes from the start of the file without a gap."""
        with self._lock:
            first = self.done.find(0)
        if first < 0:
            return self.file.num_bytes
        return first * self.segment_bytes

    def record(self, *, force: bool = False) -> None:
        """Sync the data, then record finished segments, once per interval unless forced; raises DiskFullError."""
        interval = RECORD_SECONDS
        if self.file.num_bytes >= LARGE_BYTES:
            interval = RECORD_SECONDS_LARGE
        with self._lock:
            state = bytes(self.done)
        due = force or time.monotonic() - self._recorded_at >= interval
        if not due or state == self._recorded:
            return
        with writing(self.path):
            os.fdatasync(self.descriptor)
        document = _identity(self.file, self.segment_bytes) | {"done": "".join("01"[bit] for bit in state)}
        write_atomically(self.record_path, json.dumps(document).encode())
        self._recorded, self._recorded_at = state, time.monotonic()

    def reset(self) -> None:
        """Forget every segment: the whole file has the wrong hash, and nothing shows which part is wrong."""
        self.record_path.unlink(missing_ok=True)
        with self._lock:
            self.done[:] = bytes(len(self.done))
            self._taken[:] = bytes(len(self.done))
        self._recorded = bytes(self.done)


def part_path(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def open_partial(target: Path, file: RemoteFile, *, segment_bytes: int | None = None) -> PartialFile:
    """Open or create `target`.part at its full size; raises DiskFullError, DestinationWriteError, DestinationError."""
    path = part_path(target)
    record_path = path.with_name(path.name + ".json")
    segment_bytes = segment_bytes or segment_bytes_for(file.num_bytes)
    num_segments = -(-file.num_bytes // segment_bytes)
    for name in (path, record_path):
        check_no_link(name)
    done = bytearray(num_segments)
    if path.exists() and path.stat().st_size == file.num_bytes:
        done = _read_record(record_path, file, segment_bytes, num_segments)
    with writing(path):
        if not any(done):
            record_path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if os.fstat(descriptor).st_size != file.num_bytes:
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, file.num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise DiskFullError(
            f"{path}: no room for {format_bytes(file.num_bytes)} ({error.strerror}). Free some space."
        ) from error
    return PartialFile(path, record_path, file, segment_bytes, descriptor, done)


def _identity(file: RemoteFile, segment_bytes: int) -> dict[str, object]:
    return {"sha256": file.sha256, "bytes": file.num_bytes, "segment_bytes": segment_bytes}


def _read_record(path: Path, file: RemoteFile, segment_bytes: int, num_segments: int) -> bytearray:
    """The recorded segments, or none if the record is missing, damaged or from a different file."""
    try:
        fields = mapping_or_empty(json.loads(path.read_text()))
    except (OSError, ValueError):
        return bytearray(num_segments)
    bits = fields.pop("done", None)
    if fields != _identity(file, segment_bytes) or not isinstance(bits, str) or len(bits) != num_segments:
        return bytearray(num_segments)
    return bytearray(bit == "1" for bit in bits)
