"""The estimate of a pass, and what decides how much is computed at one time."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k2convert.calibrate import cost
from k2convert.calibrate.walk import DENSE_TOKENS, Walk
from k2convert.checkpoint.index import open_checkpoint


def test_the_device_that_computes_is_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device without memory plays a GPU: every product of its tensors is noted."""
    measured: list[str] = []

    def seconds(run: Any, device: str) -> float:
        result = run()
        measured.append(device if not isinstance(result, torch.Tensor) else str(result.device))
        return 0.001

    monkeypatch.setattr(cost, "_seconds", seconds)
    sizes = [cost.PassSize(4, 64, 4, (device,), 1, 4) for device in ("cpu", "meta")]
    estimates = [cost.pass_seconds(open_checkpoint(tiny), size) for size in sizes]
    assert measured == ["cpu", "cpu", "cpu", "meta", "meta", "cpu"], "the search of exponents is the CPUs'"
    assert all(estimate > 0 for estimate in estimates)


def test_a_walk_is_estimated_with_what_it_does_beyond_a_pass(tiny: Path) -> None:
    source = open_checkpoint(tiny)
    whole, last = (cost.PassSize(16, 256, 16, ("cpu",), 2, layers) for layers in (4, 1))
    found = cost.walk_seconds(source, whole)
    assert found > 1.5 * cost.pass_seconds(source, whole)
    assert 0 < cost.walk_seconds(source, last) < 0.6 * found
    assert torch.get_num_threads() >= 1


def walk(*, window: int, chunk: int, device: str) -> Walk:
    ids = np.zeros((16, window), dtype=np.int64)
    return Walk(ids, 2, 256, 0, chunk, (device,), 2, lambda _: nullcontext())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("window", "chunk", "device", "windows"),
    [
        (DENSE_TOKENS, 4, "cpu", 1),
        (DENSE_TOKENS // 4, 16, "cpu", 4),
        (4 * DENSE_TOKENS, 1, "cpu", 1),
        (DENSE_TOKENS // 8, 2, "cpu", 2),
        (DENSE_TOKENS, 4, "cuda:0", 4),
    ],
)
def test_a_dense_layer_takes_fewer_windows_at_one_time(window: int, chunk: int, device: str, windows: int) -> None:
    found = walk(window=window, chunk=chunk, device=device)
    assert found.windows_at_once(dense=True) == windows
    assert found.windows_at_once(dense=False) == chunk
