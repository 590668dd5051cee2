"""KL(reference || model) from the most likely tokens alone: a lower bound.

A server gives only the K most likely tokens of a distribution over the vocabulary. Let S be the tokens whose
probability both servers gave: those that are among the K of both, and the text's next token. Merge all others into one
bucket R. P and Q become distributions over S and R, and by the data processing inequality (the log-sum inequality on R)

    sum over S of p log(p / q)  +  P(R) log(P(R) / Q(R))  <=  KL(P || Q)

S may be any set, and may differ from token to token, as long as it is the same for both. A token that only one server
gave must go into R, of both: its other probability is unknown. The bound is exact if S is the vocabulary.

P(R) is 1 less a sum of rounded numbers. Where Q(R) is rounding alone it counts as FLOOR, which only lowers the bound.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.evaluation.answers import Answer
from k2convert.evaluation.scores import TokenScores

FLOOR: Final = 1e-6
"""The least probability that a sum of float32 numbers leaves."""

_TOP: Final = 5


def score_window(reference: Answer, model: Answer, tokens: NDArray[np.int32]) -> TokenScores:
    """Return the scores of a window whose tokens are i32 [tokens]; each array is [1, tokens - 1]."""
    likeliest = reference.ids[:, :1]
    return TokenScores(
        divergence=lower_bound(reference, model, tokens[1:])[None],
        loss=-model.token.astype(np.float64)[None],
        reference_loss=-reference.token.astype(np.float64)[None],
        agrees=(model.ids[:, 0] == likeliest[:, 0])[None],
        left_top5=~(model.ids[:, :_TOP] == likeliest).any(axis=1)[None],
    )


def lower_bound(reference: Answer, model: Answer, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the bound in nats, f64 [positions]; the text's next tokens are i32 [positions]."""
    p_ids, p = _with_token(reference, tokens)
    q_ids, q = _with_token(model, tokens)
    place = _find(p_ids, q_ids)
    shared = place >= 0
    log_p = np.where(shared, p, -np.inf)
    log_q = np.where(shared, np.take_along_axis(q, np.maximum(place, 0), axis=1), -np.inf)
    with np.errstate(invalid="ignore"):
        terms = np.where(shared, np.exp(log_p) * (log_p - log_q), 0.0)
    p_rest, q_rest = (np.maximum(1 - np.exp(values).sum(axis=1), 0.0) for values in (log_p, log_q))
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.where(p_rest > 0, p_rest * np.log(p_rest / np.maximum(q_rest, FLOOR)), 0.0)
    return np.maximum(terms.sum(axis=1) + rest, 0.0)


def _with_token(answer: Answer, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ids and log-probabilities [positions, K + 1]: the text's token is the last, or -1 if it is among the K."""
    is_listed = (answer.ids == tokens[:, None]).any(axis=1)
    ids = np.concatenate([answer.ids, np.where(is_listed, -1, tokens)[:, None]], axis=1)
    log_p = np.concatenate([answer.log_p, answer.token[:, None]], axis=1)
    return ids.astype(np.int64), np.minimum(log_p.astype(np.float64), 0.0)


def _find(wanted: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each id of a row [positions, n] is in the same row of `ids`; -1 if it is not, or is -1 itself."""
    order = np.argsort(ids, axis=1)
    row = np.arange(len(ids), dtype=np.int64)[:, None] << 32
    known = (np.take_along_axis(ids, order, axis=1) + row).ravel()  # sorted, since ids are below 2**31
    at = np.minimum(np.searchsorted(known, (wanted + row).ravel()), known.size - 1)
    found = (known[at] == (wanted + row).ravel()).reshape(wanted.shape) & (wanted >= 0)
    inside = at.reshape(wanted.shape) - np.arange(len(ids))[:, None] * ids.shape[1]
    return np.where(found, np.take_along_axis(order, np.where(found, inside, 0), axis=1), -1)
