"""Shards as tasks of a Ray cluster, in place of the loop over shards. The per-shard function is that of a local run.

Ray places tasks, starts those of dead workers again and takes in nodes that join. The driver holds the lock, writes the
journal, commits to the Hub and assembles. With the Hub at an end, a node fetches the sources of its shard, converts
it, uploads it and removes both, in a temporary folder of its own. A task that a killed node began leaves at most a
temporary file; doing a shard twice gives the same bytes.
"""

import fcntl
import importlib
import pickle
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, Final

from k2convert import __version__
from k2convert.checkpoint.files import own_suffix
from k2convert.checkpoint.names import UPLOADS_FOLDER, WORK_FOLDER
from k2convert.errors import DiskFullError, InvalidCheckpointError, K2ConvertError, PlanError, require_extra
from k2convert.hub.branch import Branch
from k2convert.hub.client import Hub
from k2convert.hub.download import download_shard
from k2convert.hub.preflight import Target
from k2convert.hub.source import RemoteRepo
from k2convert.hub.xet import bound_memory
from k2convert.job import machine
from k2convert.job.shard import InterruptedRun, ShardTask, convert_shard
from k2convert.job.uploads import Uploads
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord

MAX_RETRIES: Final = 5  # of a task whose worker or node died
_FREE_SHARE: Final = 0.9  # of a node's free disk, unless --max-disk says otherwise
_MAX_PLACES: Final = 256  # shards that a node may have in work
_POLL_SECONDS: Final = 0.2
_ANSWER_SECONDS: Final = 20


@dataclass(frozen=True, slots=True)
class NodeTask:
    """One shard's work on a node. `remote` is the source if it is on the Hub; `target` and `branch` are the result's.

    `disk_bytes` is what the sources and result of any shard of the job take, `max_disk` what a node may use.
    """

    task: ShardTask
    remote: RemoteRepo | None = None
    target: Target | None = None
    branch: str = ""
    disk_bytes: int = 0
    max_disk: int | None = None


@dataclass(frozen=True, slots=True)
class NodeResult:
    """What a node did: the shard's record, and with a result on the Hub the files that go to the branch with it."""

    record: ShardRecord
    documents: dict[str, bytes] = field(default_factory=dict[str, bytes])
    node: str = ""


def do_on_node(work: NodeTask, *, cpus: int) -> NodeResult:
    """Convert one shard on this machine; raises K2ConvertError."""
    uses_hub = work.remote is not None or work.target is not None
    machine.settle_runtime(uses_hub=uses_hub)
    inflight_bytes = machine.inflight_bytes(uses_hub=uses_hub, cores=cpus)
    task = replace(work.task, suffix=own_suffix(), inflight_bytes=inflight_bytes)
    if not uses_hub:
        with machine.open_threads(1, num_converting=cpus) as threads:
            return NodeResult(convert_shard(task, threads=threads))
    bound_memory()
    with _room(work) as folder, machine.open_threads(1, num_converting=cpus) as threads:
        if work.remote is not None:
            for name in task.shard.source_shards:
                download_shard(Hub(), work.remote, name, target=folder / name, stop=Event())
            task = replace(task, source_folder=folder)
        if work.target is None:
            return NodeResult(convert_shard(task, threads=threads))
        result = folder / "result"
        (result / WORK_FOLDER / UPLOADS_FOLDER).mkdir(parents=True)
        record = convert_shard(replace(task, destination=result), threads=threads)
        uploads = Uploads(Branch(Hub(), work.target, work.branch), Journal(result), {record.shard: record})
        return NodeResult(record, uploads.send_only(record.shard))


def answer_on_node(data: bytes, *, cpus: int) -> bytes:
    """Do a pickled NodeTask; returns the pickled NodeResult, or the expected error that stopped it."""
    try:
        return pickle.dumps(do_on_node(pickle.loads(data), cpus=cpus))
    except InvalidCheckpointError as error:  # has an exit code of its own
        return pickle.dumps(InvalidCheckpointError(str(error)))
    except K2ConvertError as error:  # of any class: some have arguments of their own
        return pickle.dumps(K2ConvertError(str(error)))


