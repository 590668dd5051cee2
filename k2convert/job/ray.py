"""Shards as tasks of a Ray cluster, in place of the loop over shards. Each is converted as in a run on one machine.

Ray assigns tasks, also to nodes that join later. The driver holds the lock, starts the tasks of dead workers again,
records shards, commits to the Hub and assembles. With the Hub at an end, a node fetches the sources of its shard,
converts it and uploads it in a temporary folder. A shard that is done twice has the same bytes.
"""

import importlib
import pickle
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Final

from k2convert import __version__
from k2convert.checkpoint.files import own_suffix
from k2convert.checkpoint.folders import temporary_folder
from k2convert.errors import (
    InterruptedRun,
    InvalidCheckpointError,
    K2ConvertError,
    PlanError,
    check_disk,
    require_extra,
)
from k2convert.hub.branch import Branch, Upload, branch_name
from k2convert.hub.client import Hub, bound_memory, ignore
from k2convert.hub.download import download_shard
from k2convert.hub.preflight import Target
from k2convert.hub.source import RemoteRepo
from k2convert.job import resources
from k2convert.job.prepare import Job
from k2convert.job.shard import ShardTask, convert_shard, shard_task
from k2convert.job.transfers import check_for_upload
from k2convert.machine import available_memory, num_cores
from k2convert.records.events import Events
from k2convert.records.ledger import ShardRecord

MAX_RETRIES: Final = 5  # of a task whose worker or node died
_POLL_SECONDS: Final = 0.2
_ANSWER_SECONDS: Final = 20
_CPUS_PER_SHARD: Final = 4  # of a task, if a node has so many


@contextmanager
def node_folder(*, shard_bytes: int) -> Generator[Path]:
    """Make a folder on this node for one shard and its sources; raises DiskFullError if they have no room."""
    check_disk(
        f"{tempfile.gettempdir()}: a shard",
        needed=shard_bytes,
        allowed=shutil.disk_usage(tempfile.gettempdir()).free,
        remedy="Set TMPDIR on the node to a larger disk, or start it with fewer CPUs: fewer shards at a time.",
    )
    with temporary_folder() as folder:
        yield folder


@dataclass(frozen=True, slots=True)
class NodeTask:
    """Task of a node: convert a shard, and with the Hub fetch its sources and send it."""

    task: ShardTask
    remote: RemoteRepo | None
    target: Target | None
    shard_bytes: int

    def run(self, *, cpus: int, hub: Hub) -> ShardRecord:
        """Convert the shard on this machine with `cpus` threads; raises K2ConvertError."""
        uses_hub = self.remote is not None or self.target is not None
        resources.own_process()
        memory = available_memory() * cpus // max(cpus, num_cores())  # other tasks of the node have the rest
        inflight_bytes = resources.inflight_bytes(uses_hub=uses_hub, cores=cpus, memory=memory)
        resources.configure_runtime(uses_hub=uses_hub, inflight=inflight_bytes)
        task = replace(self.task, suffix=own_suffix(), inflight_bytes=inflight_bytes)
        with resources.open_threads(1, num_converting=cpus) as threads:
            if not uses_hub:
                return convert_shard(task, threads=threads)
            bound_memory()
            with node_folder(shard_bytes=self.shard_bytes) as folder:
                if self.remote is not None:
                    for name in task.shard.source_shards:
                        download_shard(hub, self.remote, name, target=folder / name, stop=Event())
                    task = replace(task, source_folder=folder)
                if self.target is None:
                    return convert_shard(task, threads=threads)
                task = replace(task, destination=folder / "result")
                task.destination.mkdir()
                record = check_for_upload(task, convert_shard(task, threads=threads))
                branch = Branch(hub, self.target, branch_name(task.fingerprint))
                assert record.sha256 is not None  # as it is written for upload
                path = task.destination / record.shard
                branch.send(Upload(record.shard, path, record.sha256, record.file_bytes))
                return record


