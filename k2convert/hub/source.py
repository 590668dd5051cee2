"""A source on the Hub, pinned to one commit: its file list, its shard headers, its small files.

Planning a checkpoint of 594 GB needs its index, its config and 62 headers of half a megabyte: two range requests per
shard, in threads. This module never downloads a shard.
"""

import errno
import hashlib
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from typing import Any, Final, TypeVar, cast

from k2convert.checkpoint.files import (
    MAX_SMALL_FILE_BYTES,
    Content,
    num_bytes_of,
    pieces,
    read_json_file,
    read_text_file,
)
from k2convert.checkpoint.header import ShardHeader, check_header_length, parse_header
from k2convert.checkpoint.index import Checkpoint, build_checkpoint
from k2convert.checkpoint.names import CARD_NAME, CONFIG_NAME, INDEX_NAME, SHARD_SUFFIX, SINGLE_SHARD_NAME
from k2convert.errors import DestinationWriteError, DiskFullError, HubError, MalformedFileError, format_bytes, quoted
from k2convert.hub.client import FILE_SCHEME, MAIN, NUM_ATTEMPTS, Hub, RepoRef, is_offline
from k2convert.hub.request_errors import HubRequestError

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = 16
_COMMIT = re.compile("[0-9a-f]{40}")
_SHA256_DIGITS: Final = 64
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
        """The file of a shard; raises HubError if it is missing or the Hub has no sha256 for it."""
        file = self.files.get(name)
        where = f"{self.repo} at {self.commit[:12]}"
        if file is None:
            raise HubError(f"{where}: {name} is missing, but the index names it. Choose a complete revision.")
        if file.sha256 is None:
            raise HubError(
                f"{where}: the Hub has no sha256 for {name}, because it is not in LFS. Choose a repository with its "
                "shards in LFS."
            )
        return file


def resolve_source(hub: Hub, ref: RepoRef) -> RemoteRepo:
    """Resolve a revision to its commit, and list its files; with HF_HUB_OFFLINE, those of the local cache."""
    if is_offline():
        return _cached_repo(ref)
    api = hub.api()
    action = f"look up {ref.repo}" + (f" at revision {ref.revision}" if ref.revision else "")
    info = hub.call(action, lambda: api.repo_info(ref.repo, revision=ref.revision))
    commit = info.sha
    if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
        raise HubError(f"could not {action}: the Hub names no commit. Check that the repository is not empty.")
    files = list_files(hub, ref.repo, commit)
    return RemoteRepo(ref.repo, commit, bool(info.private), files)


def find_commit(hub: Hub, repo: str, commit: str | None) -> RemoteRepo | None:
    """Return a repository at a commit that a job or a result names; None if the Hub, or offline the cache, lacks it.

    After a force-push, commits of before are gone. None as `commit` is main.
    """
    try:
        return resolve_source(hub, RepoRef(repo, commit))
    except HubError as error:
        if isinstance(error, HubRequestError) and error.status != 404:
            raise
        return None


def changed_files(before: RemoteRepo, after: RemoteRepo) -> list[str]:
    """Return the paths of the files that differ between two commits, or that one of them lacks.

    Those that no result depends on do not count: the model card, hidden files.
    """
    paths = before.files.keys() | after.files.keys()
    changed = sorted(path for path in paths if before.files.get(path) != after.files.get(path))
    return [path for path in changed if path != CARD_NAME and not path.startswith(".") and "/." not in path]


def _cached_repo(ref: RepoRef) -> RemoteRepo:
    """Return what the local cache has of a repository; raises HubError if that is nothing.

    A file in the cache is a link to BLOBS/HASH: the sha256 of a file in LFS, git's hash of any other.
    """
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE) / f"models--{ref.repo.replace('/', '--')}"
    commit = ref.revision or MAIN
    with suppress(OSError):
        if not _COMMIT.fullmatch(commit):
            commit = (root / "refs" / commit).read_text().strip()
    snapshot = root / "snapshots" / commit
    files = dict[str, RemoteFile]()
    for path in sorted(snapshot.rglob("*")) if _COMMIT.fullmatch(commit) else ():
        if path.is_file():
            name = path.relative_to(snapshot).as_posix()
            blob = path.resolve()
            is_large = len(blob.name) == _SHA256_DIGITS
            files[name] = RemoteFile(
                name, blob.stat().st_size, blob.name if is_large else None, None if is_large else blob.name
            )
    if not files:
        raise HubError(
            f"{ref}: HF_HUB_OFFLINE is set, and {root} does not hold it. Unset it, or run `hf download {ref.repo}` "
            "where there is a network."
        )
    return RemoteRepo(ref.repo, commit, private=True, files=files)


