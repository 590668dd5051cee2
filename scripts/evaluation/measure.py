"""Measures how far a variant's next-token distribution is from the INT4 model's."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from torch import Tensor

from k2convert.evaluation.scores import TokenScores, summarize
from k2convert.records.evaluation import Figures
from scripts.evaluation.models import EvaluatedModel, Mlps

WINDOW = 256


def encode(source: Path, text: str, *, tokens: int) -> Tensor:
    """Return the first `tokens` tokens of a text in windows: ids int64 [windows, 256]."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(source / "tokenizer.json")).encode(text).ids[:tokens]
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)


@torch.inference_mode()
def compare_in_turn(
    model: EvaluatedModel,
    reference: Mlps,
    variants: Mapping[tuple[str, str], Callable[[], Mlps]],
    windows: Tensor,
    *,
    batch: int,
) -> Iterator[tuple[tuple[str, str], Figures]]:
    """Yield the figures of every variant against the reference, on ids [W, T].

    The weights of one variant are held at a time, and the reference's logits in a file.
    """
    shape = (*windows.shape, model.vocabulary)
    with NamedTemporaryFile() as file:
        expected = torch.from_file(file.name, shared=True, size=math.prod(shape)).view(shape)
        batches = list(zip(windows.split(batch), expected.split(batch), strict=True))
        model.install(reference)
        for ids, logits in batches:
            logits.copy_(model.logits(ids))
        for name, load in variants.items():
            model.install(load())
            scores = [astuple(scores_from(logits, model.logits(ids), ids)) for ids, logits in batches]
            yield name, summarize(TokenScores(*map(np.concatenate, zip(*scores, strict=True))))


def scores_from(reference: Tensor, model: Tensor, ids: Tensor) -> TokenScores:
    """Return the scores of every predicted token, from logits [W, T, vocabulary] of both models and ids [W, T]."""
    log_r, log_m = (logits[:, :-1].double().log_softmax(dim=-1) for logits in (reference, model))
    best = log_r.argmax(dim=-1)
    top5 = log_m.topk(5, dim=-1).indices
    loss, reference_loss = (-log_p.gather(-1, ids[:, 1:, None])[..., 0].numpy() for log_p in (log_m, log_r))
    return TokenScores(
        divergence=(log_r.exp() * (log_r - log_m)).sum(dim=-1).numpy(),
        loss=loss,
        reference_loss=reference_loss,
        agrees=(best == log_m.argmax(dim=-1)).numpy(),
        left_top5=(top5 != best[..., None]).all(dim=-1).numpy(),
    )