def answers_on_node(data: bytes, *, cpus: int) -> Generator[str | bytes]:
    """Run a pickled NodeTask; yields its notices, then the pickled record, or the expected error that stopped it."""
    answers: SimpleQueue[str | bytes | BaseException] = SimpleQueue()

    def work() -> None:
        try:
            answers.put(pickle.dumps(pickle.loads(data).run(cpus=cpus, hub=Hub(notify=answers.put))))
        except InvalidCheckpointError as error:  # has an exit code of its own
            answers.put(pickle.dumps(InvalidCheckpointError(str(error))))
        except K2ConvertError as error:  # of any class: some have arguments of their own
            answers.put(pickle.dumps(K2ConvertError(str(error))))
        except BaseException as error:
            answers.put(error)

    Thread(target=work, daemon=True).start()
    while isinstance(answer := answers.get(), str):
        yield answer
    if isinstance(answer, BaseException):
        raise answer
    yield answer


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connection to a Ray cluster; a task takes `cpus` CPUs."""

    ray: Any
    remote_function: Any
    cpus: int

    @property
    def capacity(self) -> dict[str, int]:
        """Return how many nodes and CPUs the cluster has, and how many shards they convert at a time."""
        offers = _offers(self.ray)
        at_a_time = sum(offer // self.cpus for offer in offers)
        return {"nodes": len(offers), "cpus": sum(offers), "shards_at_a_time": at_a_time}

    def run(self, name: str, data: bytes, *, stop: Event, events: Events) -> tuple[str, Any]:
        """Run a pickled NodeTask on some node, again if its worker dies; return the node's name and its answer."""
        retries = 0
        while True:
            answers = self.remote_function.remote(data)
            try:
                while True:
                    while not self.ray.wait([answers], timeout=_POLL_SECONDS)[0]:
                        if stop.is_set():
                            self.ray.cancel(answers, force=True)
                            raise InterruptedRun
                    node, is_last, answer = self.ray.get(next(answers))
                    if is_last:
                        return node, answer
                    events.note(f"node {node}: {answer}")
            except self.ray.exceptions.RayTaskError:  # an unexpected error in the task keeps its traceback
                raise
            except self.ray.exceptions.RayError as error:
                if retries == MAX_RETRIES:
                    lines = str(error).strip().splitlines()
                    raise K2ConvertError(
                        f"{name}: its task was lost {MAX_RETRIES + 1} times ({lines[-1] if lines else error}). "
                        "Finished work is kept: check the cluster and run the same command again."
                    ) from error
                retries += 1
                events.note(f"{name}: its worker died; converting it again")


def convert_on_node(cluster: Cluster, job: Job, name: str, *, stop: Event, events: Events) -> ShardRecord:
    """Have a node convert one shard of a job, and with the Hub fetch and send it; returns its record.

    Raises InterruptedRun when `stop` is set, PlanError if the node has another k2convert, any other K2ConvertError.
    """
    task = shard_task(job, name)
    task = replace(task, source_folder=task.source_folder.absolute(), destination=task.destination.absolute())
    source_bytes = job.limits.source_bytes
    sizes = (sum(source_bytes.get(s, 0) for s in item.sources) + item.output_bytes for item in job.items)
    work = NodeTask(task, job.source.remote, job.target, shard_bytes=max(sizes))
    node, answer = cluster.run(name, pickle.dumps(work), stop=stop, events=events)
    if isinstance(answer, str):
        raise PlanError(f"node {node} has {answer}, but this is k2convert {__version__}. Install the same there.")
    result = pickle.loads(answer)
    if isinstance(result, K2ConvertError):
        result.args = (f"node {node}: {result}",)
        raise result
    shard = task.shard
    events.progress(bytes_in=shard.bytes_in, bytes_out=shard.data_bytes, tensors=shard.num_outputs)
    events.note(f"node {node}: {name}")
    return result


def _offers(ray: Any) -> list[int]:
    """Return the CPUs of every node."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


@contextmanager
def connect(address: str) -> Generator[Cluster]:
    """Connect to a running Ray cluster; raises PlanError without one. No task takes more CPUs than a node has."""
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
        """Yield the node's name, whether this is the last answer, and the answer."""
        from importlib import import_module

        ray: Any = import_module("ray")
        node = f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:6]})"
        try:
            from k2convert import __version__ as found
        except ImportError:
            yield node, True, "no k2convert"
            return
        if found != version:
            yield node, True, f"k2convert {found}"
            return
        from k2convert.job.ray import answers_on_node

        for answer in answers_on_node(data, cpus=cpus):
            yield node, isinstance(answer, bytes), answer

    try:
        cpus = min(_CPUS_PER_SHARD, max(_offers(ray), default=0)) or _CPUS_PER_SHARD
        remote_function = ray.remote(num_cpus=cpus, max_retries=0, scheduling_strategy="SPREAD")(on_node)
        yield Cluster(ray, remote_function, cpus)
    finally:
        ray.shutdown()
