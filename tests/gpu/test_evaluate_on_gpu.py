"""On real devices an evaluation has the CPU's figures within TF32's noise, and the same bytes every time."""

from pathlib import Path

import numpy as np
import pytest
from conversions import convert

import k2convert
from k2convert.records.evaluation import Evaluation

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")


def test_figures_are_those_of_the_cpu(trained: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    result = convert(trained, tmp_path / "result", rule="max")
    np.save(ids, np.random.default_rng(0).integers(0, 2048, (8, 128)))

    def evaluated(device: str, out: str) -> Evaluation:
        return k2convert.evaluate(
            trained,
            [result, trained],
            [ids],
            tokens=1024,
            window=128,
            activations="both",
            device=device,
            out=tmp_path / out,  # type: ignore[arg-type]
        )

    here = evaluated("cpu", "cpu.json")
    there = evaluated("cuda", "cuda.json")
    again = evaluated("cuda", "again.json")
    assert (tmp_path / "cuda.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    assert there == again
    for one, other in zip(here.rows, there.rows, strict=True):
        assert other.figures.divergence.mean == pytest.approx(one.figures.divergence.mean, rel=0.05)
        assert other.figures.perplexity == pytest.approx(one.figures.perplexity, rel=0.01)
        for layer, same in zip(one.layers, other.layers, strict=True):
            assert same.relative_error == pytest.approx(layer.relative_error, rel=0.05, abs=1e-9)
    assert there.rows[-1].figures.divergence.maximum == 0, "the source against itself"
