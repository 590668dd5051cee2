"""The estimate of a pass, and what decides how much is computed at once."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k2convert.calibration import cost
from k2convert.calibration.cost import PassSize, layer_operations, other_flops, pass_flops, read_sizes, walk_steps
from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.walk import DENSE_TOKENS, Walk


def test_the_device_that_computes_is_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device without memory plays a GPU: every product of its tensors is noted."""
    measured: list[str] = []

    def seconds(run: Any, device: str) -> float:
        result = run()
        measured.append(device if not isinstance(result, torch.Tensor) else str(result.device))
        return 0.001

    monkeypatch.setattr(cost, "_seconds", seconds)
    sizes = [PassSize(4, 64, 4, (device,), 1, 4) for device in ("cpu", "meta")]
    estimates = [cost.measured_time(read_sizes(open_checkpoint(tiny)), size).least for size in sizes]
    assert measured == ["cpu", "cpu", "meta", "meta"]
    assert all(estimate > 0 for estimate in estimates)


def test_a_walk_is_counted_with_what_it_does_beyond_a_pass(tiny: Path) -> None:
    """The experts once more, some tokens twice more, a second stream, and every decision, in each MoE layer."""
    model = read_sizes(open_checkpoint(tiny))
    size = PassSize(16, 256, 16, ("cpu",), 2, 4)
    one, walk = (layer_operations(model, size, is_walk=is_walk) for is_walk in (False, True))
    assert sum(one) == pytest.approx(pass_flops(model, size))
    steps = walk_steps(model, size)
    assert all(operations > 0 for operations in steps.values())
    experts = pass_flops(model, size) - other_flops(model, size)
    more = 3 * sum(steps.values())
    assert more > 1.25 * experts, "three of four layers have experts"
    assert sum(walk) == pytest.approx(sum(one) + other_flops(model, size) + more)


@pytest.mark.parametrize("is_walk", [False, True])
def test_all_work_gets_faster_with_every_core(tiny: Path, monkeypatch: pytest.MonkeyPatch, is_walk: bool) -> None:
    monkeypatch.setattr(cost, "_seconds", lambda *_: 0.5)
    sizes = (PassSize(4, 64, 4, ("cpu",), cores, 4) for cores in (1, 64))
    one, many = (cost.measured_time(read_sizes(open_checkpoint(tiny)), size, is_walk=is_walk) for size in sizes)
    assert one.least / cost.LEAST_SHARE == pytest.approx(64 * many.most / cost.MOST_SHARE)


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
    ids = np.zeros((16, window), dtype=np.int64)
    found = Walk(ids, 2, 256, chunk, (device,), 2, lambda _: nullcontext())  # type: ignore[arg-type, return-value]
    assert found.windows_at_once(dense=True) == windows
    assert found.windows_at_once(dense=False) == chunk