def _check_cached(source: RemoteRepo, needed: Iterable[str]) -> None:
    """Refuse a repository of which the cache lacks files, if the cache is all there is (HubError)."""
    missing = sorted(set(needed) - source.files.keys())
    if missing and is_offline():
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise HubError(
            f"{source.repo} at {source.commit[:12]}: HF_HUB_OFFLINE is set, and the cache lacks "
            f"{', '.join(missing[:3])}{more}. Unset it, or run `hf download {source.repo}` where there is a network."
        )


def list_files(hub: Hub, repo: str, revision: str) -> dict[str, RemoteFile]:
    """All files at a revision, by path."""
    api = hub.api()

    def listing() -> dict[str, RemoteFile]:
        from huggingface_hub.hf_api import RepoFile

        files: dict[str, RemoteFile] = {}
        for entry in api.list_repo_tree(repo, recursive=True, revision=revision):
            if isinstance(entry, RepoFile):
                sha256 = entry.lfs.sha256 if entry.lfs is not None else None
                file = RemoteFile(entry.path, entry.size, sha256, None if sha256 else entry.blob_id)
                files[entry.path] = _checked(file)
        return files

    return hub.call(f"list the files of {repo}", listing)


def _checked(file: RemoteFile) -> RemoteFile:
    """Return the file; raises TypeError if the listing gave something else than text and counts."""
    texts: tuple[object, ...] = (file.path, file.sha256 or file.git_sha1)
    if not all(isinstance(text, str) for text in texts) or type(file.num_bytes) is not int or file.num_bytes < 0:
        raise TypeError(f"not a file: {quoted(file)}")
    return file


def file_url(hub: Hub, source: RemoteRepo, path: str, *, is_cached: bool = True) -> str:
    """The address of a file's bytes at the commit, or of the file in the local cache if it is there and `is_cached`."""
    from huggingface_hub import hf_hub_url, try_to_load_from_cache

    if is_cached and _COMMIT.fullmatch(source.commit):
        cached = try_to_load_from_cache(source.repo, path, revision=source.commit)
        size = source.files[path].num_bytes
        if isinstance(cached, str) and Path(cached).is_file() and Path(cached).stat().st_size == size:
            return f"{FILE_SCHEME}{Path(cached).absolute()}"
    return hf_hub_url(source.repo, path, revision=source.commit, endpoint=hub.endpoint)


def read_file(hub: Hub, repo: str, revision: str, file: RemoteFile) -> bytes:
    """The bytes of a small file at a commit or a branch, checked against its hash; HubError if they stay wrong."""
    source = RemoteRepo(repo, revision, private=True, files={file.path: file})
    for attempt in range(NUM_ATTEMPTS):
        url = file_url(hub, source, file.path, is_cached=attempt == 0)
        data = hub.fetch_range(url, begin=0, end=file.num_bytes)
        if matches(data, file):
            return data
        hub.notify(f"{file.path} arrived with a wrong hash; fetching it again")
    raise HubError(
        f"{repo}/{file.path}: arrived {NUM_ATTEMPTS} times with bytes that do not match the Hub's hash. "
        "Check the proxy."
    )


def fetch_header(hub: Hub, source: RemoteRepo, shard: str, *, where: str | None = None) -> ShardHeader:
    """Read one shard's header with two range requests: its length, then its JSON. `where` names it in messages."""
    file = source.shard(shard)
    url = file_url(hub, source, shard)
    where = where or f"{source.repo}/{shard}"
    prefix = hub.fetch_range(url, begin=0, end=min(8, file.num_bytes))
    length = check_header_length(prefix, shard=where, file_bytes=file.num_bytes)
    raw = prefix + hub.fetch_range(url, begin=8, end=8 + length)
    return parse_header(raw, shard=shard, file_bytes=file.num_bytes, where=where)


def open_remote(hub: Hub, source: RemoteRepo, *, folder: Path) -> Checkpoint:
    """Fetch small files into `folder` and all headers into memory; raises HubError, CheckpointError."""
    fetch_small_files(hub, source, folder=folder)
    index = None
    if INDEX_NAME in source.files:
        index = read_json_file(folder / INDEX_NAME)
    if index is None and SINGLE_SHARD_NAME not in source.files:
        _check_cached(source, (INDEX_NAME,))
        raise HubError(
            f"{source.repo} at {source.commit[:12]}: not a safetensors checkpoint (it has neither {INDEX_NAME} "
            f"nor {SINGLE_SHARD_NAME}). Name a repository that has one of them."
        )
    present = sorted(path for path in source.files if "/" not in path and path.endswith(SHARD_SUFFIX))

    named = _named_shards(index)
    _check_cached(source, (*named, CONFIG_NAME))
    wanted = [shard for shard in present if shard in named]
    headers = dict(_in_threads(lambda name: fetch_header(hub, source, name), wanted))

    def load(shard: str) -> ShardHeader:
        if shard not in headers:
            source.shard(shard)
        return headers[shard]

    config_text = read_text_file(folder / CONFIG_NAME)
    return build_checkpoint(folder=folder, config_text=config_text, index=index, present=present, load=load)


