"""Measures how far a variant's next-token distribution is from the INT4 model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor

from scripts.evaluation.models import EvaluatedModel, Mlps

WINDOW = 256


@dataclass(frozen=True, slots=True)
class Score:
    """One variant on one text. The last three fields compare it with the INT4 model; they are None for that model."""

    perplexity: float
    kl_mean: float | None = None
    kl_p999: float | None = None
    top1_agreement: float | None = None


def encode(source: Path, text: str, *, tokens: int) -> Tensor:
    """Return the first `tokens` tokens of a text in windows: ids int64 [windows, 256]."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(source / "tokenizer.json")).encode(text).ids[:tokens]
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)


@dataclass(frozen=True, slots=True)
class Variant:
    """The weights of one row: the MLPs, and the norms and routers that smoothing changed."""

    mlps: Mlps
    scaled: dict[str, Tensor]


@torch.inference_mode()
def compare_in_turn(
    model: EvaluatedModel,
    reference: Mlps,
    variants: Mapping[tuple[str, str], Callable[[], Variant]],
    windows: Tensor,
    *,
    batch: int,
    progress: Callable[[tuple[str, str], Score], None] | None = None,
) -> tuple[Score, dict[tuple[str, str], Score]]:
    """Score the reference and every variant on ids [W, 256]; KL is from the reference, in nats per token.

    The weights of one variant are held at a time, and the reference's distributions in a file.
    """
    scores: dict[tuple[str, str], Score] = {}
    shape = len(windows) * (windows.shape[1] - 1), model.vocabulary
    with NamedTemporaryFile() as file:
        expected = torch.from_file(file.name, shared=True, size=math.prod(shape)).view(shape)
        batches = list(zip(windows.split(batch), expected.split(batch * (windows.shape[1] - 1)), strict=True))
        own = _Sums()
        for ids, target in batches:
            target.copy_(_log_probabilities(model, reference, ids))
            own.add(target, None, ids)
        for name, load in variants.items():
            variant = load()
            sums = _Sums()
            for ids, target in batches:
                sums.add(_log_probabilities(model, variant.mlps, ids, variant.scaled), target, ids)
            scores[name] = sums.score()
            if progress is not None:
                progress(name, scores[name])
    return own.score(), scores


def _log_probabilities(
    model: EvaluatedModel, mlps: Mlps, ids: Tensor, scaled: dict[str, Tensor] | None = None
) -> Tensor:
    """Return log-probabilities f32 [B * 255, vocabulary] for every token but the first of a window."""
    model.install(mlps, scaled)
    return torch.log_softmax(model.logits(ids)[:, :-1].flatten(0, 1), dim=-1)


class _Sums:
    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.divergences: list[Tensor] = []
        self.agreements: list[Tensor] = []

    def add(self, log_p: Tensor, expected: Tensor | None, ids: Tensor) -> None:
        self.losses.append(-log_p.gather(1, ids[:, 1:].reshape(-1, 1)).flatten().double())
        if expected is not None:
            self.divergences.append((expected.exp() * (expected - log_p)).sum(dim=-1).double())
            self.agreements.append((expected.argmax(dim=-1) == log_p.argmax(dim=-1)).double())

    def score(self) -> Score:
        perplexity = math.exp(float(torch.cat(self.losses).mean()))
        if not self.divergences:
            return Score(perplexity)
        divergence = torch.cat(self.divergences)
        return Score(
            perplexity,
            kl_mean=float(divergence.mean()),
            kl_p999=float(torch.quantile(divergence, 0.999)),
            top1_agreement=float(torch.cat(self.agreements).mean()),
        )
