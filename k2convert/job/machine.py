"""job.machine."""

import ctypes
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from k2convert.errors import PlanError
from k2convert.job.shard import INFLIGHT_BYTES

CORES_PER_WORKER = 8  # one shard's writer keeps up with about this many converting threads


MAX_WORKERS = 8


READERS_PER_WORKER = 2


WORKER_BYTES = 1 << 30  # what one shard in work may take with CORES_PER_WORKER threads, and some


SWITCH_SECONDS = 0.0005  # a kernel that comes back waits this long for the lock, not Python's 5 ms


CORE_INFLIGHT_BYTES = 64 << 20  # an expert's gate and up, in and out, being converted and waiting to be written


def available_memory() -> int:
    """Bytes of memory that can be had without swapping; by the kernel's estimate where it gives one."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def inflight_bytes(workers: int) -> int:
    """Bytes that one of `workers` shards may have in work, so that every core finds something to do."""
    cores = os.cpu_count() or 1
    return max(INFLIGHT_BYTES, cores * CORE_INFLIGHT_BYTES) // workers


def conversion_pool() -> ThreadPoolExecutor:
    """Threads that convert: one a core, shared by all shards in work."""
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="convert")


def reading_pool(workers: int) -> ThreadPoolExecutor:
    """Threads that read: enough of them that a disk always has a request to work on."""
    return ThreadPoolExecutor(max_workers=READERS_PER_WORKER * workers, thread_name_prefix="read")


def choose_devices(device: str) -> tuple[str, ...]:
    """Torch devices to convert on: every visible CUDA device, or the CPU; raises PlanError for CUDA without one."""
    asked = device == "cuda" or (device == "auto" and _has_driver())
    count = _count_cuda_devices() if asked else 0
    if device == "cuda" and count == 0:
        raise PlanError("--device cuda: torch sees no CUDA device. Use --device cpu, or install a CUDA build of torch.")
    return tuple(f"cuda:{i}" for i in range(count)) or ("cpu",)


def _count_cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_driver() -> bool:
    """Whether NVIDIA's driver is there: to hear from torch that it is not takes seconds."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def settle_runtime() -> None:
    """Prepare the process for hours of work: torch must not add threads to ours, the plan needs no more scanning."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch imported later
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()
    gc.enable()
