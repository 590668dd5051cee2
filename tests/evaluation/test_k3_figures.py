"""An evaluation of Kimi K3 has the figures that follow from the logits of Moonshot's own network."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import run_here
from kimi_k3_network import computing_in_fp64, run_network

import k2convert
from k2convert.checkpoint.files import list_folder
from k2convert.evaluation.scores import summarize
from k2convert.records.evaluation import Evaluation, EvaluationRow
from scripts.evaluation.measure import scores_from

sys.path.insert(0, str(Path(__file__).parents[1] / "check" / "contract"))
from converted import Converted
from other_tools import K3, foreign, nvidia_k3

pytest.importorskip("llmcompressor")
pytestmark = pytest.mark.slow

WINDOWS, LENGTH = 4, 48
KINDS = {
    "modelopt": ("--layout", "modelopt"),
    "compressed-tensors": ("--layout", "compressed-tensors", "--activations", "w4a4"),
    "fp8": ("--recipe", "kimi-k3-nvfp4-fp8"),
}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 512, (WINDOWS, LENGTH)))
    return path


@pytest.fixture(scope="module")
def results(k3_lively: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("results")
    for kind, options in KINDS.items():
        run_here("run", k3_lively, folder / kind, *options, "--quiet", "--device", "cpu", code=0)
    nvidia_k3(foreign(Converted(K3, folder / "modelopt", k3_lively), folder / "nvidia").folder)
    return {kind: folder / kind for kind in (*KINDS, "nvidia")}


def evaluated(source: Path, results: dict[str, Path], ids: Path, name: str) -> Evaluation:
    options: dict[str, Any] = {"tokens": WINDOWS * LENGTH, "window": LENGTH, "device": "cpu", "activations": "both"}
    return k2convert.evaluate(source, list(results.values()), [ids], out=ids.with_name(name), **options)


@pytest.fixture(scope="module")
def usual(k3_lively: Path, results: dict[str, Path], ids: Path) -> Evaluation:
    """In FP32, as always."""
    return evaluated(k3_lively, results, ids, "fp32.json")


@pytest.fixture(scope="module")
def exact(k3_lively: Path, results: dict[str, Path], ids: Path) -> Evaluation:
    with computing_in_fp64():
        return evaluated(k3_lively, results, ids, "fp64.json")


def row_of(evaluation: Evaluation, name: str, activations: str) -> EvaluationRow:
    return next(row for row in evaluation.rows if (row.model.name, row.model.activations) == (name, activations))


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("computed_in", ["usual", "exact"])
def test_a_cast_changes_no_token(kind: str, computed_in: str, request: pytest.FixtureRequest) -> None:
    row = row_of(request.getfixturevalue(computed_in), kind, "w4a16")
    figures = row.figures
    assert figures.divergence.maximum == 0
    assert (figures.top1_agreement, figures.left_top5) == (1, 0)
    assert {layer.relative_error for layer in row.layers} == {0}
    assert figures.perplexity == figures.reference_perplexity


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("modelopt", "w4a4"), ("compressed-tensors", "w4a4")),
        *(("fp8", "w4a16"), ("fp8", "w4a4"), ("nvidia", "w4a16"), ("nvidia", "w4a4")),
    ],
)
def test_figures_by_the_logits_of_moonshots_code(
    kind: str, mode: str, k3_lively: Path, results: dict[str, Path], ids: Path, exact: Evaluation, usual: Evaluation
) -> None:
    """Both compute in FP64, and store hidden states in FP32 between layers, so they round the same numbers.

    In FP32 they differ by 1e-7. An input as near as that to the border between two numbers of FP8 or FP4 becomes one of
    them in each, a step of 6 % or more. Steps grow by the layer, and lead to other experts. So the figures in FP32 are
    these only roughly: within their own standard error.
    """
    tokens = torch.as_tensor(np.load(ids))
    with computing_in_fp64():
        reference = run_network(k3_lively, tokens)
        model = run_network(results[kind], tokens, w4a4=mode == "w4a4")
    expected = summarize(scores_from(reference.logits, model.logits, tokens))
    row = row_of(exact, kind, mode)
    figures = row.figures
    assert figures.divergence.mean > 1e-3
    assert figures.divergence.mean == pytest.approx(expected.divergence.mean, rel=1e-6)
    assert figures.reference_perplexity == pytest.approx(expected.reference_perplexity, rel=1e-7)
    assert figures.perplexity == pytest.approx(expected.perplexity, rel=1e-7)
    for layer, (state, other) in enumerate(zip(reference.states, model.states, strict=True)):
        error = float((state.double() - other.double()).square().sum() / state.double().square().sum())
        assert row.layers[layer].relative_error == pytest.approx(error, rel=1e-6)
    rounded = row_of(usual, kind, mode).figures
    assert rounded.divergence.mean == pytest.approx(figures.divergence.mean, abs=figures.divergence.standard_error)


def test_it_is_shown_as_that_of_kimi_k2(k3_lively: Path, results: dict[str, Path], ids: Path) -> None:
    folder = results["modelopt"]
    words = ("--tokens", WINDOWS * LENGTH, "--window", LENGTH, "--device", "cpu", "--activations", "both")
    run_here("evaluate", k3_lively, folder, "--text", ids, *words, code=0)
    run_here("report", folder, "--source", k3_lively, "--out", ids.parent, code=0)
    report = next(path for path in list_folder(ids.parent) if path.suffix == ".md").read_text()
    assert "W4A4" in report
    shown = run_here("validate", folder, "--source", k3_lively, "--layers", "1", code=0, COLUMNS="200").stdout
    assert re.search(r"its weights alone \(W4A16\) +│ +exact", shown)
    for layers in ((), ("--text", ids)):
        words = ("--layers", "1,4", *layers, "--json")
        document = json.loads(run_here("validate", folder, "--source", k3_lively, *words, code=0).stdout)
        for layer in document["layers"]["layers"]:
            exact, _, activations = layer["errors"]
            assert exact["sqnr_db"] in (None, "inf", float("inf"))
            assert 5 < activations["sqnr_db"] < 30
