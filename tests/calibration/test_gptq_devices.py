"""The walk of rule `gptq` as on a GPU: batched in torch, several experts at a time.

`cpu:0` takes the path of a GPU. So does `shadow:0`, which is as strict as one about where tensors are, and slow.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_gptq_walk import planned, walked

from k2convert.calibration.layer_files import QuantizedLayers, conversion_work, read_gptq

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
sys.path.insert(0, str(Path(__file__).parents[1] / "forward"))


@pytest.mark.parametrize("device", ["cpu:0", pytest.param("shadow:0", marks=pytest.mark.slow)])
def test_a_device_makes_nearly_the_codes_of_the_cpu(cut: Path, tmp_path: Path, device: str) -> None:
    if device != "cpu:0":
        import shadow_device  # noqa: F401
    walk = planned(cut, np.random.default_rng(1).integers(0, 2048, size=(8, 24)), workers=2)
    works = [
        walked(conversion_work(tmp_path / str(n)), replace(walk, devices=(d,))) for n, d in enumerate(("cpu", device))
    ]
    here, there = (read_gptq(work, 1) for work in works)
    assert here.shrinkage is not None
    assert here.shrinkage == there.shrinkage
    assert np.isclose(here.fitted.gptq_error, there.fitted.gptq_error, rtol=0.05)
    assert here.fitted.mse_error == pytest.approx(there.fitted.mse_error, rel=1e-3)
    with QuantizedLayers(works[0]) as cpu, QuantizedLayers(works[1]) as torch_codes:
        for expert in range(4):
            for kind in ("gate", "up", "down"):
                module = f"model.layers.1.mlp.experts.{expert}.{kind}_proj"
                mine, other = cpu.read(module), torch_codes.read(module)
                assert mine.global_scale == other.global_scale
                assert (mine.packed == other.packed).mean() > 0.9
