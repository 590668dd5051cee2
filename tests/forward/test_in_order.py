"""Calls that run beside each other end with the block that uses their results, also if it fails."""

import threading
import time

import pytest

from k2convert.forward.moe import run_in_order


def test_no_call_runs_after_a_block_that_fails() -> None:
    running = threading.Semaphore(0)
    ended: list[int] = []

    def call(number: int) -> int:
        running.release()
        time.sleep(0.2 if number else 0.0)
        ended.append(number)
        return number

    def fail() -> None:
        with run_in_order(call, range(10), workers=2) as results:
            for _ in results:
                running.acquire()
                raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here") as found:
        fail()
    count = len(ended)
    time.sleep(0.5)
    assert len(ended) == count < 10, "while the traceback is there"
    assert found.traceback
