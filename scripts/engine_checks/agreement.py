"""Compares what an engine computed with what scripts/eval computes from the same files.

Both compute in float32 but add up in different orders, so logits differ in the last bits. Without rounded activations
that is all. With them, a value that lies midway between two FP4 values may fall either way, and takes a few later ones
with it. transformers decompresses to BF16, which rounds the weights of rule `max` once more (those of `mse` are
BF16 numbers). Tolerances are a few times what was measured on the tiny checkpoint.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from scripts.engine_checks.variants import TINY
from scripts.evaluation.measure import encode
from scripts.evaluation.models import (
    EvaluatedModel,
    Mlps,
    build_model,
    converted_mlps,
    source_mlps,
    without_input_scales,
)

PROMPT = "And it came to pass in those days, that"
NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an engine may be from scripts/eval.

    kl            KL divergence between the two, in nats a token
    kl_from_int4  difference of their KL divergences from the INT4 source
    perplexity    ratio of their perplexities, less 1
    """

    kl: float
    kl_from_int4: float
    perplexity: float


FLOAT32 = Tolerance(kl=1e-8, kl_from_int4=1e-6, perplexity=1e-5)  # measured: 4e-13, 1e-9, 1e-8
FP4_TIES = Tolerance(kl=2e-4, kl_from_int4=3e-4, perplexity=1e-3)  # measured: 3e-5, 5e-5, 2e-4
BF16_WEIGHTS = Tolerance(kl=1e-3, kl_from_int4=5e-4, perplexity=3e-3)  # measured: 2e-4, 8e-5, 7e-4
BF16_WEIGHTS_FP4_TIES = Tolerance(kl=5e-3, kl_from_int4=2e-3, perplexity=1e-2)  # measured: 2e-3, 3e-4, 4e-3


@dataclass(frozen=True, slots=True)
class Agreement:
    """Perplexities, the divergences of both from the INT4 source and of the engine from scripts/eval, and the texts."""

    perplexity: float
    expected_perplexity: float
    kl_from_int4: float
    expected_kl_from_int4: float
    kl: float
    same_text: bool | None

    def problems(self, tolerance: Tolerance) -> list[str]:
        """Return what is outside the tolerance, in words."""
        problems: list[str] = []
        if not self.kl <= tolerance.kl:
            problems.append(f"KL from scripts/eval is {self.kl:.3g}, allowed {tolerance.kl:g}")
        if not abs(self.perplexity / self.expected_perplexity - 1) <= tolerance.perplexity:
            problems.append(f"perplexity {self.perplexity:.5f}, scripts/eval has {self.expected_perplexity:.5f}")
        if not abs(self.kl_from_int4 - self.expected_kl_from_int4) <= tolerance.kl_from_int4:
            problems.append(
                f"KL from INT4 is {self.kl_from_int4:.5f}, scripts/eval has {self.expected_kl_from_int4:.5f}"
            )
        if self.same_text is False:
            problems.append("greedy text differs from that of scripts/eval")
        return problems


@dataclass(frozen=True, slots=True)
class Expected:
    """The logits f32 [W, 256, vocabulary] of a model in FP32, and the ids that continue the prompt."""

    logits: Tensor
    greedy: list[int]


class Reference:
    """scripts/eval's model of the tiny checkpoint, on the first `tokens` tokens of its held-out text.

    `expected` gives what it computes for a converted checkpoint of K2, each time the same object.
    """

    def __init__(self, tokens: int) -> None:
        from tokenizers import Tokenizer

        self.windows = encode(TINY, (TINY / "eval.txt").read_text(encoding="utf-8"), tokens=tokens)
        self.prompt: list[int] = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(PROMPT).ids
        self._model: EvaluatedModel = build_model(TINY)
        self.source = self._compute(source_mlps(TINY))
        self.expected = cache(self._expected)

    def _expected(self, folder: Path, ignore_input_scales: bool) -> Expected:
        mlps = converted_mlps(folder)
        return self._compute(without_input_scales(mlps) if ignore_input_scales else mlps)

    @torch.inference_mode()
    def _compute(self, mlps: Mlps) -> Expected:
        self._model.install(mlps)
        ids = list(self.prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(self._model.logits(torch.tensor([ids]))[0, -1].argmax()))
        return Expected(self._model.logits(self.windows), ids[len(self.prompt) :])


def compare(
    logits: Tensor, greedy: Tensor | None, *, expected: Expected, source: Expected, windows: Tensor
) -> Agreement:
    """Compare an engine's logits f32 [W, 256, vocabulary] and text."""
    engine, wanted, int4 = (_log_probabilities(tensor) for tensor in (logits, expected.logits, source.logits))
    return Agreement(
        perplexity=_perplexity(engine, windows),
        expected_perplexity=_perplexity(wanted, windows),
        kl_from_int4=_divergence(int4, engine),
        expected_kl_from_int4=_divergence(int4, wanted),
        kl=_divergence(wanted, engine),
        same_text=None if greedy is None else greedy.tolist() == expected.greedy,
    )


def _log_probabilities(logits: Tensor) -> Tensor:
    """Return log-probabilities f64 [W, 255, vocabulary] for every token but the first of a window."""
    return torch.log_softmax(logits[:, :-1].double(), dim=-1)


def _perplexity(log_p: Tensor, windows: Tensor) -> float:
    return float((-log_p.gather(-1, windows[:, 1:].unsqueeze(-1)).mean()).exp())


def _divergence(log_p: Tensor, log_q: Tensor) -> float:
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
