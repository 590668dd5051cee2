"""Hidden states on disk: BF16 in a calibration, untouched in an evaluation; calls in order on several threads."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from k2convert.forward.moe import run_in_order
from k2convert.forward.work import HIDDEN, PassJob, Purpose, WorkFolder
from k2convert.records.events import SILENT

SHAPE = (3, 4, 64)


def through(folder: Path, states: np.ndarray, purpose: Purpose) -> tuple[np.ndarray, torch.Tensor]:
    """Write states two windows and one at a time; returns what is read, in one piece, and what is in the file."""
    work = WorkFolder(folder, purpose=purpose)
    (folder / ".k2convert").mkdir(parents=True)
    work.begin(PassJob({}, 2, {}), events=SILENT)
    with work.writing(HIDDEN, 1, SHAPE) as write:
        write(states[:2])
        write(states[2:])
    with work.reading(HIDDEN, 1, SHAPE) as read:
        loaded = read(0, 3)
        np.testing.assert_array_equal(read(1, 3), loaded[1:])
    return loaded, load_file(work.path(HIDDEN, 1))["hidden_states"]


@pytest.fixture
def states() -> np.ndarray:
    """Values of many sizes, both ties, zeros of both signs, and a dropped window."""
    random = np.random.default_rng(0)
    values = (random.standard_normal(SHAPE) * 10.0 ** random.integers(-30, 30, SHAPE)).astype(np.float32)
    values[0, 0, :6] = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0, 0x80000000], np.uint32).view("f4")
    values[1] = np.nan
    return values


def test_a_calibration_keeps_states_as_torch_rounds_them_to_bf16(tmp_path: Path, states: np.ndarray) -> None:
    loaded, stored = through(tmp_path, states, "calibration")
    expected = torch.as_tensor(states).bfloat16()
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored[[0, 2]].view(torch.int16), expected[[0, 2]].view(torch.int16))
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded[[0, 2]], expected[[0, 2]].float().numpy())
    assert np.isnan(loaded[1]).all(), "a dropped window is dropped in the next layer too"
    loaded[0] = np.nan  # whoever reads may write on them


def test_an_evaluation_keeps_states_as_they_are(tmp_path: Path, states: np.ndarray) -> None:
    loaded, stored = through(tmp_path, states, "evaluation")
    assert stored.dtype == torch.float32
    assert loaded.tobytes() == states.tobytes()


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

    with pytest.raises(RuntimeError, match="here") as raised:
        fail()
    count = len(ended)
    time.sleep(0.5)
    assert len(ended) == count < 10, "while the traceback is there"
    assert raised.traceback
