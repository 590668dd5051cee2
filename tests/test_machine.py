"""A job asks for its own cores and memory. Buffers are reused, but never while something still refers to them."""

import gc
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fake_system import limit_by_version_1, limit_by_version_2, write

from k2convert import machine
from k2convert.machine import BufferPool

MEGABYTE = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def held_bytes(pool: BufferPool) -> int:
    return sum(array.nbytes for array in pool._arrays)


def test_memory_in_use_is_left_alone() -> None:
    """A slice, a tensor, an array of a tensor and a memoryview each keep a buffer after the array is gone."""
    pool = BufferPool(64 * MEGABYTE)
    arrays = [pool.empty(MEGABYTE) for _ in range(4)]
    for mark, array in enumerate(arrays):
        array.fill(mark)
    tensor = torch.as_tensor(arrays[1]).view(1024, 1024)
    views = [arrays[0][5:6], tensor[3], torch.as_tensor(arrays[2]).view(-1).numpy()[7:8], arrays[3].data]
    del arrays, array, tensor
    gc.collect()
    for _ in range(5):
        pool.empty(MEGABYTE).fill(99)
    assert [int(view[0]) for view in views] == [0, 1, 2, 3]


def test_pool_holds_no_more_than_its_capacity() -> None:
    pool = BufferPool(8 * MEGABYTE)
    for eighths in range(1, 20):
        assert pool.empty(eighths * MEGABYTE // 8).size == eighths * MEGABYTE // 8
        assert held_bytes(pool) <= 8 * MEGABYTE
    assert pool.empty(16 * MEGABYTE).size == 16 * MEGABYTE
    assert held_bytes(pool) <= 8 * MEGABYTE


def test_lowered_limit_and_clearing_let_go_of_what_is_free() -> None:
    pool = BufferPool(64 * MEGABYTE)
    used = pool.empty(4 * MEGABYTE)
    used.fill(7)
    free = [pool.empty(MEGABYTE) for _ in range(8)]
    del free
    pool.limit(8 * MEGABYTE)
    assert held_bytes(pool) <= 8 * MEGABYTE
    pool.empty(4 * MEGABYTE).fill(9)
    assert held_bytes(pool) <= 8 * MEGABYTE
    pool.clear()
    pool.empty(4 * MEGABYTE).fill(9)
    assert (used == 7).all()


def test_memory_in_use_is_the_last_to_leave_the_pool() -> None:
    pool = BufferPool(16 * MEGABYTE)
    used = pool.empty(4 * MEGABYTE)
    free = pool.empty(3 * MEGABYTE)
    address = used.ctypes.data
    del free
    others = [pool.empty(4 * MEGABYTE - 1) for _ in range(2)], pool.empty(2 * MEGABYTE)
    del used, others
    assert pool.empty(4 * MEGABYTE).ctypes.data == address


def test_memory_that_left_the_pool_goes_back_to_the_system() -> None:
    pool = BufferPool(256 * MEGABYTE)
    resident = resident_bytes()
    for size in range(40, 64):
        pool.empty(size * MEGABYTE).fill(1)
    assert resident_bytes() - resident < 300 * MEGABYTE


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool(64 * MEGABYTE)

    def fill(mark: int) -> bool:
        array = pool.empty(MEGABYTE // 4)
        array.fill(mark)
        return bool((array == mark).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(fill, [number % 251 for number in range(2000)]))


def test_without_limits_the_job_has_the_machine(system: Path) -> None:
    write(system, "proc/self/cgroup", "0::/user.slice")
    limit_by_version_2(system, "user.slice", cpus="max 100000", memory="max", used=7, cached=0)
    assert (machine.num_cores(), machine.available_memory()) == (192, 262_144_000 * 1024)
    assert machine.peak_bytes() == 204_800 * 1024


@pytest.mark.parametrize("limited", ["job", "job/step", ""])
def test_a_limit_of_any_cgroup_above_the_process_counts(system: Path, limited: str) -> None:
    write(system, "proc/self/cgroup", "0::/job/step")
    for folder in ("", "job", "job/step"):
        limit_by_version_2(system, folder, cpus="max 100000", memory="max", used=7, cached=0)
    limit_by_version_2(system, limited, cpus="150000 100000", memory=1 << 30, used=300 << 20, cached=200 << 20)
    assert (machine.num_cores(), machine.available_memory()) == (2, 924 << 20)


def test_a_soft_limit_counts_too(system: Path) -> None:
    write(system, "proc/self/cgroup", "0::/job")
    limit_by_version_2(system, "job", cpus="max 100000", memory="max", used=100 << 20, cached=0)
    write(system, "sys/fs/cgroup/job/memory.high", 500 << 20)
    assert machine.available_memory() == 400 << 20


@pytest.mark.parametrize("inside", ["docker/0123", ""])
def test_limits_of_version_1_are_read_from_outside_and_in_a_container(system: Path, inside: str) -> None:
    """In a container without a namespace its own cgroup is the top, whatever /proc says."""
    write(system, "proc/self/cgroup", "9:cpu,cpuacct:/docker/0123\n4:memory:/docker/0123\n1:name=systemd:/\n0::/")
    limit_by_version_1(system, inside, quota=100_000, memory=1 << 30, used=300 << 20, cached=100 << 20)
    assert (machine.num_cores(), machine.available_memory()) == (1, 824 << 20)
    limit_by_version_1(system, inside, quota=-1, memory=2**63 - 4096, used=0, cached=0)
    assert (machine.num_cores(), machine.available_memory()) == (192, 262_144_000 * 1024)


def test_slurm_and_the_address_space_are_limits(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "8")
    assert machine.num_cores() == 8
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert machine.num_cores() == 4
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1024")
    assert machine.available_memory() == (8192 - 100) << 20
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "4096")
    assert machine.available_memory() == (4096 - 100) << 20
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all of the node
    monkeypatch.delenv("SLURM_MEM_PER_CPU")
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (2000 << 20, -1))
    assert machine.available_memory() == 1000 << 20


def test_nobody_else_asks_for_cores_or_memory() -> None:
    """Not by the name of a function, a constant of a library or a file of the kernel."""
    pattern = re.compile(
        r"cpu_count|sched_getaffinity|hardware_concurrency|SC_NPROCESSORS|SC_AVPHYS|blake3\.AUTO|/proc/meminfo|"
        r"proc/self/status|getrusage|SLURM_CPUS|SLURM_MEM|psutil"
    )
    package = Path(machine.__file__).parent
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".hpp")]
    assert len(files) > 100
    assert [path.name for path in files if pattern.search(path.read_text())] == ["machine.py"]
