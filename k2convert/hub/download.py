"""Download one shard: parallel range requests into a file of the final size, resumable, checked by sha256.

huggingface_hub (1.x and 2.x) restarts a broken file at byte 0. For a shard of 10 GB that loses minutes to hours. So
this module fetches the bytes as ranges, over the library's own HTTP session. A range is not tied to an ETag: the
address contains the commit, so its content cannot change, and the storage behind the Hub's redirect has different
ETags.

Downloads do not use Xet. hf_xet assembles a file from chunks on the CPU, and it cannot resume inside a file after its
process ended. On loopback it had half the speed of ranges and took more CPU time, without a check of the hash. The Hub
serves every Xet file over plain ranges too. Uploads use Xet if the library does: Xet finds what the Hub already has.
"""

import contextlib
import hashlib
import os
import shlex
import threading
from collections.abc import Callable, Generator, Iterable
from io import BytesIO
from pathlib import Path

from k2convert.checkpoint.files import writing
from k2convert.checkpoint.folders import check_no_link
from k2convert.errors import DestinationError, DestinationWriteError, DiskFullError, HubError, format_bytes
from k2convert.hub.client import FILE_SCHEME, Failures, Hub, ignore, is_offline
from k2convert.hub.request_errors import HubRequestError
from k2convert.hub.segments import PartialFile, open_partial, range_segment_bytes
from k2convert.hub.source import RemoteRepo, file_url
from k2convert.machine import BUFFERS

NUM_CONNECTIONS = 8  # one connection seldom fills a line
RUN_BYTES = 256 << 20  # one request fetches at most this much, so a 10 GB shard needs about 40 requests
_NUM_ROUNDS = 3  # how often to fetch a whole file that arrives with wrong bytes
_HASH_BYTES = 1 << 20
_WRITE_BYTES = 1 << 20

Arrived = Callable[[int, bool], None]


def download_shard(
    hub: Hub, source: RemoteRepo, shard: str, *, target: Path, stop: threading.Event, arrived: Arrived = ignore
) -> None:
    """Fetch `shard` to `target`, continuing an earlier attempt; the file appears only if its sha256 is right.

    `arrived` gets bytes since its last call, and whether they came now. HubError when `stop` is set or the Hub fails;
    DiskFullError, DestinationWriteError.
    """
    file = source.shard(shard)
    check_no_link(target)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() and target.stat().st_size == file.num_bytes:
            hub.notify(f"{shard} was fetched by an earlier run: hashing {format_bytes(file.num_bytes)}")
            if file_sha256(target) == file.sha256:
                arrived(file.num_bytes, False)
                return
        target.unlink(missing_ok=True)  # else it needs room beside the file that is fetched
    partial = open_partial(target, file)
    try:
        arrived(partial.num_done, False)
        for attempt in range(_NUM_ROUNDS):
            url = file_url(hub, source, shard, is_cached=attempt == 0)
            if _fill(hub, partial, url, stop, arrived) == file.sha256:
                with writing(target):
                    partial.path.replace(target)  # not synced: every later use hashes it first
                partial.record_path.unlink(missing_ok=True)
                return
            arrived(-partial.num_done, False)
            if url.startswith(FILE_SCHEME) and is_offline():
                raise HubError(
                    f"{url.removeprefix(FILE_SCHEME)}: is damaged: its bytes do not have the sha256 of its name. "
                    f"`hf download {source.repo} {shlex.quote(shard)} --force-download` replaces it."
                )
            hub.notify(f"{shard} arrived with a wrong sha256; fetching it again")
            partial.reset()
    finally:
        os.close(partial.descriptor)
    raise HubError(
        f"{source.repo}/{shard}: arrived {_NUM_ROUNDS} times with bytes that do not match the Hub's sha256 "
        f"{file.sha256}. None of them were used. Check the proxy, the memory and the disk."
    )


def download_ranges(
    hub: Hub, source: RemoteRepo, shard: str, *, target: Path, ranges: Iterable[tuple[int, int]]
) -> None:
    """Fetch whole segments of byte ranges [begin, end) into a sparse file, unchecked; raises as `download_shard`."""
    file = source.shard(shard)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # else it needs room beside the file that is fetched
    partial = open_partial(target, file, segment_bytes=range_segment_bytes(file.num_bytes))
    try:
        partial.keep_only(ranges)
        with _fetching(hub, partial, file_url(hub, source, shard), ignore) as check:
            while not partial.is_complete():
                check()
                partial.wait(0.2)
        with writing(target):
            partial.path.replace(target)
    finally:
        os.close(partial.descriptor)


