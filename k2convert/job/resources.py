"""Limits of a job on the machine and its disk, decided before it starts. All tuning numbers are here.

A shard's sources are fetched, it is converted, its sources are removed, it is uploaded, it is removed. A job gets the
room for a whole shard (sources and result) before the first byte is fetched, so the oldest shard can always finish and
nothing can deadlock.
"""

import ctypes
import gc
import os
import shutil
import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Final, get_args

from k2convert.checkpoint.header import ShardHeader, TensorInfo, encode_header, parse_header
from k2convert.checkpoint.writer import ALIGNMENT
from k2convert.choices import Device
from k2convert.errors import (
    DiskFullError,
    PlanError,
    check_choice,
    check_number,
    counted,
    format_bytes,
    missing_module,
    require_extra,
)
from k2convert.hub.client import progress_bars, restore_progress_bars, unbound_requests
from k2convert.machine import BUFFERS, POOL_BYTES, available_memory, num_cores
from k2convert.plan.plan import Plan, ShardJob
from k2convert.quantize.kernels import _cpu

CORES_PER_WORKER: Final = 8  # the writer of one shard keeps up with about this many converting threads
MAX_WORKERS: Final = 8
READERS_PER_WORKER: Final = 2
WORKER_BYTES: Final = 1 << 30  # an upper bound for one shard in work with CORES_PER_WORKER threads
SWITCH_SECONDS: Final = 0.0005  # GIL switch interval: a returning kernel waits 0.5 ms, not the default 5 ms
CORE_INFLIGHT_BYTES: Final = 64 << 20  # an expert's gate and up, in and out: one being converted, one being written
HUB_CORE_INFLIGHT_BYTES: Final = 24 << 20  # less: a network is slower than a disk, and uploading takes memory
MIN_INFLIGHT_BYTES: Final = 192 << 20
LEAST_INFLIGHT_BYTES: Final = 64 << 20  # where memory is scarce: two experts of K2
MEMORY_SHARE: Final = 0.8  # of the available memory, for shards in work
XET_BYTES: Final = 400_000_000  # what hf_xet takes for its streams, with the bounds of hub/client.py
THREADS_PER_GPU: Final = 4

Threads = tuple[ThreadPoolExecutor, ThreadPoolExecutor]  # shared by all shards in work: some convert, some read


@contextmanager
def open_threads(workers: int, *, num_converting: int | None = None) -> Generator[Threads]:
    """Start the threads for `workers` shards at a time: those that convert, and enough readers to keep a disk busy.

    One converting thread a core, unless their number is given.
    """
    cores = num_converting or num_cores()
    with (
        ThreadPoolExecutor(max_workers=cores, thread_name_prefix="convert") as converting,
        ThreadPoolExecutor(max_workers=READERS_PER_WORKER * workers, thread_name_prefix="read") as reading,
    ):
        yield converting, reading


