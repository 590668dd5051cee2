"""Evaluations of a result, with figures of real arrays: scores of tokens that are drawn from two real distributions."""

from pathlib import Path

import numpy as np

from k2convert.evaluation.scores import TokenScores, summarize, worst_tokens
from k2convert.records.document import encode
from k2convert.records.evaluation import (
    FORMAT,
    KIND,
    EvaluatedModel,
    Evaluation,
    EvaluationRow,
    EvaluationText,
    LayerFigures,
    WorstToken,
)
from k2convert.records.ledger import read_ledger

WINDOWS = 6
TOKENS = 257
WORDS = 64
TEXT = EvaluationText((("texts/emma.txt", "2" * 64),), "3" * 64, WINDOWS * TOKENS, TOKENS, WINDOWS, 0)
WORD = ["\n", " the", "\x1b[31m", "  ", "\u202eabc", "<b>|`x`", "é", "null"]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def token_scores(noise: float, *, seed: int = 0) -> TokenScores:
    """Scores of a model whose logits are the reference's plus noise, over windows of random tokens."""
    random = np.random.default_rng(seed)
    logits = 3 * random.standard_normal((WINDOWS, TOKENS - 1, WORDS))
    reference = log_softmax(logits)
    model = log_softmax(logits + noise * random.standard_normal(logits.shape))
    text = random.integers(0, WORDS, (WINDOWS, TOKENS - 1, 1))
    chosen = reference.argmax(axis=-1)
    top5 = np.argsort(-model, axis=-1)[..., :5]
    return TokenScores(
        divergence=np.maximum((np.exp(reference) * (reference - model)).sum(axis=-1), 0),
        loss=-np.take_along_axis(model, text, axis=-1)[..., 0],
        reference_loss=-np.take_along_axis(reference, text, axis=-1)[..., 0],
        agrees=chosen == model.argmax(axis=-1),
        left_top5=~(top5 == chosen[..., None]).any(axis=-1),
    )


def row(model: EvaluatedModel, noise: float, *, num_layers: int = 4) -> EvaluationRow:
    """A row with figures of its own noise, errors that grow by the layer, and a first layer without experts."""
    scores = token_scores(noise)
    worst = tuple(
        WorstToken(window, position, float(scores.divergence[window, position]), f"words before{WORD[i]}", *picked)
        for i, (window, position) in enumerate(worst_tokens(scores.divergence, len(WORD)))
        for picked in [tuple(WORD[(i + step) % len(WORD)] for step in range(3))]
    )
    layers = tuple(
        LayerFigures(noise**2 * (layer + 1) / 50, None if layer == 0 else 1 - noise * layer / 40)
        for layer in range(num_layers)
    )
    return EvaluationRow(model, summarize(scores), layers, worst)


def evaluation_of(folder: Path) -> Evaluation:
    """An evaluation of the weights in `folder`, weight-only and with FP4 activations."""
    weights = read_ledger(folder).weights
    models = [EvaluatedModel(f"/home/someone/{folder.name}", weights, mode) for mode in ("w4a16", "w4a4")]
    return Evaluation(
        format=FORMAT,
        kind=KIND,
        tool_version="0.2.0",
        reference=EvaluatedModel("hf://moon/K2", "1" * 64),
        text=TEXT,
        rows=tuple(row(model, noise) for model, noise in zip(models, (0.2, 0.35), strict=True)),
    )


def of_servers() -> Evaluation:
    """An evaluation as releases 0.2 and 0.3 wrote it of two servers, without layers and digests of weights."""
    model = EvaluatedModel("http://b:8000/v1")
    return Evaluation(
        format=FORMAT,
        kind="compare",
        tool_version="0.2.0",
        reference=EvaluatedModel("http://a:8000/v1"),
        text=TEXT,
        rows=(row(model, 0.3, num_layers=0),),
        top_k=64,
        noise=0.00012,
    )


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Write RESULT/evaluation.json."""
    (folder / "evaluation.json").write_bytes(encode(evaluation))
