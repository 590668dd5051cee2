"""The machine as this job has it: its cores, its memory, and a pool of buffers in that memory.

A container, a batch system or `taskset` gives a job a part of a machine. Every other module asks here:

    cores    the affinity, the CPU quotas of the process's cgroups, Slurm's CPUs
    memory   what the kernel calls available; the limits of the process's cgroups, without what is used there (but file
             cache counts as available); Slurm's memory and `ulimit -v`, without what this process has

The limits of a cgroup hold for all cgroups in it, so those above the process's count too.

The pool exists because the tensors of one checkpoint have few different sizes. A new buffer of 8 MB costs up to 2,000
page faults, which take as long as `max` takes to fill it. So buffers stay in the pool. One is free again when only the
pool refers to it: a tensor, view or memoryview of an array keeps the array alive.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

SMALLEST_POOLED: Final = 1 << 16
POOL_BYTES: Final = 384 << 20
SIZE_BITS: Final = 4

PAGE_BYTES: Final = 4096
"""What O_DIRECT aligns to. Pages of the system are as large or larger: an ARM kernel may have 64 KB."""

ROOT: Path = Path("/")
"""Where the kernel shows its files. A test has others."""

_CGROUPS: Final = "sys/fs/cgroup"
_SLURM_CPUS: Final = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")  # the first one that is set
_MEBIBYTE: Final = 1 << 20


def num_cores() -> int:
    """Return how many cores this job may use, at least 1. A quota of a part of a core counts as a core."""
    counts = [len(os.sched_getaffinity(0)), *_core_quotas(), *_slurm_numbers(_SLURM_CPUS)[:1]]
    return max(1, min(counts))


def available_memory() -> int:
    """Return the bytes of memory that this job may still use without swapping."""
    available = _kilobytes("proc/meminfo").get("MemAvailable")
    limits = [available or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), *_free_in_cgroups()]
    limits += [limit - _of_process("VmRSS") for limit in _slurm_memory()]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - _of_process("VmSize"))
    return max(0, min(limits))


def peak_bytes() -> int:
    """Return this process's peak memory; `getrusage` would count from the size of the process that started it."""
    return _of_process("VmHWM")


def return_free_memory() -> None:
    """Give the system the memory that this process has freed: the C library keeps it for each thread."""
    with suppress(OSError, AttributeError):  # it is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _of_process(name: str) -> int:
    return _kilobytes("proc/self/status").get(name, 0)


def _kilobytes(name: str) -> dict[str, int]:
    words = (line.split() for line in _lines(ROOT / name))
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in words if fields[2:] == ["kB"]}


def _core_quotas() -> Iterator[int]:
    """Yield the CPU quotas of the cgroups in whole cores: of version 2 in one file, of version 1 in two."""
    for folder in _cgroups("cpu"):
        numbers = _words(folder / "cpu.max")
        if not numbers:
            numbers = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):
            quota, period = map(int, numbers)
            yield -(-quota // max(period, 1))


def _free_in_cgroups() -> Iterator[int]:
    for folder in _cgroups("memory"):
        settings = [_words(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        limits = [int(words[0]) for words in settings if words and words[0].isdecimal()]
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limits and used:
            yield min(limits) - int(used[0]) + _file_cache(folder)


def _file_cache(folder: Path) -> int:
    """Return the bytes of files that a cgroup, and those in it (`total_` in version 1), keep in memory."""
    counts = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
    names = ("inactive_file", "active_file")
    return sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in names)


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups, and of those above them, where they have a controller.

    In a container some of them are not there: it sees its own as the top.
    """
    for line in _lines(ROOT / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        inner = Path(path.lstrip("/"))
        for name in (controllers, controller) if controllers else ("", "unified"):
            yield from (ROOT / _CGROUPS / name / folder for folder in (inner, *inner.parents))


def _slurm_memory() -> Iterator[int]:
    """Yield the bytes that Slurm gives this job on a node: as a whole, or for each of its CPUs there. 0 is no limit."""
    yield from (number * _MEBIBYTE for number in _slurm_numbers(["SLURM_MEM_PER_NODE"]))
    numbers = _slurm_numbers(["SLURM_MEM_PER_CPU"]), _slurm_numbers(["SLURM_CPUS_ON_NODE"])
    yield from (each * cpus * _MEBIBYTE for each, cpus in zip(*numbers, strict=False))


def _slurm_numbers(names: Sequence[str]) -> list[int]:
    values = (os.environ.get(name, "") for name in names)
    return [int(value) for value in values if value.isascii() and value.isdecimal() and int(value)]


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _free_references() -> int:
    """Return the reference count of an array that only a list and a loop over it hold, in this interpreter."""
    for array in [np.empty(0, dtype=np.uint8)]:
        return sys.getrefcount(array)
    raise AssertionError


_FREE: Final = _free_references()


class BufferPool:
    """Hands out uint8 arrays with arbitrary contents; safe to use from several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._arrays: list[NDArray[np.uint8]] = []
        self._lock = Lock()

    def empty(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a uint8 array [num_bytes], in used memory if a buffer of that size is free."""
        return self.empty_pages(num_bytes)[:num_bytes]

    def empty_pages(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return whole pages, one more than these bytes need, so that the bytes fit at any offset within a page."""
        held = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        if num_bytes < SMALLEST_POOLED:
            memory = np.empty(held + PAGE_BYTES, dtype=np.uint8)
            skipped = -memory.ctypes.data % PAGE_BYTES
            return memory[skipped : skipped + held]
        if num_bytes > self._capacity_bytes // 4:
            return _map(held)
        with self._lock:
            return self._allocate(_rounded(held - PAGE_BYTES) + PAGE_BYTES)[:held]

    def limit(self, capacity_bytes: int) -> None:
        """Keep at most this many bytes from now on."""
        with self._lock:
            self._capacity_bytes = capacity_bytes
            self._leave_room(0)

    def clear(self) -> None:
        """Release all buffers; those in use stay alive for their users, the rest returns to the system."""
        with self._lock:
            self._arrays.clear()

    def _allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        for position in range(len(self._arrays)):
            array = self._arrays[position]
            if array.size == num_bytes and sys.getrefcount(array) == _FREE:
                self._arrays.append(self._arrays.pop(position))
                return array
        self._leave_room(num_bytes)
        array = _map(num_bytes)
        self._arrays.append(array)
        return array

    def _leave_room(self, num_bytes: int) -> None:
        """Drop the least recently used buffers, free ones first; dropped buffers in use stay alive for their users."""
        excess = sum(array.nbytes for array in self._arrays) + num_bytes - self._capacity_bytes
        for used in (False, True):
            position = 0
            while excess > 0 and position < len(self._arrays):
                if used or sys.getrefcount(self._arrays[position]) == _FREE - 1:
                    excess -= self._arrays.pop(position).nbytes
                else:
                    position += 1


def _map(num_bytes: int) -> NDArray[np.uint8]:
    """Map separate huge pages, if possible, which return to the system with the array; an allocator might keep them."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)


def _rounded(num_bytes: int) -> int:
    """Round up to SIZE_BITS significant bits, at most an eighth more, so that similar sizes share buffers."""
    unit = 1 << max(num_bytes.bit_length() - SIZE_BITS, 0)
    return -(-num_bytes // unit) * unit


BUFFERS: Final = BufferPool(POOL_BYTES)
"""The pool for both source and result: an INT4 weight and its NVFP4 form have parts of the same sizes."""