def choose_workers(requested: int | None) -> int:
    """Return how many shards to convert at a time: as requested, else by cores and memory."""
    if requested is not None:
        check_number("workers", requested)
    by_memory = available_memory() // WORKER_BYTES
    return requested or max(min(num_cores() // CORES_PER_WORKER, MAX_WORKERS, by_memory), 1)


def check_memory(
    subject: str, *, needed: int, available: int, of_gpu: bool = False, use: str = "fewer tokens, a shorter window, or "
) -> None:
    """Refuse what needs more memory than there is; raises PlanError with both numbers. `use` helps without more."""
    if needed > available:
        kind, other = ("GPU memory", "GPU") if of_gpu else ("memory", "machine")
        raise PlanError(
            f"{subject}: needs about {format_bytes(needed)} of {kind}, but {format_bytes(available)} is available. "
            f"Use {use}a {other} with more memory."
        )


def inflight_bytes(*, uses_hub: bool, cores: int, memory: int) -> int:
    """Return the bytes that shards in work may have: work for each of `cores` in `memory`, with as much in staging."""
    wanted = cores * HUB_CORE_INFLIGHT_BYTES
    if not uses_hub:
        wanted = max(MIN_INFLIGHT_BYTES, cores * CORE_INFLIGHT_BYTES)
    return max(LEAST_INFLIGHT_BYTES, min(wanted, int(memory * MEMORY_SHARE) // 2))


def xet_bytes(*, uploads: bool) -> int:
    """Return the memory of the library that sends shards to the Hub."""
    is_off = os.environ.get("HF_HUB_DISABLE_XET", "0").lower() not in ("", "0", "false")
    return XET_BYTES if uploads and not is_off else 0


def choose_devices(device: Device, *, rounds: bool = False) -> tuple[tuple[str, ...], str | None]:
    """Return devices and a note. With `rounds`, CUDA only if it rounds as the CPU does. Raises PlanError."""
    check_choice("device", device, get_args(Device))
    if device == "cuda":
        require_extra("torch", purpose="device cuda")
    elif device == "cpu" or not has_driver() or missing_module("torch") is not None:
        return ("cpu",), None
    import torch

    if not torch.cuda.is_available():
        if device == "cuda":
            raise PlanError("device cuda: torch sees no CUDA device. Use device cpu, or install a CUDA build of torch.")
        return ("cpu",), f"torch sees no CUDA device, so {_cores()} are used. A CUDA build of torch uses the GPU"
    devices = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    if not rounds:
        return devices, None
    from k2convert.quantize.gptq.device_kernel import check_device

    try:
        for name in devices:
            check_device(name)
    except PlanError as error:
        if device == "cuda":
            raise
        return ("cpu",), f"{str(error).removesuffix(' Use --device cpu.')} So {_cores()} are used"
    names = ", ".join(dict.fromkeys(torch.cuda.get_device_name(name) for name in devices))
    return devices, f"rule gptq runs on {names}, which rounds as the CPU does. --device cpu uses {_cores()}"


def _cores() -> str:
    return counted(num_cores(), "core")


def gpu_memory(devices: Sequence[str]) -> tuple[int, int]:
    """Return the free memory and the whole memory of the smallest GPU; zeros for the CPU."""
    if tuple(devices) == ("cpu",):
        return 0, 0
    import torch

    free, whole = zip(*(torch.cuda.mem_get_info(device) for device in devices), strict=True)
    return min(free), min(whole)


def layer_threads(devices: Sequence[str]) -> int:
    """Return how many threads compute a layer: every core, but few for a GPU. Each holds experts in its memory."""
    cores = num_cores()
    if tuple(devices) == ("cpu",):
        return cores
    return min(cores, THREADS_PER_GPU * len(devices))


def device_name(devices: Sequence[str]) -> str:
    """Return what computes, as a fingerprint has it: bytes of floating-point sums depend on it."""
    from k2convert.forward.decoder import arithmetic

    if tuple(devices) == ("cpu",):
        return f"cpu, {_cpu.instructions()}, {arithmetic()}"
    import torch

    return f"cuda, {torch.cuda.get_device_name(devices[0])}, {arithmetic()}"


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed. Asking torch would take seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def own_process() -> None:
    """Prepare a process of k2convert itself for hours of work: children have one thread, and no plan is scanned."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, if it is imported later
    gc.freeze()
    gc.enable()


def configure_runtime(*, uses_hub: bool, inflight: int) -> None:
    """Prepare for hours of work: one torch thread, a short GIL interval, bounded buffers. See `restoring_process`."""
    threads = _torch_threads()
    if threads is not None:
        import torch

        _HOST.threads = _HOST.threads or threads
        torch.set_num_threads(1)
    pool = 2 * inflight  # the second half holds what arrives and what is written
    BUFFERS.limit(pool if uses_hub else min(pool, POOL_BYTES))
    sys.setswitchinterval(SWITCH_SECONDS)


@dataclass(slots=True)
class _Host:
    """State of a process before the first call that changed it: torch's threads are None until torch is loaded."""

    num_calls: int = 0  # that run now
    interval: float = 0.0
    threads: int | None = None
    bars: dict[str, bool] = field(default_factory=dict[str, bool])


_HOST: Final = _Host()
_HOST_LOCK: Final = Lock()


@contextmanager
def restoring_process(*, uses_torch: bool = False) -> Generator[None]:
    """Put back what the block changes for the process. The last of several threads restores what the first found."""
    threads = _torch_threads(load=uses_torch)
    with _HOST_LOCK:
        if _HOST.num_calls == 0:
            _HOST.interval = sys.getswitchinterval()
            _HOST.bars = progress_bars()
            _HOST.threads = threads
        elif threads == 1:  # torch gives a new thread the number that another call chose
            threads = _HOST.threads
        _HOST.threads = _HOST.threads or threads
        _HOST.num_calls += 1
    try:
        yield
    finally:
        with _HOST_LOCK:
            _HOST.num_calls -= 1
            threads = threads or _HOST.threads
            if threads is not None:
                import torch

                torch.set_num_threads(threads)
            if _HOST.num_calls == 0:
                sys.setswitchinterval(_HOST.interval)
                restore_progress_bars(_HOST.bars)
                unbound_requests()
                BUFFERS.limit(POOL_BYTES)
                BUFFERS.clear()


def _torch_threads(*, load: bool = False) -> int | None:
    """Return torch's number of threads; None while nothing has loaded it."""
    if sys.modules.get("torch") is None and not load:
        return None
    import torch  # waits if a different thread is still loading it

    return torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class Item:
    """One output shard: the source shards that it needs, and its size."""

    name: str
    sources: tuple[str, ...]
    output_bytes: int


def least_room(items: Sequence[Item], *, source_bytes: Mapping[str, int], outputs_leave: bool) -> int:
    """Return the least room to convert all items, one by one. `source_bytes` is empty for local sources."""
    uses = Counter(source for item in items for source in item.sources)
    fetched: dict[str, int] = {}
    stored = needed = 0
    for item in items:
        fetched |= {source: source_bytes.get(source, 0) for source in item.sources}
        needed = max(needed, stored + sum(fetched.values()) + item.output_bytes)
        for source in item.sources:
            uses[source] -= 1
            if not uses[source]:
                del fetched[source]
        stored += 0 if outputs_leave else item.output_bytes
    return needed


def used_bytes(folder: Path) -> int:
    """Return the disk blocks that a folder's files take."""
    if not folder.is_dir():
        return 0
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def free_bytes(folder: Path) -> int:
    """Return the free disk of a folder, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


RECORD_BYTES: Final = 2048  # journal and upload record of one projection
SHARD_RECORD_BYTES: Final = 8192
HUB_FREE_SHARE: Final = 0.9  # of the free disk, for a job with the Hub, unless --max-disk says otherwise


@dataclass(frozen=True, slots=True)
class Limits:
    """Use of the machine by a job."""

    workers: int
    source_bytes: Mapping[str, int]  # sizes of the source shards to fetch
    disk_shards: int  # what the shards need at least
    disk_allowed: int  # what the job may use at a time
    disk_small: int  # what everything else takes
    disk_free: int  # at the start
    inflight: int  # what all shards in work may have in memory
    layer_room: int = 0  # a part of `disk_small`: what a layer pass's fetched layers may take

    @property
    def disk_needed(self) -> int:
        return self.disk_shards + self.disk_small

    @property
    def room(self) -> int:
        return self.disk_allowed - self.disk_small


def output_headers(plan: Plan, *, source: Mapping[str, TensorInfo]) -> dict[str, ShardHeader]:
    """Return the headers of the output shards as they will be written. Names that `source` has are its strings."""
    headers: dict[str, ShardHeader] = {}
    for job in plan.jobs:
        raw = encoded_header(job)
        header = parse_header(raw, shard=job.name, file_bytes=len(raw) + job.data_bytes)
        named = (t._replace(name=source.get(t.name, t).name) for t in header.tensors.values())
        headers[job.name] = replace(header, tensors={tensor.name: tensor for tensor in named})
    return headers


def output_items(plan: Plan) -> tuple[Item, ...]:
    """Return the output shards with their exact sizes. It encodes every header: 1 second for K2."""
    return tuple(
        Item(job.name, tuple(job.source_shards), len(encoded_header(job)) + job.data_bytes) for job in plan.jobs
    )


def encoded_header(job: ShardJob) -> bytes:
    """Return the bytes of an output shard before its data."""
    outputs = [(o.name, o.dtype, o.shape, o.num_bytes) for o in job.outputs]
    return encode_header(outputs, metadata=dict(job.metadata), alignment=ALIGNMENT)


def allowed_disk(folder: Path, *, uses_hub: bool, max_disk: int | None) -> int:
    """Return the disk that a job in a folder may use; raises DiskFullError for a `max_disk` that is not there."""
    available = free_bytes(folder) + used_bytes(folder)
    if max_disk is None:
        if uses_hub:
            return int(available * HUB_FREE_SHARE)
        return available
    if max_disk > available:
        raise DiskFullError(
            f"{folder}: has only {format_bytes(available)} free, and the job may use {format_bytes(max_disk)}. Allow "
            "less, or free some space."
        )
    return max_disk
