"""What the machine offers a job: devices, threads, memory. All tuning numbers are here."""

import ctypes
import gc
import os
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k2convert.buffers import BUFFERS
from k2convert.choices import Device
from k2convert.errors import PlanError, missing_module, require_extra
from k2convert.quantize.kernels import _cpu

CORES_PER_WORKER: Final = 8  # the writer of one shard keeps up with about this many converting threads
MAX_WORKERS: Final = 8
READERS_PER_WORKER: Final = 2
WORKER_BYTES: Final = 1 << 30  # an upper bound for one shard in work with CORES_PER_WORKER threads
SWITCH_SECONDS: Final = 0.0005  # GIL switch interval: a returning kernel waits 0.5 ms, not the default 5 ms
CORE_INFLIGHT_BYTES: Final = 64 << 20  # an expert's gate and up, in and out: one being converted, one being written
HUB_CORE_INFLIGHT_BYTES: Final = 24 << 20  # less: a network is slower than a disk, and uploading takes memory
MIN_INFLIGHT_BYTES: Final = 192 << 20
THREADS_PER_GPU: Final = 4


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads shared by all shards in work: one converting thread a core, and enough readers to keep a disk busy."""

    converting: ThreadPoolExecutor
    reading: ThreadPoolExecutor


@contextmanager
def open_threads(workers: int, *, num_converting: int | None = None) -> Generator[Threads]:
    """Start the threads for `workers` shards at a time; one converting thread a core unless their number is given."""
    cores = num_converting or os.cpu_count() or 1
    with (
        ThreadPoolExecutor(max_workers=cores, thread_name_prefix="convert") as converting,
        ThreadPoolExecutor(max_workers=READERS_PER_WORKER * workers, thread_name_prefix="read") as reading,
    ):
        yield Threads(converting, reading)


def choose_workers(requested: int | None, *, num_devices: int) -> int:
    """Return how many shards to convert at a time: as requested, else by devices, cores and memory."""
    cores, by_memory = os.cpu_count() or 1, available_memory() // WORKER_BYTES
    return requested or max(num_devices, min(cores // CORES_PER_WORKER, MAX_WORKERS, by_memory), 1)


def available_memory() -> int:
    """Return the bytes of memory that are available without swapping, by the kernel's estimate if it gives one."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def peak_bytes() -> int:
    """Return this process's peak memory; `getrusage` would count from the size of the process that started it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def check_memory(place: str, *, needed: int, available: int, of_gpu: bool = False) -> None:
    """Refuse what needs more memory than there is; raises PlanError with both numbers."""
    if needed > available:
        kind, other = ("GPU memory", "GPU") if of_gpu else ("memory", "machine")
        raise PlanError(
            f"{place}: needs about {needed / 1e9:,.1f} GB of {kind}, but {available / 1e9:,.1f} GB is available. "
            f"Use fewer tokens, a shorter window, or a {other} with more memory."
        )


def inflight_bytes(*, uses_hub: bool, cores: int | None = None) -> int:
    """Return the bytes that all shards in work may have in memory, so that every core, or each of `cores`, has work."""
    cores = cores or os.cpu_count() or 1
    return cores * HUB_CORE_INFLIGHT_BYTES if uses_hub else max(MIN_INFLIGHT_BYTES, cores * CORE_INFLIGHT_BYTES)


def choose_devices(device: Device) -> tuple[str, ...]:
    """Return the devices to convert on: every visible CUDA device, else the CPU.

    Raises PlanError if CUDA was asked for and there is none, MissingDependencyError if torch is not installed for it.
    """
    if device == "cuda":
        require_extra("torch", purpose="--device cuda")
    if device == "cuda" or (device == "auto" and has_driver() and missing_module("torch") is None):
        import torch

        if torch.cuda.is_available():
            return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    if device == "cuda":
        raise PlanError("--device cuda: torch sees no CUDA device. Use --device cpu, or install a CUDA build of torch.")
    return ("cpu",)


def gpu_memory(devices: Sequence[str]) -> tuple[int, int]:
    """Return the free memory and the whole memory of the smallest GPU; zeros for the CPU."""
    if tuple(devices) == ("cpu",):
        return 0, 0
    import torch

    free, whole = zip(*(torch.cuda.mem_get_info(device) for device in devices), strict=True)
    return min(free), min(whole)


def layer_threads(devices: Sequence[str]) -> int:
    """Return how many threads compute a layer: every core, but few for a GPU. Each holds experts in its memory."""
    cores = len(os.sched_getaffinity(0))
    return cores if tuple(devices) == ("cpu",) else min(cores, THREADS_PER_GPU * len(devices))


def device_name(devices: Sequence[str]) -> str:
    """Return what computes, as a fingerprint has it: bytes of floating-point sums depend on it."""
    if tuple(devices) == ("cpu",):
        return f"cpu, {_cpu.instructions()}"
    import torch

    return f"cuda, {torch.cuda.get_device_name(devices[0])}"


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed. Asking torch would take seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def settle_runtime(*, uses_hub: bool) -> None:
    """Prepare the process for hours of work: one torch thread, a short GIL interval, bounded buffers, no plan scans."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, if it is imported later
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    if uses_hub:
        BUFFERS.limit(2 * inflight_bytes(uses_hub=True))  # the second half holds what arrives and what is written
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()
    gc.enable()


def release_buffers() -> None:
    """Free the tensor buffers, before steps that read no tensors but need memory."""
    BUFFERS.clear()
