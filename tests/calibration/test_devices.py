"""The pass on two devices that are as strict as GPUs gives the statistics of the CPU."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from k2convert.calibration.accumulate import LayerAccumulator
from k2convert.calibration.layer_statistics import LayerStatistics
from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.weights import WeightReader

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
sys.path.insert(0, str(Path(__file__).parents[1] / "forward"))


def first_layers(folder: Path, devices: tuple[str, ...]) -> tuple[Tensor, list[LayerStatistics]]:
    """The hidden states after a dense layer and a MoE layer, and their statistics."""
    ids = torch.randint(0, 2048, (3, 32), generator=torch.Generator().manual_seed(1))
    found: list[LayerStatistics] = []
    with closing(WeightReader(open_checkpoint(folder))) as reader:
        hidden = embed(reader, ids)
        for number in range(2):
            accumulator = LayerAccumulator(reader, number, seed=3)
            layer = DecoderLayer(reader, number, devices, 2)
            hidden = torch.cat([layer.run(states, accumulator) for states in hidden.split(2)])
            found.append(accumulator.finish())
    return hidden, found


def test_every_tensor_is_where_a_device_needs_it(tiny: Path) -> None:
    import shadow_device

    expected, of_cpu = first_layers(tiny, ("cpu",))
    hidden, of_devices = first_layers(tiny, ("shadow:0", "shadow:1"))
    assert min(shadow_device.calls[device] for device in ("shadow:0", "shadow:1")) > 100
    assert hidden.device.type == "cpu"
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    for here, there in zip(of_cpu, of_devices, strict=True):
        assert np.array_equal(here.tokens, there.tokens)
        for name in ("gate_up_mean_square", "down_mean_square", "down_amax", "saliency"):
            np.testing.assert_allclose(getattr(there, name), getattr(here, name), rtol=1e-4)


def test_the_device_of_the_tests_refuses_what_a_gpu_refuses() -> None:
    import shadow_device  # noqa: F401

    here, there = torch.ones(3, device="shadow:0"), torch.ones(3, device="shadow:1")
    for wrong in (lambda: here + there, lambda: here + torch.ones(3), lambda: here.numpy()):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
