"""Figures of an evaluation from the scores of single tokens."""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.errors import CalibrationError
from k2convert.records.evaluation import (
    HISTOGRAM_EDGES,
    MAX_WINDOWS,
    Divergence,
    EvaluationRow,
    Figures,
    Mean,
    PositionMean,
    Verdict,
    WorstToken,
)

POSITION_BUCKETS: Final = 8
"""Position buckets double in width: the first of 16 positions, and the last takes what is left."""
FIRST_BUCKET: Final = 16
WORST_TOKENS: Final = 10
CONTEXT_TOKENS: Final = 24
"""Tokens before one of the worst that are shown."""

Decode = Callable[[list[int]], str]
"""Makes text of token ids; raises CalibrationError."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of every predicted token, [windows, tokens - 1] each: that of position p is of the token p + 1.

    `divergence`, `loss` and `reference_loss` are f64, in nats; a loss is -log p of the text's next token. `agrees` and
    `left_top5` are bool (records.evaluation.Figures).
    """

    divergence: NDArray[np.float64]
    loss: NDArray[np.float64]
    reference_loss: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    left_top5: NDArray[np.bool_]


def summarize(scores: TokenScores) -> Figures:
    """Return the figures over all tokens, of which there must be at least one."""
    return Figures(
        divergence=_divergence(scores.divergence),
        perplexity=math.exp(float(scores.loss.mean())),
        reference_perplexity=math.exp(float(scores.reference_loss.mean())),
        log_likelihood=mean_over_windows(scores.reference_loss - scores.loss),
        top1_agreement=float(scores.agrees.mean()),
        left_top5=float(scores.left_top5.mean()),
    )


def mean_over_windows(values: NDArray[np.float64]) -> Mean:
    """Return the mean of values [windows, positions], with the standard error of the windows' means."""
    means = values.mean(axis=1)
    error = None
    if means.size > 1:
        error = float(means.std(ddof=1) / math.sqrt(means.size))
    return Mean(float(values.mean()), error)


def compare_models(rows: Iterable[EvaluationRow]) -> tuple[Verdict, ...]:
    """Compare the models of different checkpoints on the same windows: in each mode each with the next farther one.

    A model whose weights are not NVFP4 is compared in every mode. If no two checkpoints have a mode in common, all are
    compared as they are.
    """
    known = [row for row in rows if row.figures.divergence.by_window]
    known.sort(key=lambda row: row.figures.divergence.mean)
    caches = {
        row.model.kv_cache: [other for other in known if other.model.kv_cache == row.model.kv_cache] for row in known
    }
    verdicts: list[Verdict] = []
    for same_cache in caches.values():
        modes = dict.fromkeys(row.model.activations for row in same_cache if row.model.activations)
        groups = [[row for row in same_cache if row.model.activations in (None, mode)] for mode in modes]
        if not any(len({row.model.name for row in group}) > 1 for group in groups):
            groups = [same_cache]
        for group in groups:
            for nearer, farther in pairwise(group):
                if nearer.model.name != farther.model.name:
                    windows = np.array([row.figures.divergence.by_window for row in (nearer, farther)])
                    difference = mean_over_windows((windows[1] - windows[0])[:, None])
                    verdicts.append(Verdict(nearer.model, farther.model, difference))
    return tuple(dict.fromkeys(verdicts))


def worst_tokens(divergence: NDArray[np.float64], count: int) -> list[tuple[int, int]]:
    """Return window and position of the tokens with the largest divergence, the largest first."""
    order = np.argsort(-divergence, axis=None, kind="stable")[:count]
    return [(int(index) // divergence.shape[1], int(index) % divergence.shape[1]) for index in order]


def describe_worst(
    divergence: NDArray[np.float64],
    ids: NDArray[np.int64],
    windows: NDArray[np.int64],
    reference_ids: NDArray[np.int64],
    model_ids: NDArray[np.int64],
    *,
    decode: Decode | None,
) -> tuple[WorstToken, ...]:
    """Return the tokens with the largest divergence [windows, tokens - 1], the largest first, in words.

    `ids` [windows, tokens] are the text and `windows` the numbers of its windows. The others are the most likely tokens
    of both models, of the shape of the divergence. Without `decode`, or if it cannot, token ids are shown.
    """

    def shown(tokens: NDArray[np.int64]) -> str:
        token_ids: list[int] = tokens.tolist()
        if decode is not None:
            with suppress(CalibrationError):
                return decode(token_ids)
        return " ".join(map(str, token_ids))

    worst: list[WorstToken] = []
    for window, position in worst_tokens(divergence, WORST_TOKENS):
        text = ids[window]
        predicted = position + 1
        worst.append(
            WorstToken(
                window=int(windows[window]),
                position=predicted,
                divergence=float(divergence[window, position]),
                before=shown(text[max(0, predicted - CONTEXT_TOKENS) : predicted]),
                token=shown(text[predicted : predicted + 1]),
                reference_token=shown(reference_ids[window, position : position + 1]),
                model_token=shown(model_ids[window, position : position + 1]),
            )
        )
    return tuple(worst)


def _divergence(values: NDArray[np.float64]) -> Divergence:
    median, p99, p999 = (float(quantile) for quantile in np.quantile(values, (0.5, 0.99, 0.999)))
    counts = np.bincount(np.searchsorted(HISTOGRAM_EDGES, values.ravel(), side="right"))
    mean = mean_over_windows(values)
    length = values.shape[1]
    borders = [0, *(FIRST_BUCKET << power for power in range(POSITION_BUCKETS - 1)), length]
    return Divergence(
        mean=mean.mean,
        standard_error=mean.standard_error,
        median=median,
        p99=p99,
        p999=p999,
        maximum=float(values.max()),
        by_position=tuple(
            PositionMean(first, min(stop, length), float(values[:, first:stop].mean()))
            for first, stop in pairwise(borders)
            if first < length and stop > first
        ),
        histogram=tuple(int(count) for count in np.pad(counts, (0, len(HISTOGRAM_EDGES) + 1 - counts.size))),
        by_window=tuple(values.mean(axis=1).tolist()) if len(values) <= MAX_WINDOWS else (),
    )
