"""Shards as tasks of a Ray cluster, in place of the loop over shards. The per-shard function is that of a local run.

Ray places tasks and uses nodes that join. The driver holds the lock, starts the tasks of dead workers again, writes the
journal, commits to the Hub and assembles. With the Hub at an end, a node fetches the sources of its shard, converts it,
uploads it and removes both, in a temporary folder of its own. Doing a shard twice gives the same bytes.

That folder is a room:

    TMPDIR/k2convert-ray-RANDOM-PLACE/    that only this user may enter, with a file `lock` that its task has locked

The driver of a run chooses RANDOM, so that nobody can foresee the name. PLACE counts the rooms of the run on the node.
Each task first removes the rooms of dead tasks, of its own run or an earlier one: those of this user that no process
has locked. No link is followed, and nothing outside a room is touched.
"""

import fcntl
import importlib
import math
import os
import pickle
import re
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any, Final

from k2convert import __version__
from k2convert.checkpoint.files import own_suffix
from k2convert.errors import (
    DestinationError,
    DiskFullError,
    InterruptedRun,
    InvalidCheckpointError,
    K2ConvertError,
    PlanError,
    counted,
    format_bytes,
    require_extra,
)
from k2convert.hub.branch import Branch, branch_name
from k2convert.hub.client import Hub, bound_memory, ignore
from k2convert.hub.download import download_shard
from k2convert.hub.preflight import Target
from k2convert.hub.source import RemoteRepo
from k2convert.job import resources
from k2convert.job.locations import shown_as
from k2convert.job.prepare import Job
from k2convert.job.shard import ShardTask, convert_shard, shard_task
from k2convert.job.transfers import check_for_upload
from k2convert.machine import available_memory, num_cores
from k2convert.records.events import Events
from k2convert.records.ledger import ShardRecord
from k2convert.records.lock import NO_FLOCK

MAX_RETRIES: Final = 5  # of a task whose worker or node died
_POLL_SECONDS: Final = 0.2
_ANSWER_SECONDS: Final = 20
_IDLE_SECONDS: Final = 5.0  # without a running task, until the first line that says so
_IDLE_AGAIN_SECONDS: Final = 60.0
_LAUNCHED: Final = "ray.io/node-group"  # Ray's label of nodes that a launcher or autoscaler started, not `ray start`
_FREE_SHARE: Final = 0.9  # of a node's free disk, unless --max-disk says otherwise
_MAX_PLACES: Final = 256  # shards that a node may have in work
_ROOM_NAME: Final = re.compile(r"(k2convert-ray-[0-9a-f]{16})-[0-9]+")


def new_rooms() -> str:
    """Return how the names of the rooms of one run begin."""
    return f"k2convert-ray-{secrets.token_hex(8)}"


