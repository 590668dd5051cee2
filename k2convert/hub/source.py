"""A source on the Hub, pinned to one commit: its files, its headers by range requests, its small files whole.

Planning a 594 GB checkpoint needs its index, its config and 62 headers of half a megabyte: two range requests a shard,
in threads. Nothing here downloads a shard.
"""

import contextlib
import errno
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from k2convert.checkpoint.files import Content, num_bytes_of, pieces, read_json_file
from k2convert.checkpoint.header import ShardHeader, check_header_length, parse_header
from k2convert.checkpoint.index import Checkpoint, build_checkpoint
from k2convert.checkpoint.names import CONFIG_NAME, INDEX_NAME, SHARD_SUFFIX, SINGLE_SHARD_NAME
from k2convert.errors import DestinationWriteError, DiskFullError, HubError
from k2convert.hub.client import NUM_ATTEMPTS, Hub, RepoRef

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = 16
MAX_SMALL_FILE_BYTES = 64 << 20  # the largest file of a Kimi repository that is no shard has 3 MB
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".npz")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a pinned commit; `sha256` is set for files in LFS or Xet storage, `git_sha1` for the others."""

    path: str
    num_bytes: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True, slots=True)
class RemoteRepo:
    """A repository at one commit."""

    repo: str
    commit: str
    private: bool
    files: dict[str, RemoteFile]

    def shard(self, name: str) -> RemoteFile:
        """The file of a shard; raises HubError when it is missing or the Hub gives no sha256 to check it by."""
        file = self.files.get(name)
        if file is None:
            raise HubError(f"{self.repo} at {self.commit[:12]}: {name} is missing, though the index names it.")
        if file.sha256 is None:
            raise HubError(f"{self.repo} at {self.commit[:12]}: the Hub states no sha256 for {name}: it is not in LFS.")
        return file


def resolve_source(hub: Hub, ref: RepoRef) -> RemoteRepo:
    """Resolve a revision to its commit, once, and list that commit's files with their sizes and hashes."""
    api = hub.api()
    action = f"look up {ref.repo}" + (f" at revision {ref.revision}" if ref.revision else "")
    info = hub.call(action, lambda: api.model_info(ref.repo, revision=ref.revision))
    commit = info.sha
    if commit is None:
        raise HubError(f"could not {action}: the Hub names no commit. The repository may be empty.")
    return RemoteRepo(ref.repo, commit, bool(info.private), list_files(hub, ref.repo, commit))


def list_files(hub: Hub, repo: str, revision: str) -> dict[str, RemoteFile]:
    """All files at a revision, by path."""
    api = hub.api()

    def listing() -> dict[str, RemoteFile]:
        from huggingface_hub.hf_api import RepoFile

        files: dict[str, RemoteFile] = {}
        for entry in api.list_repo_tree(repo, recursive=True, revision=revision):
            if isinstance(entry, RepoFile):
                sha256 = entry.lfs.sha256 if entry.lfs is not None else None
                files[entry.path] = RemoteFile(entry.path, entry.size, sha256, None if sha256 else entry.blob_id)
        return files

    return hub.call(f"list the files of {repo}", listing)


def file_url(hub: Hub, source: RemoteRepo, path: str) -> str:
    """Where a file's bytes are; by commit, so that no later push can change what a resumed download reads."""
    from huggingface_hub import hf_hub_url

    return hf_hub_url(source.repo, path, revision=source.commit, endpoint=hub.endpoint)


def read_file(hub: Hub, repo: str, revision: str, file: RemoteFile) -> bytes:
    """A small file's bytes, checked against the Hub's hash; raises HubError where they stay wrong."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repo, file.path, revision=revision, endpoint=hub.endpoint)
    for _ in range(NUM_ATTEMPTS):
        data = hub.fetch_range(url, begin=0, end=file.num_bytes)
        if matches(data, file):
            return data
        hub.notify(f"{file.path} arrived with other bytes than the Hub states; fetching it again")
    raise HubError(f"{repo}/{file.path}: arrives with other bytes than the Hub states. A proxy may change them.")


def fetch_header(hub: Hub, source: RemoteRepo, shard: str) -> ShardHeader:
    """Read one shard's header with two range requests: its length, then its JSON."""
    file = source.shard(shard)
    url = file_url(hub, source, shard)
    where = f"{source.repo}/{shard}"
    prefix = hub.fetch_range(url, begin=0, end=min(8, file.num_bytes))
    length = check_header_length(prefix, shard=where, file_bytes=file.num_bytes)
    raw = prefix + hub.fetch_range(url, begin=8, end=8 + length)
    return parse_header(raw, shard=shard, file_bytes=file.num_bytes, where=where)


