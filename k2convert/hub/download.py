"""One shard from the Hub: parallel range requests into a pre-sized file, resumed inside the shard, hash-checked.

huggingface_hub restarts a broken file at byte 0 in both majors, which for a 10 GB shard loses minutes to hours. So the
bytes are fetched here, over the library's own HTTP session, as ranges of the pinned commit's file. A range is never
tied to an ETag: the address contains the commit, its content cannot change, and behind the Hub's redirect the storage
answers with ETags of its own.

Why not Xet for downloads: hf_xet puts a file together from chunks on the CPU, and cannot resume inside a file after its
process has ended; on loopback it was half as fast as ranges and took more of the CPU, its hash not even checked. The
Hub serves every Xet file over plain ranges too. Uploads use Xet where the library does: it finds there what the Hub
already has.
"""

import contextlib
import hashlib
import os
import threading
from pathlib import Path

from k2convert.buffers import BUFFERS
from k2convert.checkpoint.files import writing
from k2convert.errors import DestinationWriteError, DiskFullError, HubError
from k2convert.hub.client import NUM_ATTEMPTS, Hub
from k2convert.hub.request_errors import HubRequestError
from k2convert.hub.segments import PartialFile, open_partial
from k2convert.hub.source import RemoteRepo, file_url

NUM_CONNECTIONS = 8
RUN_BYTES = 256 << 20  # one request fetches at most this much, so a 10 GB shard takes about 40 requests
_NUM_ROUNDS = 3  # whole fetches of a file whose bytes keep arriving wrong
_HASH_BYTES = 1 << 20
_WRITE_BYTES = 1 << 20


def download_shard(
    hub: Hub,
    source: RemoteRepo,
    shard: str,
    *,
    target: Path,
    stop: threading.Event,
) -> None:
    """Fetch `shard` to `target`, continuing what an earlier attempt left; the file appears only if its sha256 is right.

    Setting `stop` ends the call early with HubError, after the state was recorded. Raises HubError if the Hub fails or
    the bytes stay wrong, DiskFullError if the disk is full, DestinationWriteError if the target cannot be written.
    """
    file = source.shard(shard)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() and target.stat().st_size == file.num_bytes and file_sha256(target) == file.sha256:
            return
        target.unlink(missing_ok=True)  # an interrupted conversion in tight room uses up its source
    partial = open_partial(target, file)
    try:
        url = file_url(hub, source, shard)
        for _ in range(_NUM_ROUNDS):
            if _fill(hub, partial, url, stop) == file.sha256:
                with writing(target):
                    partial.path.replace(target)  # not synced: whoever finds it here hashes it before use
                partial.record_path.unlink(missing_ok=True)
                return
            hub.notify(f"{shard} arrived with another sha256 than the Hub states; fetching it again")
            partial.reset()
    finally:
        os.close(partial.descriptor)
    raise HubError(
        f"{source.repo}/{shard}: arrived {_NUM_ROUNDS} times with other bytes than the Hub's sha256 {file.sha256}. "
        "A proxy, the memory or the disk changes them; nothing of it was used."
    )


def _fill(hub: Hub, partial: PartialFile, url: str, stop: threading.Event) -> str:
    """Fetch all missing segments in threads while this one hashes what has arrived in order; returns the sha256."""
    failures: list[BaseException] = []
    halt = threading.Event()
    threads = [
        threading.Thread(
            target=_fetch_runs,
            args=(hub, partial, url, halt, failures),
            name=f"range-{i}",
            daemon=True,
        )
        for i in range(min(NUM_CONNECTIONS, len(partial.done)))
    ]
    digest = hashlib.sha256()
    position = 0
    buffer = BUFFERS.empty(_HASH_BYTES)
    try:
        for thread in threads:
            thread.start()
        while position < partial.file.num_bytes:
            if failures:
                raise failures[0]
            if stop.is_set():
                raise HubError(f"{partial.path.name}: stopped; running the same command again continues it.")
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
        halt.set()
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join()
        if position < partial.file.num_bytes:
            with contextlib.suppress(DiskFullError, DestinationWriteError):  # what ended the loop is the news
                partial.record(force=True)
    return digest.hexdigest()


def _fetch_runs(hub: Hub, partial: PartialFile, url: str, halt: threading.Event, failures: list[BaseException]) -> None:
    """One connection's work: claim a run of segments, stream it to its place, again until nothing is left."""
    max_bytes = min(RUN_BYTES, -(-partial.file.num_bytes // NUM_CONNECTIONS))
    num_failures = 0
    try:
        while not halt.is_set() and not partial.is_complete():
            run = partial.claim(max_bytes=max_bytes)
            if run is None:
                partial.wait(0.2)  # another connection may yet give a run back
                continue
            try:
                _stream_run(hub, partial, url, run, halt, direct=num_failures == 0)
                num_failures = 0
            except HubRequestError as error:
                num_failures = 1 if partial.done[run.start] else num_failures + 1
                if not error.transient or num_failures >= NUM_ATTEMPTS:
                    raise
                partial.release(run)
                hub.notify(f"{partial.path.name}: {error.reason}; continuing it")
                halt.wait(hub.pause(error, attempt=num_failures - 1))
    except BaseException as error:  # handed to the thread that waits, which raises it
        failures.append(error)
        partial.wake()


def _stream_run(hub: Hub, partial: PartialFile, url: str, run: range, halt: threading.Event, *, direct: bool) -> None:
    """Write one range response to its place, marking each segment as its last byte is written."""
    position, segment = run.start * partial.segment_bytes, run.start
    memory, filled = BUFFERS.empty(_WRITE_BYTES).data, 0

    def write() -> None:
        nonlocal position, segment, filled
        partial.write(memory[:filled], position)
        position, filled = position + filled, 0
        while segment < run.stop and position >= partial.end_of(segment):
            partial.finish(segment)
            segment += 1

    with hub.stream_range(url, begin=position, end=partial.end_of(run.stop - 1), direct=direct) as body:
        try:
            while not halt.is_set() and (count := body.read_into(memory[filled:])):
                filled += count
                if filled == len(memory):
                    write()
        finally:
            write()  # a broken connection keeps what it brought


def file_sha256(path: Path) -> str:
    """The sha256 of a whole file as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
