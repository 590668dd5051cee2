"""The head in tiles: the scores of all logits at once, wherever the tiles end and whatever computes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from k2convert.checkpoint.index import open_checkpoint
from k2convert.evaluation import head as tiles
from k2convert.evaluation.head import Head, score_tokens
from k2convert.forward.weights import WeightReader
from scripts.evaluation.measure import scores_from

TOKENS = 90

Scores = dict[str, NDArray[Any]]


def made_up(seed: int) -> Tensor:
    """Hidden states f32 [TOKENS, 256]."""
    return torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def head(trained: Path) -> Head:
    return Head(WeightReader(open_checkpoint(trained)))


TARGETS = torch.randint(0, 2048, (TOKENS,), generator=torch.Generator().manual_seed(9))


def scored(head: Head, states: list[Tensor], *, devices: tuple[str, ...] = ("cpu",), workers: int = 2) -> Scores:
    copies = [own.clone() for own in states]
    return score_tokens([head], [0] * len(states), copies, TARGETS, devices=devices, workers=workers)


def same(scores: Scores, other: Scores) -> bool:
    return all(np.array_equal(array, other[name]) for name, array in scores.items())


@pytest.mark.quick(2)
@pytest.mark.parametrize(("rows", "pieces"), [(2048, 512), (300, 7), (1, 90), (2047, 45)])
def test_scores_are_those_of_all_logits(head: Head, monkeypatch: pytest.MonkeyPatch, rows: int, pieces: int) -> None:
    monkeypatch.setattr(tiles, "TILE_ROWS", rows)
    monkeypatch.setattr(tiles, "PIECE_TOKENS", pieces)
    reference = made_up(0)
    near = made_up(0) + 0.2 * made_up(1)
    far = made_up(2)
    scores = scored(head, [reference, near, far])
    matrix = head.rows(0, head.vocabulary)
    logits = [matrix.linear(head.normed(own))[None] for own in (reference, near, far)]
    last = torch.zeros(1, 1, 2048)
    ids = torch.cat([torch.zeros(1, 1, dtype=torch.int64), TARGETS[None]], dim=1)
    for number, own in enumerate(logits):
        expected = scores_from(torch.cat([logits[0], last], 1), torch.cat([own, last], 1), ids)
        np.testing.assert_allclose(scores["divergence"][number], expected.divergence[0], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(scores["loss"][number], expected.loss[0], rtol=1e-6)
        assert np.array_equal(scores["likeliest"][number] == scores["likeliest"][0], expected.agrees[0])
        assert np.array_equal(scores["left_top5"][number], expected.left_top5[0])
        assert np.array_equal(scores["likeliest"][number], own[0].argmax(dim=-1).numpy())
    assert scores["left_top5"][2].any()
    assert not scores["divergence"][0].any(), "the same logits"


def test_logits_of_any_size_are_added_without_overflow(head: Head) -> None:
    """The peak of a tile may be far below or above that of the tiles before it."""
    head.normed.weight.mul_(1e4)
    scores = scored(head, [made_up(0), made_up(3)])
    assert np.isfinite(scores["divergence"]).all()
    assert float(scores["divergence"][1].max()) > 1000


def test_neither_workers_nor_devices_change_the_bytes(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "PIECE_TOKENS", 16)
    states = [made_up(0), made_up(1)]
    once = scored(head, states, workers=1)
    assert same(once, scored(head, states, workers=3))
    assert same(once, scored(head, states, devices=("cpu", "cpu")))


def test_every_tensor_is_where_a_gpu_needs_it(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.forward import shadow_device

    monkeypatch.setattr(tiles, "PIECE_TOKENS", 16)
    states = [made_up(0), made_up(1)]
    here = scored(head, states)
    there = scored(head, states, devices=("shadow:0", "shadow:1"))
    np.testing.assert_allclose(there["divergence"], here["divergence"], rtol=1e-5, atol=1e-7)
    assert np.array_equal(there["likeliest"], here["likeliest"])
    assert min(shadow_device.calls[device] for device in ("shadow:0", "shadow:1")) > 10