@contextmanager
def _room(work: NodeTask) -> Generator[Path]:
    """Wait until this machine has room for one more shard, and make a folder for it."""
    root = Path(tempfile.gettempdir()) / f"k2convert-{work.task.fingerprint[:12]}"
    root.mkdir(exist_ok=True)
    allowed = work.max_disk or int(shutil.disk_usage(root).free * _FREE_SHARE)
    if allowed < work.disk_bytes:
        raise DiskFullError(
            f"{root}: a shard takes {work.disk_bytes:,} bytes, but this node may use {allowed:,}. "
            "Allow more with --max-disk, or set TMPDIR on the node to a larger disk."
        )
    with ExitStack() as stack:
        while (mine := _take_place(root, min(allowed // work.disk_bytes, _MAX_PLACES), stack)) is None:
            time.sleep(_POLL_SECONDS)
        mine.mkdir()
        try:
            yield mine
        finally:
            shutil.rmtree(mine, ignore_errors=True)


def _take_place(root: Path, number: int, stack: ExitStack) -> Path | None:
    """Lock one of so many places until `stack` ends; returns its folder, empties what killed tasks left in others."""
    mine: Path | None = None
    for place in range(number):
        lock = (root / f"{place}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        shutil.rmtree(root / str(place), ignore_errors=True)
        if mine is None:
            mine = root / str(place)
            stack.enter_context(lock)
        else:
            lock.close()
    return mine


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connection to a Ray cluster. `max_disk` is what a node may use with the Hub, None for most of what is free."""

    ray: Any
    remote_function: Any
    max_disk: int | None

    def convert(self, work: NodeTask, *, stop: Event) -> NodeResult:
        """Do one shard on some node; raises InterruptedRun when `stop` is set, K2ConvertError naming the node."""
        ray, work = self.ray, replace(work, max_disk=self.max_disk)
        reference = self.remote_function.remote(pickle.dumps(work))
        while not ray.wait([reference], timeout=_POLL_SECONDS)[0]:
            if stop.is_set():
                ray.cancel(reference, force=True)
                raise InterruptedRun
        try:
            node, answer = ray.get(reference)
        except ray.exceptions.RayTaskError:  # an unexpected error in the task keeps its traceback
            raise
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            raise K2ConvertError(
                f"{work.task.shard.name}: its task was lost {MAX_RETRIES + 1} times ({lines[-1] if lines else error}). "
                "Finished work is kept: check the cluster and run the same command again."
            ) from error
        if isinstance(answer, str):
            raise PlanError(f"node {node} has {answer}, but this is k2convert {__version__}. Install the same there.")
        result = pickle.loads(answer)
        if isinstance(result, K2ConvertError):
            result.args = (f"node {node}: {result}",)
            raise result
        return replace(result, node=node)


@contextmanager
def connect(address: str, *, cpus: int, with_gpu: bool, max_disk: int | None) -> Generator[Cluster]:
    """Connect to a running Ray cluster. A task takes `cpus` CPUs, and a GPU if asked; raises PlanError without one."""
    require_extra("ray", purpose="--ray")
    ray: Any = importlib.import_module("ray")  # it has no complete types
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if match := re.fullmatch(r"([^/:]+):([0-9]{1,5})", address):  # Ray itself would try for minutes
            socket.create_connection((match[1], int(match[2])), timeout=_ANSWER_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(f"--ray {address}: no cluster ({reason}). Start one with `ray start`.") from None
    finally:
        for number, handler in handlers.items():  # Ray replaces them
            signal.signal(number, handler)

    version = __version__

    def on_node(data: bytes) -> tuple[str, bytes | str]:  # sent by value: a node may have another k2convert, or none
        from importlib import import_module

        ray: Any = import_module("ray")
        node = f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:6]})"
        try:
            from k2convert import __version__ as found
        except ImportError:
            return node, "no k2convert"
        if found != version:
            return node, f"k2convert {found}"
        from k2convert.job.ray import answer_on_node

        return node, answer_on_node(data, cpus=cpus)

    options = {"num_cpus": cpus, "num_gpus": int(with_gpu), "max_retries": MAX_RETRIES}
    try:
        yield Cluster(ray, ray.remote(**options, scheduling_strategy="SPREAD")(on_node), max_disk)
    finally:
        ray.shutdown()
