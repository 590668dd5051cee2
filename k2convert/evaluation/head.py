"""The end of a model: final norm and output matrix, in tiles of tokens and of the vocabulary.

For a tile, logits of the reference and of every model are computed in FP32, and what is needed of them is added to
running sums in FP64:

    l, l'      logits of the reference and of a model          p = softmax(l)
    peak       the largest logit so far                         exp(l - peak) stays finite
    total      sum exp(l - peak)                                log sum exp(l) = peak + log(total)
    cross      sum exp(l - peak) (l - l')

    KL(p || p') = cross / total - log sum exp(l) + log sum exp(l')

So no more logits are in memory than those of a tile, and a model with the reference's logits has a divergence of
exactly 0. Tiles do not depend on the number of workers, and they are added in order: the same bytes with any number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.errors import CheckpointError
from k2convert.evaluation.checkpoints import head_names
from k2convert.forward.moe import run_in_order
from k2convert.forward.residual import read_mixture
from k2convert.forward.weights import DenseWeight, WeightReader
from k2convert.models.names import OUTPUT_MIXTURE

TILE_ROWS: Final = 2048
PIECE_TOKENS: Final = 512
"""Rows of the vocabulary and tokens that a worker computes at a time."""

TOP: Final = 5


class Head:
    """Final norm and output matrix of one checkpoint."""

    def __init__(self, reader: WeightReader) -> None:
        """Read the norm; CheckpointError if norm or matrix are not there in a form that can be computed."""
        self._reader = reader
        norm, self._name, *mixture = head_names(reader.checkpoint)
        self.normed = reader.read_norm(norm)
        """The final norm of hidden states f32 [T, K]."""
        self._mixture = read_mixture(reader, f"{reader.family.prefix}{OUTPUT_MIXTURE}") if mixture else None
        channels = self.normed.weight.numel()
        info = reader.info(self._name)
        if len(info.shape) != 2 or info.shape[1] != channels:
            raise CheckpointError(
                f"{info.shard}: {info.name} has shape {list(info.shape)}, which does not fit {norm} "
                f"[{channels}]. Use a whole checkpoint."
            )
        self.vocabulary = info.shape[0]

    def mixed(self, *states_TK: Tensor) -> Tensor:
        """Return what the final norm reads: the last state, or the mixture of it and those before the blocks."""
        return states_TK[-1] if self._mixture is None else self._mixture(*states_TK)

    def rows(self, first: int, stop: int) -> DenseWeight:
        """Return rows of the output matrix."""
        return DenseWeight(self._reader.read_numbers(self._name, first_row=first, num_rows=stop - first))


@dataclass(slots=True)
class _Sums:
    """Sums over rows of the vocabulary for some tokens: of one model, but `cross`, which is of it and the reference.

    f64 [T] each; `target` is the logit of the text's next token. `top` are the largest logits f32 [T, TOP], `top_ids`
    their tokens.
    """

    peak: Tensor
    total: Tensor
    cross: Tensor
    target: Tensor
    top: Tensor
    top_ids: Tensor

    @staticmethod
    def empty(tokens: int, device: str) -> _Sums:
        zeros = torch.zeros(4, tokens, dtype=torch.float64, device=device)
        top = torch.full((tokens, TOP), -torch.inf, device=device)
        return _Sums(zeros[0] - torch.inf, zeros[1], zeros[2], zeros[3], top, torch.full_like(top, -1).long())

    def to(self, device: str) -> _Sums:
        return _Sums(*(getattr(self, field.name).to(device) for field in fields(self)))

    def add(self, tokens: slice, part: _Sums) -> tuple[Tensor, Tensor]:
        """Add the sums over more rows, without `cross`; returns the factors f64 [t] of both for the new peak."""
        peak = torch.maximum(self.peak[tokens], part.peak)
        before = (self.peak[tokens] - peak).exp()
        after = (part.peak - peak).exp()
        self.peak[tokens] = peak
        self.total[tokens] = self.total[tokens] * before + part.total * after
        self.target[tokens] += part.target
        values = torch.cat([self.top[tokens], part.top], 1)
        ids = torch.cat([self.top_ids[tokens], part.top_ids], 1)
        self.top[tokens], indices = values.topk(TOP, dim=1)
        self.top_ids[tokens] = ids.gather(1, indices)
        return before, after

    def log_total(self) -> Tensor:
        """Return log sum exp of the logits, f64 [T]."""
        return self.peak + self.total.log()


def _compute(
    tokens: slice, states: Sequence[Tensor], targets: Tensor, first: int, matrices: Sequence[DenseWeight]
) -> tuple[slice, list[_Sums]]:
    """Return the sums of every model, the reference first, over some tokens and the rows of `matrices`.

    The states are on one device, as the matrices, whose rows begin with row `first` of the output matrices.
    """
    logits = [rows.linear(own[tokens]) for own, rows in zip(states, matrices, strict=True)]
    targets = targets[tokens] - first
    is_here = (targets >= 0) & (targets < logits[0].shape[1])
    columns = torch.where(is_here, targets, 0)[:, None]
    of_reference = torch.empty(0)
    sums = list[_Sums]()
    for own in logits:
        peak = own.amax(dim=1)
        weights = (own - peak[:, None]).exp()
        of_reference = of_reference if sums else weights
        top, ids = own.topk(min(TOP, own.shape[1]), dim=1)
        sums.append(
            _Sums(
                peak=peak.double(),
                total=weights.sum(dim=1, dtype=torch.float64),
                cross=(of_reference * (logits[0] - own)).sum(dim=1, dtype=torch.float64),
                target=torch.where(is_here, own.gather(1, columns)[:, 0], 0.0).double(),
                top=top,
                top_ids=ids + first,
            )
        )
    return tokens, sums


@torch.no_grad()
def score_tokens(
    heads: Sequence[Head],
    models: Sequence[int],
    states: Sequence[Tensor],
    targets: Tensor,
    *,
    devices: tuple[str, ...],
    workers: int,
) -> dict[str, NDArray[Any]]:
    """Score some tokens: the hidden states f32 [T, K] of every model after the last layer, and the next tokens i64 [T].

    `heads` are those of the checkpoints, `models` the number of each model's checkpoint. The states are overwritten.
    Returns the scores of every model, the reference first, [M, T] each: `divergence` is KL(reference || model) and
    `loss` -log p of the text's next token, both f64 in nats; `likeliest` is the most likely next token, int64;
    `left_top5` is whether the reference's is not among the model's five.
    """
    for number, own in zip(models, states, strict=True):
        own.copy_(heads[number].normed(own))
    home = devices[0]
    sums = [_Sums.empty(targets.shape[0], home) for _ in models]
    pieces = _pieces(heads, models, states, targets, devices)
    with run_in_order(lambda piece: piece(), pieces, workers=workers) as results:
        for tokens, parts in results:
            moved = [part.to(home) for part in parts]
            factors = [own.add(tokens, part) for own, part in zip(sums, moved, strict=True)]
            before, after = factors[0]
            for own, part in zip(sums, moved, strict=True):
                own.cross[tokens] = own.cross[tokens] * before + part.cross * after
    reference = sums[0]
    likeliest = reference.top_ids[:, :1]
    divergence = [own.cross / reference.total - reference.log_total() + own.log_total() for own in sums]
    scores = {
        "divergence": torch.stack(divergence).clamp(min=0),
        "loss": torch.stack([own.log_total() - own.target for own in sums]),
        "likeliest": torch.stack([own.top_ids[:, 0] for own in sums]),
        "left_top5": torch.stack([(own.top_ids != likeliest).all(dim=1) for own in sums]),
    }
    return {name: values.cpu().numpy() for name, values in scores.items()}


def _pieces(
    heads: Sequence[Head], models: Sequence[int], states: Sequence[Tensor], targets: Tensor, devices: tuple[str, ...]
) -> Iterator[Callable[[], tuple[slice, list[_Sums]]]]:
    """Yield the pieces, assigned to the devices in turn; a row of a matrix is read once."""
    tokens = [slice(start, start + PIECE_TOKENS) for start in range(0, targets.shape[0], PIECE_TOKENS)]
    used = devices[: len(tokens)]
    held = [([own.to(device) for own in states], targets.to(device)) for device in used]
    vocabulary = heads[0].vocabulary
    for first in range(0, vocabulary, TILE_ROWS):
        read = [head.rows(first, min(first + TILE_ROWS, vocabulary)) for head in heads]
        moved = [[rows.to(device) for rows in read] for device in used]
        for number, part in enumerate(tokens):
            index = number % len(used)
            yield partial(_compute, part, *held[index], first, [moved[index][checkpoint] for checkpoint in models])