def open_remote(hub: Hub, source: RemoteRepo, *, folder: Path) -> Checkpoint:
    """Fetch small files into `folder` and all headers into memory; the result plans like a local checkpoint."""
    fetch_small_files(hub, source, folder=folder)
    index = read_json_file(folder / INDEX_NAME) if INDEX_NAME in source.files else None
    if index is None and SINGLE_SHARD_NAME not in source.files:
        raise HubError(
            f"{source.repo} at {source.commit[:12]}: neither {INDEX_NAME} nor {SINGLE_SHARD_NAME} is there. "
            "This is not a safetensors checkpoint."
        )
    present = sorted(path for path in source.files if "/" not in path and path.endswith(SHARD_SUFFIX))

    named = _named_shards(index)
    wanted = [shard for shard in present if shard in named]
    headers = dict(_in_threads(lambda name: fetch_header(hub, source, name), wanted))

    def load(shard: str) -> ShardHeader:
        if shard not in headers:
            source.shard(shard)
        return headers[shard]

    config = read_json_file(folder / CONFIG_NAME)
    return build_checkpoint(folder=folder, config=config, index=index, present=present, load=load)


def _named_shards(index: dict[str, Any] | None) -> set[str]:
    """The shards that an index names, whatever its form: what is odd about it is said where it is checked."""
    if index is None:
        return {SINGLE_SHARD_NAME}
    named: Any = index.get("weight_map")
    shards = cast(dict[str, Any], named).values() if isinstance(named, dict) else ()
    return {shard for shard in shards if isinstance(shard, str)}


def fetch_small_files(hub: Hub, source: RemoteRepo, *, folder: Path) -> None:
    """Fetch every file that is no weight file into `folder`, checked against the Hub's hash; present ones are kept.

    One too large for that is named and left out. Raises HubError for a path that leaves the folder and for bytes that
    stay wrong.
    """
    others = [file for file in source.files.values() if not file.path.endswith((SHARD_SUFFIX, *_OTHER_WEIGHTS))]
    wanted = [file for file in others if file.num_bytes <= MAX_SMALL_FILE_BYTES]
    for file in others:
        if file.num_bytes > MAX_SMALL_FILE_BYTES:
            hub.notify(f"{file.path} is left out: {file.num_bytes:,} bytes, and no weights. Copy it by hand if need be")
    missing = [file for file in wanted if not _is_there(_small_path(source, file, folder=folder), file)]
    for file, data in _in_threads(lambda file: read_file(hub, source.repo, source.commit, file), missing):
        _keep_small_file(_small_path(source, file, folder=folder), data)


def _in_threads(function: Callable[[T], R], items: Iterable[T]) -> Generator[tuple[T, R]]:
    """Each item with what `function` makes of it, as it comes; an exception here or there ends it at once.

    Threads that wait for a slow answer are left behind then. They hold nothing and nothing waits for them, not even
    the end of the process, as it would for a pool's.
    """
    waiting = deque(items)
    done: SimpleQueue[tuple[T, Future[R]]] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            result: Future[R] = Future()
            try:
                result.set_result(function(item))
            except BaseException as error:  # handed to the thread that waits, which raises it
                result.set_exception(error)
            done.put((item, result))

    num_items = len(waiting)
    for number in range(min(NUM_THREADS, num_items)):
        threading.Thread(target=work, name=f"planning-{number}", daemon=True).start()
    try:
        for _ in range(num_items):
            item, result = _take(done)
            yield item, result.result()
    finally:
        waiting.clear()


def _take(queue: SimpleQueue[T]) -> T:
    """The next of a queue. Python runs a signal's handler only between calls, so none here lasts long."""
    while True:
        with contextlib.suppress(Empty):
            return queue.get(timeout=0.2)


def _small_path(source: RemoteRepo, file: RemoteFile, *, folder: Path) -> Path:
    parts = PurePosixPath(file.path)
    if parts.is_absolute() or ".." in parts.parts or "\\" in file.path or "\0" in file.path:
        raise HubError(f"{source.repo}: lists the file {file.path!r}, a path outside its folder. Refused.")
    return folder / parts


def _is_there(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and not path.is_symlink() and matches(path, file)


def _keep_small_file(target: Path, data: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_bytes(data)
    except OSError as error:
        kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else DestinationWriteError
        raise kind(
            f"{target}: cannot be written ({error.strerror}). Free some room there, or set TMPDIR to a folder on "
            "another disk."
        ) from error


def matches(content: Content, file: RemoteFile) -> bool:
    """Whether these are the bytes that the Hub lists under a path; raises SourceReadError, OSError."""
    digest = hashlib.sha1(b"blob %d\0" % num_bytes_of(content)) if file.sha256 is None else hashlib.sha256()
    for piece in pieces(content):
        digest.update(piece)
    return digest.hexdigest() == (file.git_sha1 if file.sha256 is None else file.sha256)
