"""The tiny checkpoint and its conversion, computed by transformers, behind two servers: the bound and the true KL."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from asking import Serve
from command import run_here

pytest.importorskip("transformers")

from scripts.engine_checks.model_server import Model
from scripts.evaluation.models import Mlps, build_model, converted_mlps, source_mlps

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "least"), [(64, 0.7), (256, 0.8)])
def test_the_bound_is_most_of_the_true_divergence(
    trained: Path, tmp_path: Path, serve: Serve, top_k: int, least: float
) -> None:
    run_here("run", trained, tmp_path / "out", "--quiet", code=0)
    network = build_model(trained)
    known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    @torch.inference_mode()
    def log_p(mlps: Mlps, ids: list[int]) -> np.ndarray:
        network.install(mlps)
        return torch.log_softmax(network.logits(torch.tensor([ids]))[0].double(), dim=-1).numpy()

    models = source_mlps(trained), converted_mlps(tmp_path / "out")

    def both(ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        if tuple(ids) not in known:
            known[tuple(ids)] = log_p(models[0], ids), log_p(models[1], ids)
        return known[tuple(ids)]

    answers: list[Model] = [lambda ids: both(ids)[0], lambda ids: both(ids)[1]]
    servers = [serve(model, max_logprobs=256) for model in answers]
    text = ["--text", trained / "eval.txt", "--tokenizer", trained, "--tokens", 192, "--window", 96, "--requests", 1]
    done = run_here("compare", *(s.url for s in servers), *text, "--top-k", top_k, "--json", "--quiet", code=0)
    found = json.loads(done.stdout)["rows"][0]["figures"]["divergence"]["mean"]
    truth = np.mean([(np.exp(p[:-1]) * (p[:-1] - q[:-1])).sum(axis=1) for p, q in known.values() if len(p) == 96])
    assert least * truth <= found <= truth
