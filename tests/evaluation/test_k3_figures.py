"""An evaluation of Kimi K3 has the figures that follow from the logits of Moonshot's own network."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import run_here
from kimi_k3_network import run_network

import k2convert
from k2convert.checkpoint.files import list_folder
from k2convert.evaluation.scores import summarize
from k2convert.records.evaluation import Evaluation, EvaluationRow
from scripts.evaluation.measure import scores_from

pytest.importorskip("llmcompressor")

WINDOWS, LENGTH = 4, 48
KINDS = {
    "modelopt": ("--layout", "modelopt"),
    "compressed-tensors": ("--layout", "compressed-tensors", "--activations", "w4a4"),
    "fp8": ("--recipe", "kimi-k3-nvfp4-fp8"),
}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 64, (WINDOWS, LENGTH)))
    return path


@pytest.fixture(scope="module")
def results(k3_lively: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("results")
    for kind, options in KINDS.items():
        run_here("run", k3_lively, folder / kind, *options, "--quiet", "--device", "cpu", code=0)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def evaluated(k3_lively: Path, results: dict[str, Path], ids: Path) -> Evaluation:
    options: dict[str, Any] = {"tokens": WINDOWS * LENGTH, "window": LENGTH, "device": "cpu", "activations": "both"}
    out = ids.with_name("evaluation.json")
    return k2convert.evaluate(k3_lively, list(results.values()), [ids], out=out, **options)


def row_of(found: Evaluation, name: str, activations: str) -> EvaluationRow:
    return next(row for row in found.rows if (row.model.name, row.model.activations) == (name, activations))


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
def test_a_cast_changes_no_token(kind: str, evaluated: Evaluation) -> None:
    row = row_of(evaluated, kind, "w4a16")
    figures = row.figures
    assert figures.divergence.maximum == 0
    assert (figures.top1_agreement, figures.left_top5) == (1, 0)
    assert {layer.relative_error for layer in row.layers} == {0}
    assert figures.perplexity == figures.reference_perplexity


@pytest.mark.parametrize(
    ("kind", "mode", "rel"),
    [
        ("modelopt", "w4a4", 2e-3),
        ("compressed-tensors", "w4a4", 2e-3),
        ("fp8", "w4a16", 2e-3),
        ("fp8", "w4a4", 3e-2),
    ],
)
def test_figures_by_the_logits_of_moonshots_code(
    kind: str, mode: str, rel: float, k3_lively: Path, results: dict[str, Path], ids: Path, evaluated: Evaluation
) -> None:
    """The first two layers are the same to float noise. Rounded inputs turn noise into steps, and steps into routes."""
    tokens = torch.as_tensor(np.load(ids))
    reference = run_network(k3_lively, tokens)
    model = run_network(results[kind], tokens, w4a4=mode == "w4a4")
    expected = summarize(scores_from(reference.logits, model.logits, tokens))
    row = row_of(evaluated, kind, mode)
    found = row.figures
    assert found.divergence.mean > 1e-4
    assert found.divergence.mean == pytest.approx(expected.divergence.mean, rel=rel)
    assert found.reference_perplexity == pytest.approx(expected.reference_perplexity, rel=1e-5)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=rel)
    for layer, (one, other) in enumerate(zip(reference.states, model.states, strict=True)):
        error = float((one.double() - other.double()).square().sum() / one.double().square().sum())
        tolerance = 1e-5 if layer < 2 else 10 * rel
        assert row.layers[layer].relative_error == pytest.approx(error, rel=tolerance, abs=1e-11)


def test_it_is_shown_as_that_of_kimi_k2(k3_lively: Path, results: dict[str, Path], ids: Path) -> None:
    folder = results["modelopt"]
    words = ("--tokens", WINDOWS * LENGTH, "--window", LENGTH, "--device", "cpu", "--activations", "both")
    run_here("evaluate", k3_lively, folder, "--text", ids, *words, code=0)
    run_here("report", folder, "--source", k3_lively, "--out", ids.parent, code=0)
    report = next(path for path in list_folder(ids.parent) if path.suffix == ".md").read_text()
    assert "W4A4" in report
    for layers in ((), ("--text", ids)):
        words = ("--layers", "1,4", *layers, "--json")
        found = json.loads(run_here("validate", folder, "--source", k3_lively, *words, code=0).stdout)
        for layer in found["layers"]["layers"]:
            exact, _, activations = layer["errors"]
            assert exact["sqnr_db"] in (None, "inf", float("inf"))
            assert 5 < activations["sqnr_db"] < 30
