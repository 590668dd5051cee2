"""Calls in threads, with the results in the order of the calls.

Each call computes with one torch thread, so its result does not depend on the number of workers. Work is cut in pieces
that do not depend on it either, and results are added in order: the same bytes with any number of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Call = TypeVar("Call")
Result = TypeVar("Result")


def run_in_order(run: Callable[[Call], Result], calls: Iterable[Call], *, workers: int) -> Generator[Result]:
    """Yield run(call) for every call in order; `workers` calls run at a time, and one more waits to be yielded."""

    def without_gradients(call: Call) -> Result:
        with torch.no_grad():  # a setting of each thread
            return run(call)

    waiting: deque[Future[Result]] = deque()
    one = (1,)  # oneDNN has a number of threads for each thread that calls it
    with _one_torch_thread(), ThreadPoolExecutor(workers, "forward", torch.set_num_threads, one) as pool:
        try:
            for call in calls:
                waiting.append(pool.submit(without_gradients, call))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def _one_torch_thread() -> Generator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
