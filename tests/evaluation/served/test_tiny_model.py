"""The tiny checkpoint and its conversion, computed by transformers, behind two servers: the bound and the true KL."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from asking import Serve
from command import run_here
from whole_models import whole_model

pytest.importorskip("transformers")

from scripts.engine_checks.model_server import Model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "least"), [(64, 0.7), (256, 0.8)])
def test_the_bound_is_most_of_the_true_divergence(
    trained: Path, tmp_path: Path, serve: Serve, top_k: int, least: float
) -> None:
    run_here("run", trained, tmp_path / "out", "--quiet", code=0)
    models = whole_model(trained), whole_model(tmp_path / "out", w4a4=True)

    @cache
    @torch.inference_mode()
    def log_p(number: int, ids: tuple[int, ...]) -> np.ndarray:
        return torch.log_softmax(models[number].logits(torch.tensor([ids]))[0].double(), dim=-1).numpy()

    answers: list[Model] = [lambda ids: log_p(0, tuple(ids)), lambda ids: log_p(1, tuple(ids))]
    servers = [serve(model, max_logprobs=256) for model in answers]
    text = ["--text", trained / "eval.txt", "--tokenizer", trained, "--tokens", 192, "--window", 96, "--requests", 1]
    done = run_here("compare", *(s.url for s in servers), *text, "--top-k", top_k, "--json", "--quiet", code=0)
    found = json.loads(done.stdout)["rows"][0]["figures"]["divergence"]["mean"]
    windows = {tuple(ids) for ids in servers[0].questions if len(ids) == 96}
    pairs = [(log_p(0, ids)[:-1], log_p(1, ids)[:-1]) for ids in windows]
    truth = np.mean([(np.exp(p) * (p - q)).sum(axis=1) for p, q in pairs])
    assert least * truth <= found <= truth
