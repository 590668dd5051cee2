"""Distance of one server's model from that of another: windows of token ids are sent to both.

The first window goes to each server alone, so that a refusal costs one request. The others are asked for side by side.
The reference is asked for some windows twice, at the end, when its batches are different ones: the divergence of its
answers from themselves is the noise, below which no difference is one.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Final

import numpy as np

from k2convert import __version__
from k2convert.calibration.text import Windows
from k2convert.errors import EndpointError, quoted, shortened
from k2convert.evaluation.answers import MAX_VALUES, AnswerFolder, Asked, packed, word
from k2convert.evaluation.bound import lower_bound, score_window
from k2convert.evaluation.endpoints import Endpoint
from k2convert.evaluation.scores import TokenScores, summarize, worst_tokens
from k2convert.records.evaluation import FORMAT, EvaluatedModel, Evaluation, EvaluationRow, WorstToken
from k2convert.records.events import Events, Extent

NOISE_WINDOWS: Final = 8
"""So many windows are asked of the reference twice, or all of fewer."""

_NUM_WORST: Final = 10
_BEFORE: Final = 12  # tokens before such a one
_MIN_WORDS: Final = 8


@dataclass(frozen=True, slots=True)
class Side:
    """A server and the folder of its answers. `endpoint` is None for answers that were kept earlier."""

    folder: AnswerFolder
    endpoint: Endpoint | None = None


def questions(endpoint: Endpoint, windows: Windows, *, top_k: int, is_reference: bool) -> Asked:
    """Return what a server is asked for; raises EndpointError if it, or this machine, has no room for the answers."""
    count, length = windows.ids.shape
    endpoint.check_window(length)
    if length < 2:
        raise EndpointError("the text gives windows of one token, and the first is not predicted. Pass a longer text.")
    if length * top_k > MAX_VALUES:
        raise EndpointError(
            f"{length:,} tokens with {top_k} log-probabilities each are too much for one answer. Pass a smaller "
            "--top-k or --window."
        )
    token_ids = packed(windows.ids.astype(np.int32))
    again = min(count, NOISE_WINDOWS) if is_reference else 0
    return Asked(endpoint.name, endpoint.engine, endpoint.root, windows.described(), top_k, again, token_ids)


def saved_questions(endpoint: Endpoint, reference: Asked) -> Asked:
    """Return the questions of kept answers, for a second server; raises EndpointError if it has no room for them."""
    endpoint.check_window(reference.text.window)
    return Asked(endpoint.name, endpoint.engine, endpoint.root, reference.text, reference.top_k, 0, reference.token_ids)


def extent(sides: Sequence[Side]) -> Extent:
    """Return how many tokens there are to ask for, and how many were answered earlier."""
    total = sum(len(side.folder.wanted) * side.folder.asked.text.window for side in sides)
    missing = sum(len(_missing(side)) * side.folder.asked.text.window for side in sides)
    return Extent({"ask": (total, total - missing)})


def ask(sides: Sequence[Side], *, at_a_time: int, events: Events) -> None:
    """Ask for every answer that is missing. Raises EndpointError; what was answered stays."""
    asked = [side for side in sides if side.endpoint is not None]
    for side in asked:
        if side.folder.read(0) is None:
            _ask_one(side, 0, False, events)
    _check_words(sides)
    missing = [[(side, window, again) for window, again in _missing(side)] for side in asked]
    rest = [question for together in zip_longest(*missing) for question in together if question is not None]
    with ThreadPoolExecutor(at_a_time, thread_name_prefix="ask") as pool:
        try:
            futures = [pool.submit(_ask_one, side, window, again, events) for side, window, again in rest]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for side in asked:
                assert side.endpoint is not None
                side.endpoint.connection.stop()
            raise


def _missing(side: Side) -> list[tuple[int, bool]]:
    folder = side.folder
    return [(window, again) for window, again in folder.wanted if folder.read(window, again=again) is None]


def _ask_one(side: Side, window: int, again: bool, events: Events) -> None:
    assert side.endpoint is not None
    ids: list[int] = side.folder.windows[window].tolist()
    side.folder.write(window, side.endpoint.ask(ids, top_k=side.folder.asked.top_k), again=again)
    events.tokens_computed(len(ids))


def _check_words(sides: Sequence[Side]) -> None:
    """Refuse servers of one kind to which the same token ids are different texts."""
    if len(sides) < 2 or sides[0].folder.asked.engine != sides[1].folder.asked.engine:
        return
    first, second = (side.folder.need(0).words for side in sides)
    common = first.keys() & second.keys()
    different = sorted(key for key in common if first[key] != second[key])
    if len(common) >= _MIN_WORDS and len(different) > len(common) // 2:
        key = different[0]
        for side in sides:
            if side.endpoint is not None:
                side.folder.forget(0)  # it may come from a server that is put right before the next run
        raise EndpointError(
            f"{shortened(sides[1].folder.asked.name)}: token {key} is {quoted(second[key])}, but {quoted(first[key])} "
            f"for the reference ({sides[0].folder.folder}). The models have different vocabularies. "
            "Serve conversions of the same model, then run the same command again."
        )


def evaluate(reference: AnswerFolder, model: AnswerFolder | None) -> Evaluation:
    """Return the figures of the answers; without a model those of the reference's noise. Raises EndpointError."""
    asked = reference.asked
    noise = [
        lower_bound(reference.need(i), reference.need(i, again=True), reference.windows[i][1:])
        for i in range(asked.again)
    ]
    return Evaluation(
        format=FORMAT,
        kind="compare",
        tool_version=__version__,
        reference=EvaluatedModel(asked.name),
        text=asked.text,
        rows=() if model is None else (_row(reference, model),),
        top_k=asked.top_k,
        noise=float(np.mean(noise)),
    )


def _row(reference: AnswerFolder, model: AnswerFolder) -> EvaluationRow:
    scores = [score_window(reference.need(i), model.need(i), ids) for i, ids in enumerate(reference.windows)]
    names = [field.name for field in fields(TokenScores)]
    whole = TokenScores(*(np.concatenate([getattr(one, name) for one in scores]) for name in names))
    worst = [
        _worst(reference, model, window, position, float(whole.divergence[window, position]))
        for window, position in worst_tokens(whole.divergence, _NUM_WORST)
        if whole.divergence[window, position] > 0
    ]
    return EvaluationRow(EvaluatedModel(model.asked.name), summarize(whole), worst=tuple(worst))


def _worst(reference: AnswerFolder, model: AnswerFolder, window: int, position: int, divergence: float) -> WorstToken:
    first = reference.need(window)
    second = model.need(window)
    ids: list[int] = reference.windows[window].tolist()
    before = ids[max(position + 1 - _BEFORE, 0) : position + 1]
    return WorstToken(
        window=window,
        position=position + 1,
        divergence=divergence,
        before="".join(word(first, token) for token in before),
        token=word(first, ids[position + 1]),
        reference_token=word(first, int(first.ids[position, 0])),
        model_token=word(second, int(second.ids[position, 0])),
    )
