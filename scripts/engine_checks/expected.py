"""What scripts/eval computes for a checkpoint: logits of the same windows and the greedy text of the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
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
class Expected:
    """The logits f32 [W, 256, vocabulary] of a model in FP32, and the ids that continue the prompt."""

    logits: Tensor
    greedy: list[int]


class Evaluation:
    """scripts/eval's model of the tiny checkpoint, on the first `tokens` tokens of its held-out text."""

    def __init__(self, tokens: int) -> None:
        from tokenizers import Tokenizer

        self.windows = encode(TINY, (TINY / "eval.txt").read_text(encoding="utf-8"), tokens=tokens)
        self.prompt: list[int] = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(PROMPT).ids
        self._model: EvaluatedModel = build_model(TINY)

    def source(self) -> Expected:
        """Return the INT4 source's logits and text."""
        return self._compute(source_mlps(TINY))

    def converted(self, folder: Path, *, ignore_input_scales: bool) -> Expected:
        """Return a converted checkpoint's logits and text."""
        mlps = converted_mlps(folder)
        return self._compute(without_input_scales(mlps) if ignore_input_scales else mlps)

    @torch.inference_mode()
    def _compute(self, mlps: Mlps) -> Expected:
        self._model.install(mlps)
        ids = list(self.prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(self._model.logits(torch.tensor([ids]))[0, -1].argmax()))
        return Expected(self._model.logits(self.windows), ids[len(self.prompt) :])
