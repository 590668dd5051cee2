"""The walk of rule `gptq` as on a GPU: batched in torch, several experts at a time.

`cpu:0` takes the path of a GPU. So does `shadow:0`, which is as strict as one about where tensors are, and slow.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from k2convert.calibration.gptq_walk import GptqOptions, walk_gptq
from k2convert.calibration.layer_files import QuantizedLayers, conversion_work, read_gptq, write_layer
from k2convert.calibration.statistics import LayerStatistics, StatisticsHeader
from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.walk import Walk
from k2convert.forward.work import WalkJob, WorkFolder
from k2convert.records.calibration import GptqLayer
from k2convert.records.events import SILENT

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
sys.path.insert(0, str(Path(__file__).parents[1] / "forward"))


def walked(source: Path, folder: Path, device: str) -> WorkFolder:
    ids = np.random.default_rng(1).integers(0, 2048, size=(8, 24))
    work = conversion_work(folder)
    (work.folder / ".k2convert").mkdir(parents=True)
    work.begin(WalkJob({}, 3, {}), events=SILENT)
    header = StatisticsHeader("0" * 64, (), ids.size, 24, 8, 0, 0, {})
    walk = Walk(ids, 2, 256, 3, (device,), 2, lambda _: nullcontext(open_checkpoint(source)))

    def save(layer: LayerStatistics, dropped: int) -> None:
        write_layer(work, layer, header)

    options = GptqOptions(0, smoothing=True, check_stop=lambda: None)
    walk_gptq(walk, options, work, save=save, events=SILENT)
    return work


def decided(work: WorkFolder) -> GptqLayer:
    found = read_gptq(work, 1)
    assert found is not None
    return found


@pytest.mark.parametrize("device", ["cpu:0", pytest.param("shadow:0", marks=pytest.mark.slow)])
def test_a_device_makes_nearly_the_codes_of_the_cpu(cut: Path, tmp_path: Path, device: str) -> None:
    if device != "cpu:0":
        import shadow_device  # noqa: F401
    works = [walked(cut, tmp_path / name.replace(":", "-"), name) for name in ("cpu", device)]
    here, there = map(decided, works)
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
