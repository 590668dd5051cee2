"""Result buffers are used again, but never while anybody can still see what is in them."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import torch

from k2convert.kernels.buffers import BufferPool

MEGABYTE = 1 << 20


def test_released_memory_is_used_again() -> None:
    pool = BufferPool(64 * MEGABYTE)
    first = pool.empty(1024, 1024)
    address = first.data_ptr()
    del first
    assert pool.empty(512, 2048).data_ptr() == address


def test_memory_in_use_is_left_alone() -> None:
    """A slice, an array and a memoryview of a result each keep it, long after the tensor itself is gone."""
    pool = BufferPool(64 * MEGABYTE)
    kept = [pool.empty(1024, 1024).fill_(mark) for mark in range(3)]
    views = [kept[0][5:6], kept[1].view(-1).numpy()[7:8], memoryview(kept[2].numpy())]
    del kept
    gc.collect()
    for _ in range(5):
        pool.empty(1024, 1024).fill_(99)
    assert [int(torch.as_tensor(views[0])[0, 0]), int(views[1][0]), views[2][0, 0]] == [0, 1, 2]


def test_pool_holds_no_more_than_its_capacity() -> None:
    pool = BufferPool(8 * MEGABYTE)
    for rows in range(1, 20):
        assert pool.empty(rows, MEGABYTE // 8).shape == (rows, MEGABYTE // 8)
        assert sum(array.nbytes for array in pool._arrays) <= 8 * MEGABYTE
    assert pool.empty(16, MEGABYTE).shape == (16, MEGABYTE)
    assert sum(array.nbytes for array in pool._arrays) <= 8 * MEGABYTE


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool(64 * MEGABYTE)

    def fill(mark: int) -> bool:
        tensor = pool.empty(256, 1024).fill_(mark)
        return bool((tensor == mark).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(fill, [number % 251 for number in range(2000)]))