def _fill(hub: Hub, partial: PartialFile, url: str, stop: threading.Event, arrived: Arrived) -> str:
    """Fetch the missing segments in threads, hash them in order in this one; returns the sha256 as hex."""
    digest = hashlib.sha256()
    position = 0
    buffer = BUFFERS.empty(_HASH_BYTES)
    try:
        with _fetching(hub, partial, url, arrived) as check:
            while position < partial.file.num_bytes:
                check()
                if stop.is_set():
                    raise HubError(f"{partial.path.name}: stopped. Run the same command again to continue.")
                frontier = partial.frontier()
                if position == frontier:
                    partial.wait(0.2)
                else:
                    with writing(partial.path):
                        count = os.preadv(partial.descriptor, [buffer[: frontier - position].data], position)
                    digest.update(buffer[:count].data)
                    position += count
                partial.record()
    finally:
        if position < partial.file.num_bytes:
            with contextlib.suppress(DiskFullError, DestinationWriteError, DestinationError):
                partial.record(force=True)
    return digest.hexdigest()


@contextlib.contextmanager
def _fetching(hub: Hub, partial: PartialFile, url: str, arrived: Arrived) -> Generator[Callable[[], None]]:
    """Fetch missing segments in threads during the block; what it yields raises the error of a thread that failed."""
    failures: list[BaseException] = []
    halt = threading.Event()
    threads = [
        threading.Thread(
            target=_fetch_runs, args=(hub, partial, url, halt, failures, arrived), name=f"range-{i}", daemon=True
        )
        for i in range(min(NUM_CONNECTIONS, len(partial.done)))
    ]

    def check() -> None:
        if failures:
            raise failures[0]

    try:
        for thread in threads:
            thread.start()
        yield check
    finally:
        halt.set()
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join()


def _fetch_runs(
    hub: Hub, partial: PartialFile, url: str, halt: threading.Event, failures: list[BaseException], arrived: Arrived
) -> None:
    """The work of one connection: claim a run of segments and stream it into the file, until none is left."""
    max_bytes = min(RUN_BYTES, -(-partial.file.num_bytes // NUM_CONNECTIONS))
    failures_in_a_row = Failures(hub.outages_pass)
    try:
        while not halt.is_set() and not partial.is_complete():
            run = partial.claim(max_bytes=max_bytes)
            if run is None:
                partial.wait(0.2)  # another connection may still release its run
                continue
            try:
                _stream_run(hub, partial, url, run, halt, arrived)
                failures_in_a_row = Failures(hub.outages_pass)
            except HubRequestError as error:
                if partial.done[run.start]:
                    failures_in_a_row = Failures(hub.outages_pass)
                pause = failures_in_a_row.pause_after(error)
                partial.release(run)
                hub.notify(f"{partial.path.name}: {error.reason}; trying again in {pause:.0f} s")
                halt.wait(pause)
    except BaseException as error:  # the waiting thread raises it
        failures.append(error)
        partial.wake()


def _stream_run(hub: Hub, partial: PartialFile, url: str, run: range, halt: threading.Event, arrived: Arrived) -> None:
    """Write one range response into the file, and mark each segment when its last byte is written."""
    position = run.start * partial.segment_bytes
    segment = run.start
    buffer = BytesIO()

    def write() -> None:
        nonlocal position, segment
        partial.write(buffer.getbuffer()[: buffer.tell()], position)
        position += buffer.tell()
        buffer.seek(0)
        while segment < run.stop and position >= partial.end_of(segment):
            partial.finish(segment)
            arrived(partial.end_of(segment) - segment * partial.segment_bytes, True)
            segment += 1

    with hub.stream_range(url, begin=position, end=partial.end_of(run.stop - 1)) as pieces:
        try:
            for piece in pieces:
                buffer.write(piece)
                if buffer.tell() >= _WRITE_BYTES:
                    write()
                if halt.is_set():
                    break
        finally:
            write()  # after a broken connection too


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
