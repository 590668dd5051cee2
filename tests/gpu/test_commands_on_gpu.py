"""On real devices commands give the CPU's figures within TF32's noise, and the same bytes every time."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversions import convert
from safetensors.torch import load_file

import k2convert
from k2convert.checkpoint.index import open_checkpoint
from k2convert.forward.decoder import DecoderLayer, embed
from k2convert.forward.moe import read_router
from k2convert.forward.weights import WeightReader
from k2convert.quantize.formats.nvfp4 import unpack_nibbles
from k2convert.quantize.gptq.device_kernel import check_device
from k2convert.records.calibration import OutputErrors
from k2convert.records.evaluation import Evaluation
from k2convert.records.ledger import find_ledger
from tests.forward.observers import Recorder

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


def test_the_device_rounds_as_the_cpu_does() -> None:
    check_device("cuda:0")


def test_a_result_is_nearly_that_of_the_cpu_and_the_same_again(trained: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(0, 2048, (8, 128)))
    settings = {"calibration.tokens": 1024, "calibration.window": 128}
    results: dict[str, Path] = {}
    errors: dict[str, dict[int, OutputErrors]] = {}
    for name in ("cpu", "cuda", "again"):
        device = "cpu" if name == "cpu" else "cuda"
        results[name] = tmp_path / name
        k2convert.convert(trained, results[name], text=ids, device=device, settings=settings)
        ledger = find_ledger(results[name])
        errors[name] = ledger.calibration.held_out
    for number, of_cpu in errors["cpu"].items():
        assert errors["cuda"][number].gptq_error == pytest.approx(of_cpu.gptq_error, rel=0.05)
        assert errors["cuda"][number].mse_error == pytest.approx(of_cpu.mse_error, rel=0.05)
    first = min(errors["cpu"])
    for shard in sorted(results["cpu"].glob("*.safetensors")):
        assert (results["cuda"] / shard.name).read_bytes() == (results["again"] / shard.name).read_bytes()
        here = load_file(shard)
        there = load_file(results["cuda"] / shard.name)
        for name, codes in here.items():
            if f"layers.{first}.mlp.experts." in name and name.endswith("_proj.weight"):
                mine, other = (unpack_nibbles(part.numpy()) for part in (codes, there[name]))
                assert (mine == other).mean() > (0.7 if "down_proj" in name else 0.9), name


def test_figures_are_those_of_the_cpu(trained: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    result = convert(trained, tmp_path / "result", rule="max")
    np.save(ids, np.random.default_rng(0).integers(0, 2048, (8, 128)))
    options: dict[str, Any] = {"tokens": 1024, "window": 128, "activations": "both"}

    def evaluated(device: Any, out: str) -> Evaluation:
        return k2convert.evaluate(trained, [result, trained], [ids], device=device, out=tmp_path / out, **options)

    here = evaluated("cpu", "cpu.json")
    there = evaluated("cuda", "cuda.json")
    again = evaluated("cuda", "again.json")
    assert (tmp_path / "cuda.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    assert there == again
    for row, other in zip(here.rows, there.rows, strict=True):
        assert other.figures.divergence.mean == pytest.approx(row.figures.divergence.mean, rel=0.05)
        assert other.figures.perplexity == pytest.approx(row.figures.perplexity, rel=0.01)
        for layer, same in zip(row.layers, other.layers, strict=True):
            assert same.relative_error == pytest.approx(layer.relative_error, rel=0.05, abs=1e-9)
    assert there.rows[-1].figures.divergence.maximum == 0, "the source against itself"


pytest.importorskip("transformers")


@pytest.mark.parametrize("devices", [("cuda",), ("cuda", "cuda")])
def test_layers_are_those_of_the_cpu(tiny: Path, devices: tuple[str, ...]) -> None:
    ids = torch.randint(0, 2048, (4, 128), generator=torch.Generator().manual_seed(1))
    with closing(WeightReader(open_checkpoint(tiny))) as reader:
        hidden = embed(reader, ids)
        for layer in range(4):
            observer = Recorder()
            expected = DecoderLayer(reader, layer).run(hidden)
            output = DecoderLayer(reader, layer, devices, workers=3).run(hidden, observer)
            assert output.device == hidden.device
            assert all(mlp.tokens.is_cuda for mlp in observer.experts)
            assert observer.outputs[0].is_cuda
            # A token near a tie of the router may choose another expert for TF32's noise in the attention.
            close = torch.nn.functional.cosine_similarity(output, expected, dim=-1) > 0.9999
            assert float(close.float().mean()) > 0.99
            if observer.routings[0] is not None:
                routing = read_router(reader, f"model.layers.{layer}.mlp")(observer.inputs[0].cpu())
                same = observer.routings[0].experts.cpu().sort().values == routing.experts.sort().values
                assert float(same.float().mean()) > 0.999, "only exact ties may differ: the router does not use TF32"
            hidden = expected
