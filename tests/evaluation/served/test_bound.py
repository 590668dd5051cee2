"""The divergence from the most likely tokens is a lower bound of the true one, by brute force on full distributions."""

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from k2convert.evaluation.answers import Answer
from k2convert.evaluation.bound import FLOOR, lower_bound, score_window

Array = NDArray[np.float64]


def distributions(seed: int, *, positions: int, vocabulary: int, spread: float, apart: float) -> tuple[Array, Array]:
    """Log-probabilities [positions, vocabulary] of two models; float32, as servers send them."""
    generator = np.random.default_rng(seed)
    logits = spread * generator.standard_normal((positions, vocabulary))
    other = logits + apart * generator.standard_normal(logits.shape)
    return tuple(x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (logits, other))  # type: ignore[return-value]


def answer(log_p: Array, tokens: NDArray[np.int32], top_k: int) -> Answer:
    order = np.argsort(-log_p, axis=1, kind="stable")[:, :top_k]
    rows = np.arange(len(log_p))
    return Answer(
        order.astype(np.int32),
        np.take_along_axis(log_p, order, axis=1).astype(np.float32),
        log_p[rows, tokens].astype(np.float32),
        {},
    )


def true_divergence(p: Array, q: Array) -> Array:
    return (np.exp(p) * (p - q)).sum(axis=1)


def merged(p: Array, q: Array, tokens: NDArray[np.int32], top_k: int) -> Array:
    """The same bound the long way: every token by itself, or in the bucket."""
    found = []
    for row_p, row_q, token in zip(p, q, tokens, strict=True):
        tops = [set(np.argsort(-row, kind="stable")[:top_k].tolist()) for row in (row_p, row_q)]
        alone = (tops[0] & tops[1]) | {int(token)}
        total = 0.0
        rest_p = 1.0
        rest_q = 1.0
        for i in alone:
            total += np.exp(row_p[i]) * (row_p[i] - row_q[i])
            rest_p = rest_p - np.exp(row_p[i])
            rest_q = rest_q - np.exp(row_q[i])
        found.append(total + (rest_p * np.log(rest_p / max(rest_q, FLOOR)) if rest_p > 1e-12 else 0.0))
    return np.array(found)


@pytest.mark.quick(3)
@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("apart", [0.05, 0.5, 3.0])
def test_the_bound_is_below_the_divergence_and_rises_with_k(spread: float, apart: float) -> None:
    p, q = distributions(7, positions=400, vocabulary=120, spread=spread, apart=apart)
    tokens = np.random.default_rng(8).integers(0, 120, 400).astype(np.int32)
    truth = true_divergence(p, q)
    shares = []
    for top_k in (1, 2, 5, 20, 60, 120):
        found = lower_bound(answer(p, tokens, top_k), answer(q, tokens, top_k), tokens)
        assert (found <= truth + 1e-5).all(), "float32 in the answers"
        assert found == pytest.approx(merged(p, q, tokens, top_k), abs=1e-5)
        shares.append(found.sum() / truth.sum())
    assert all(low < high + 1e-5 for low, high in pairwise(shares)), shares
    assert shares[-1] == pytest.approx(1, abs=1e-3)


def test_a_token_of_one_server_only_goes_into_the_bucket_of_both() -> None:
    p = np.log([[0.5, 0.3, 0.1, 0.1]])
    q = np.log([[0.1, 0.1, 0.5, 0.3]])
    tokens = np.array([0], dtype=np.int32)
    found = lower_bound(answer(p, tokens, 2), answer(q, tokens, 2), tokens)
    assert found == pytest.approx(0.5 * np.log(5) + 0.5 * np.log(0.5 / 0.9), rel=1e-6)


@pytest.mark.parametrize("top_k", [5, 30, 120])
def test_equal_distributions_have_a_divergence_of_exactly_zero(top_k: int) -> None:
    p, _ = distributions(1, positions=300, vocabulary=120, spread=6.0, apart=0.0)
    tokens = np.zeros(300, dtype=np.int32)
    assert (lower_bound(answer(p, tokens, top_k), answer(p, tokens, top_k), tokens) == 0).all()


def test_a_certain_token_leaves_nothing_to_the_bucket() -> None:
    """The rest is rounding alone: it makes no divergence."""
    p = np.log(np.array([[1 - 3e-9, 1e-9, 1e-9, 1e-9]]))
    q = np.log(np.array([[1 - 3e-12, 1e-12, 1e-12, 1e-12]]))
    tokens = np.zeros(1, dtype=np.int32)
    found = lower_bound(answer(p, tokens, 2), answer(q, tokens, 2), tokens)
    assert 0 <= found[0] <= true_divergence(p, q)[0] + 1e-7


def test_scores_are_those_of_the_full_distributions() -> None:
    p, q = distributions(2, positions=200, vocabulary=50, spread=1.0, apart=0.8)
    ids = np.random.default_rng(4).integers(0, 50, 201).astype(np.int32)
    found = score_window(answer(p, ids[1:], 8), answer(q, ids[1:], 8), ids)
    rows = np.arange(200)
    assert found.reference_loss[0] == pytest.approx(-p[rows, ids[1:]], rel=1e-6)
    assert found.loss[0] == pytest.approx(-q[rows, ids[1:]], rel=1e-6)
    assert (found.agrees[0] == (p.argmax(axis=1) == q.argmax(axis=1))).all()
    five = np.argsort(-q, axis=1)[:, :5]
    assert (found.left_top5[0] == [best not in row for best, row in zip(p.argmax(axis=1), five, strict=True)]).all()