def read_headers(hub: Hub, source: RemoteRepo, *, folder: Path) -> dict[str, ShardHeader | MalformedFileError]:
    """Read the headers of all shards; a damaged one gives the error that a file in `folder` would. Raises HubError."""

    def read(shard: str) -> ShardHeader | MalformedFileError:
        try:
            return fetch_header(hub, source, shard, where=str(folder / shard))
        except MalformedFileError as error:
            return error

    return dict(_in_threads(read, [path for path in source.files if path.endswith(SHARD_SUFFIX) and "/" not in path]))


def mark_other_files(source: RemoteRepo, *, folder: Path) -> None:
    """Create an empty file in `folder` for each file of the repository that is not there, so that its name is seen."""
    for file in source.files.values():
        path = _small_path(source, file, folder=folder)
        if not path.exists():
            _keep_small_file(path, b"")


def _named_shards(index: dict[str, object] | None) -> set[str]:
    """The shards that an index names, even a malformed index: `build_checkpoint` checks its form."""
    if index is None:
        return {SINGLE_SHARD_NAME}
    named: Any = index.get("weight_map")
    shards = cast(dict[str, object], named).values() if isinstance(named, dict) else ()
    return {shard for shard in shards if isinstance(shard, str)}


def fetch_small_files(hub: Hub, source: RemoteRepo, *, folder: Path) -> None:
    """Fetch every file but weights and large ones into `folder`, checked by its hash; raises HubError."""
    others = [file for file in source.files.values() if not file.path.endswith((SHARD_SUFFIX, *_OTHER_WEIGHTS))]
    wanted = [file for file in others if file.num_bytes <= MAX_SMALL_FILE_BYTES]
    for file in others:
        if file.num_bytes > MAX_SMALL_FILE_BYTES:
            hub.warn(f"{file.path} is left out: {format_bytes(file.num_bytes)}. Copy it by hand if you need it")
    paths = {file: _small_path(source, file, folder=folder) for file in wanted}
    missing = [file for file, p in paths.items() if not p.is_file() or p.is_symlink() or not matches(p, file)]
    for file, data in _in_threads(lambda file: read_file(hub, source.repo, source.commit, file), missing):
        _keep_small_file(paths[file], data)


def _in_threads(function: Callable[[T], R], items: Iterable[T]) -> Generator[tuple[T, R]]:
    """Each item with its `function(item)`, in order of completion; the first exception ends the call at once.

    Threads that still wait for an answer are then left behind. They are daemon threads, so they do not keep the process
    alive. This is why it is not a ThreadPoolExecutor: Python joins its threads at exit, so Ctrl-C would wait for the
    slowest answer, up to an hour if the Hub asks to retry that late.
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
            except BaseException as error:  # the consumer raises it
                result.set_exception(error)
            done.put((item, result))

    num_items = len(waiting)
    for number in range(min(NUM_THREADS, num_items)):
        threading.Thread(target=work, name=f"planning-{number}", daemon=True).start()
    try:
        for _ in range(num_items):
            item, result = done.get()
            yield item, result.result()
    finally:
        waiting.clear()


def _small_path(source: RemoteRepo, file: RemoteFile, *, folder: Path) -> Path:
    parts = PurePosixPath(file.path)
    if parts.is_absolute() or ".." in parts.parts or "\\" in file.path or "\0" in file.path:
        raise HubError(f"{source.repo}: lists {quoted(file.path)}, a path outside its folder. Do not use it.")
    return folder / parts


def _keep_small_file(target: Path, data: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_bytes(data)
    except OSError as error:
        kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else DestinationWriteError
        raise kind(
            f"{target}: cannot be written ({error.strerror}). Free some space, or set TMPDIR to a folder on another "
            "disk."
        ) from error


def matches(content: Content, file: RemoteFile) -> bool:
    """Return whether the content has the hash that the Hub lists for the file; raises SourceReadError, OSError."""
    digest = hashlib.sha1(b"blob %d\0" % num_bytes_of(content)) if file.sha256 is None else hashlib.sha256()
    for piece in pieces(content):
        digest.update(piece)
    return digest.hexdigest() == (file.git_sha1 if file.sha256 is None else file.sha256)
