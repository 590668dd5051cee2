"""The pass on real devices: the statistics of the CPU within TF32's noise, and the same bytes every time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from statistics_makers import layers_by_pass

from k2convert.calibration.statistics import LayerStatistics

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


def statistics(folder: Path, devices: tuple[str, ...], *, workers: int) -> list[LayerStatistics]:
    ids = torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(1))
    return layers_by_pass(folder, ids, num_layers=2, devices=devices, workers=workers)[1]


def test_statistics_are_those_of_the_cpu(tiny: Path) -> None:
    devices = tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    for here, there in zip(statistics(tiny, ("cpu",), workers=2), statistics(tiny, devices, workers=4), strict=True):
        assert np.abs(here.tokens - there.tokens).sum() <= 0.02 * here.tokens.sum()
        for name in ("gate_up_mean_square", "gate_up_amax"):
            np.testing.assert_allclose(getattr(there, name), getattr(here, name), rtol=0.05)


def test_bytes_do_not_depend_on_workers(tiny: Path) -> None:
    once, again = (statistics(tiny, ("cuda:0",), workers=workers) for workers in (1, 4))
    for one, other in zip(once, again, strict=True):
        for name in ("gate_up_mean_square", "down_mean_square", "saliency", "tokens", "smoothing_exponents"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
