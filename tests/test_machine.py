"""Buffers are reused, but never while something still refers to them."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

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
    kept = [pool.empty(MEGABYTE) for _ in range(4)]
    for mark, array in enumerate(kept):
        array.fill(mark)
    tensor = torch.as_tensor(kept[1]).view(1024, 1024)
    views = [kept[0][5:6], tensor[3], torch.as_tensor(kept[2]).view(-1).numpy()[7:8], kept[3].data]
    del kept, array, tensor
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
    used, free = pool.empty(4 * MEGABYTE), pool.empty(3 * MEGABYTE)
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