@contextmanager
def open_room(rooms: str, *, shard_bytes: int, max_disk: int | None) -> Generator[Path]:
    """Wait until one more shard fits; make a folder for it, reached through its descriptor and removed at the end."""
    top = Path(tempfile.gettempdir())
    with ExitStack() as stack:
        parent = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, parent)
        while True:
            _sweep_rooms(top, parent, rooms=rooms)
            allowed = max_disk or int(shutil.disk_usage(top).free * _FREE_SHARE)
            if allowed < shard_bytes:
                raise DiskFullError(
                    f"{top}: a shard needs {format_bytes(shard_bytes)}, but this node may use {format_bytes(allowed)}. "
                    "Allow more with --max-disk, or set TMPDIR on the node to a larger disk."
                )
            paths = (top / f"{rooms}-{place}" for place in range(min(allowed // shard_bytes, _MAX_PLACES)))
            path = next((path for path in paths if _made_room(path, parent)), None)
            if path is not None and (folder := _claim_room(path, parent, stack)) is not None:
                break
            time.sleep(_POLL_SECONDS)
        inside = Path(f"/proc/self/fd/{folder}")
        with shown_as(str(path), inside):
            yield inside


def _made_room(path: Path, parent: int) -> bool:
    try:
        os.mkdir(path.name, 0o700, dir_fd=parent)
    except FileExistsError:
        return False
    return True


def _sweep_rooms(top: Path, parent: int, *, rooms: str) -> None:
    """Remove the rooms of dead tasks; raises DestinationError if a name of this run is not a room of this user."""
    for name in os.listdir(parent):
        if match := _ROOM_NAME.fullmatch(name):
            try:
                with ExitStack() as stack:
                    _claim_room(top / name, parent, stack)
            except DestinationError:
                if match[1] == rooms:
                    raise


def _claim_room(path: Path, parent: int, stack: ExitStack) -> int | None:
    """Lock a room and return its descriptor; None if a task has it. DestinationError if others may enter."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with ExitStack() as opened:
        try:
            folder = os.open(path.name, flags | os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent)
            opened.callback(os.close, folder)
            found = os.fstat(folder)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError
            lock = os.open("lock", flags | os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder)
            opened.callback(os.close, lock)
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                raise PermissionError
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = os.path.samestat(found, os.stat(path.name, dir_fd=parent, follow_symlinks=False))
        except (BlockingIOError, FileNotFoundError):
            return None
        except OSError as error:
            if error.errno in NO_FLOCK:
                raise DestinationError(
                    f"{path}: this file system has no flock ({error.strerror}). Set TMPDIR on the node to a local disk."
                ) from None
            raise DestinationError(
                f"{path}: is not a folder that k2convert made for this user alone. Remove it, or set TMPDIR on the "
                "node to a folder of your own."
            ) from None
        if not is_current:
            return None
        opened.callback(_remove_room, path.name, folder, parent)
        stack.push(opened.pop_all())
        return folder


def _remove_room(name: str, folder: int, parent: int) -> None:
    """Empty an open room, then remove it. Whatever else has its name by now has content, and stays."""
    shutil.rmtree(".", ignore_errors=True, dir_fd=folder)
    with suppress(OSError):
        os.rmdir(name, dir_fd=parent)


def do_on_node(
    task: ShardTask,
    remote: RemoteRepo | None,
    target: Target | None,
    room: Callable[[], AbstractContextManager[Path]],
    *,
    cpus: int,
) -> ShardRecord:
    """Convert one shard on this machine, with the Hub in a `room`; return its record. Raises K2ConvertError."""
    uses_hub = remote is not None or target is not None
    resources.own_process()
    memory = available_memory() * cpus // max(cpus, num_cores())  # other tasks of the node have the rest
    inflight_bytes = resources.inflight_bytes(uses_hub=uses_hub, cores=cpus, memory=memory)
    resources.settle_runtime(uses_hub=uses_hub, inflight=inflight_bytes)
    task = replace(task, suffix=own_suffix(), inflight_bytes=inflight_bytes)
    if not uses_hub:
        with resources.open_threads(1, num_converting=cpus) as threads:
            return convert_shard(task, threads=threads)
    bound_memory()
    with room() as folder, resources.open_threads(1, num_converting=cpus) as threads:
        if remote is not None:
            for name in task.shard.source_shards:
                download_shard(Hub(), remote, name, target=folder / name, stop=Event())
            task = replace(task, source_folder=folder)
        if target is None:
            return convert_shard(task, threads=threads)
        result = folder / "result"
        result.mkdir()
        task = replace(task, destination=result)
        record = check_for_upload(task, convert_shard(task, threads=threads))
        branch = Branch(Hub(), target, branch_name(task.fingerprint))
        branch.send(record.shard, result / record.shard, sha256=record.sha256)
        return record


def answer_on_node(data: bytes, *, cpus: int) -> bytes:
    """Do a pickled call of `do_on_node`; returns the pickled record, or the expected error that stopped it."""
    try:
        return pickle.dumps(pickle.loads(data)(cpus=cpus))
    except InvalidCheckpointError as error:  # has an exit code of its own
        return pickle.dumps(InvalidCheckpointError(str(error)))
    except K2ConvertError as error:  # of any class: some have arguments of their own
        return pickle.dumps(K2ConvertError(str(error)))


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a cluster. `lack` says why no shard fits, `can_grow` whether more nodes may be started."""

    nodes: int
    cpus: int
    shards_at_a_time: int
    lack: str = ""
    can_grow: bool = False


class _Load:
    """Which shards of a run wait for a node, and which run on one; any thread may ask whether to say that none runs."""

    def __init__(self) -> None:
        self._lock, self._running, self._due = Lock(), dict[str, bool](), math.inf

    def update(self, shard: str, *, is_running: bool) -> None:
        with self._lock:
            if not self._running or is_running:
                self._due = time.monotonic() + _IDLE_SECONDS
            self._running[shard] = is_running

    def remove(self, shard: str) -> None:
        with self._lock:
            del self._running[shard]

    def idle_line(self) -> str | None:
        """Return the line that says that every shard waits, when it is due."""
        with self._lock:
            now = time.monotonic()
            if any(self._running.values()):
                self._due = now + _IDLE_SECONDS
            elif now >= self._due:
                self._due = now + _IDLE_AGAIN_SECONDS
                return f"waiting for a node: {counted(len(self._running), 'shard')} queued, 0 running"
            return None


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connection to a Ray cluster. `max_disk` is what a node may use with the Hub, None for most of what is free."""

    ray: Any
    remote_function: Any
    cpus: int
    max_disk: int | None
    rooms: str = field(default_factory=new_rooms)
    _load: _Load = field(default_factory=_Load)

    @property
    def capacity(self) -> Capacity:
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        offers = [int(node["Resources"].get("CPU", 0)) for node in nodes]
        at_a_time = sum(offer // self.cpus for offer in offers)
        largest = max(offers, default=0)
        lack = ""
        if largest == 0:
            lack = "no node has CPUs: start one with `ray start`"
        elif not at_a_time:
            lack = f"no node has {self.cpus} CPUs (largest: {largest}): pass --cpus-per-shard {largest}"
        can_grow = largest == 0 or any(_LAUNCHED in node.get("Labels", {}) for node in nodes)
        return Capacity(len(nodes), sum(offers), at_a_time, lack, can_grow)

    def convert(
        self, name: str, work: "partial[ShardRecord]", *, stop: Event, events: Events
    ) -> tuple[str, ShardRecord]:
        """Do one shard on some node; return its name and the record. Raises InterruptedRun, K2ConvertError."""
        ray = self.ray
        data = pickle.dumps(work)
        retries = 0
        report = None
        while report is None:
            try:
                report = self._report(name, data, stop, events)
            except ray.exceptions.RayTaskError:  # an unexpected error in the task keeps its traceback
                raise
            except ray.exceptions.RayError as error:
                retries += 1
                if retries <= MAX_RETRIES:
                    events.note(f"{name}: its worker died; converting it again")
                    continue
                lines = str(error).strip().splitlines()
                raise K2ConvertError(
                    f"{name}: its task was lost {MAX_RETRIES + 1} times ({lines[-1] if lines else error}). "
                    "Finished work is kept: check the cluster and run the same command again."
                ) from error
        node, answer = report
        if isinstance(answer, str):
            raise PlanError(f"node {node} has {answer}, but this is k2convert {__version__}. Install the same there.")
        result = pickle.loads(answer)
        if isinstance(result, K2ConvertError):
            result.args = (f"node {node}: {result}",)
            raise result
        return node, result

    def _report(self, name: str, data: bytes, stop: Event, events: Events) -> Any:
        """Start a task and return its last report. It has two: it started, and what it did."""
        reports = self.remote_function.remote(data)
        report = None
        try:
            for is_running in (False, True):
                self._load.update(name, is_running=is_running)
                while not self.ray.wait([reports], timeout=_POLL_SECONDS)[0]:
                    if stop.is_set():
                        self.ray.cancel(reports, force=True)
                        raise InterruptedRun
                    if line := self._load.idle_line():
                        lack = self.capacity.lack
                        events.note(f"{line}; {lack}, or wait until the cluster grows" if lack else line)
                report = self.ray.get(next(reports))
        finally:
            self._load.remove(name)
        return report


def convert_on_node(cluster: Cluster, job: Job, name: str, *, stop: Event, events: Events) -> ShardRecord:
    """Have a node convert one shard of a job and, for the Hub, fetch and send it; returns its record."""
    limits = job.limits
    task = shard_task(job, name)
    folders = {"source_folder": task.source_folder.absolute(), "destination": task.destination.absolute()}
    task = replace(task, **folders)
    sizes = (sum(limits.source_bytes.get(s, 0) for s in item.sources) + item.output_bytes for item in job.items)
    room = partial(open_room, cluster.rooms, shard_bytes=max(sizes), max_disk=cluster.max_disk)
    work = partial(do_on_node, task, job.source.remote, job.target, room)
    node, record = cluster.convert(name, work, stop=stop, events=events)
    shard = task.shard
    events.progress(bytes_in=shard.bytes_in, bytes_out=shard.data_bytes, tensors=shard.num_outputs)
    events.note(f"node {node}: {name}")
    return record


@contextmanager
def connect(address: str, *, cpus: int, max_disk: int | None) -> Generator[Cluster]:
    """Connect to a running Ray cluster, where a task takes `cpus` CPUs; raises PlanError if none can do one."""
    require_extra("ray", purpose="--ray")
    ray: Any = importlib.import_module("ray")  # it has no complete types
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if match := re.fullmatch(r"([^/:]+):([0-9]{1,5})", address):  # Ray itself would try for minutes
            socket.create_connection((match[1], int(match[2])), timeout=_ANSWER_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        module: Any = importlib.import_module("ray._private.worker")
        if hasattr(module, "print_to_stdstream"):  # a paragraph on every dead worker, which no option turns off
            module.print_to_stdstream = ignore
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(f"--ray {address}: no cluster ({reason}). Start one with `ray start`.") from None
    finally:
        for number, handler in handlers.items():  # Ray replaces them
            signal.signal(number, handler)

    version = __version__

    def on_node(data: bytes) -> Any:  # sent by value: a node may have another k2convert, or none
        from importlib import import_module

        yield None
        ray: Any = import_module("ray")
        node = f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:6]})"
        try:
            from k2convert import __version__ as found
        except ImportError:
            yield node, "no k2convert"
            return
        if found != version:
            yield node, f"k2convert {found}"
            return
        from k2convert.job.ray import answer_on_node

        yield node, answer_on_node(data, cpus=cpus)

    options = {"num_cpus": cpus, "max_retries": 0, "num_returns": "streaming"}
    try:
        remote_function = ray.remote(**options, scheduling_strategy="SPREAD")(on_node)
        cluster = Cluster(ray, remote_function, cpus, max_disk)
        found = cluster.capacity
        if found.lack and not found.can_grow:
            raise PlanError(f"--ray {address}: {found.lack}.")
        yield cluster
    finally:
        ray.shutdown()
