"""vLLM and SGLang: how each is asked for the log-probabilities of a window of token ids, and how each answers.

    vLLM     POST /v1/completions with `prompt_logprobs`. Of each token but the first: {"ID": {"logprob", ...}} of the
             most likely tokens, and of the text's own
    SGLang   POST /generate with `top_logprobs_num`. In `meta_info`: `input_token_logprobs`, [logprob, ID, text] of
             each token, and `input_top_logprobs`, a list of those of the most likely ones; both begin with null

Another server that answers as vLLM does is asked like vLLM.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Literal, cast

from k2convert.checkpoint.files import mapping_or_empty, parse_json
from k2convert.errors import EndpointError, quoted, shortened
from k2convert.evaluation.answers import Answer, Row, collect
from k2convert.evaluation.connection import Connection, RequestError, redacted

Engine = Literal["vllm", "sglang"]

_MODELS_BYTES: Final = 1 << 20
_ENTRY_BYTES: Final = 240  # of one token's log-probability in JSON: vLLM needs 60 and the token's text
_FIRST_ATTEMPTS: Final = 3
_parsing: Final = Lock()  # an answer in JSON becomes many times as large for a moment


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One model of one server. `root` is where the server says that its weights are."""

    connection: Connection
    engine: Engine
    model: str
    root: str
    max_tokens: int | None

    @property
    def name(self) -> str:
        return redacted(f"{self.model} at {self.connection.address}")

    def check_window(self, window: int) -> None:
        """Refuse windows that the server has no room for; raises EndpointError."""
        if self.max_tokens is not None and window + 1 > self.max_tokens:
            raise EndpointError(
                f"{self.connection.shown}: accepts {self.max_tokens:,} tokens, one of them for its answer. "
                f"Pass --window {self.max_tokens - 1} or less."
            )

    def ask(self, ids: Sequence[int], *, top_k: int) -> Answer:
        """Return the log-probabilities of a window; raises EndpointError."""
        where = self.connection.shown
        limit = _MODELS_BYTES + len(ids) * (top_k + 1) * _ENTRY_BYTES
        path, request = self._request(list(ids), top_k)
        try:
            data = self.connection.request(path, json.dumps(request).encode(), limit=limit)
        except RequestError as error:
            raise _explained(where, error, top_k) from None
        with _parsing:
            rows = self._rows(where, _parse(where, data))
            try:
                return collect(rows, ids, top_k=top_k)
            except ValueError as error:
                raise EndpointError(f"{where}: {redacted(str(error))}") from None

    def _request(self, ids: list[int], top_k: int) -> tuple[str, dict[str, Any]]:
        if self.engine == "sglang":
            sampling = {"max_new_tokens": 1, "temperature": 0}
            wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k, "input_ids": ids}
            return "/generate", wanted | {"sampling_params": sampling, "return_text_in_logprobs": True}
        wanted = {"prompt_logprobs": top_k, "max_tokens": 1, "temperature": 0}
        return "/v1/completions", wanted | {"model": self.model, "prompt": ids}

    def _rows(self, where: str, document: dict[str, Any]) -> list[Row | None]:
        try:
            if self.engine == "sglang":
                return _sglang_rows(document)
            return _vllm_rows(document)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise EndpointError(
                f"{where}: its answer has no log-probabilities of the prompt. Serve the model by vLLM or SGLang; a "
                "proxy in between may drop them."
            ) from None


def open_endpoint(connection: Connection, *, model: str | None, option: str) -> Endpoint:
    """Ask a server what it serves. `option` is how the user chooses one of several models; raises EndpointError."""
    where = connection.shown
    document = _parse(where, connection.request("/v1/models", limit=_MODELS_BYTES, attempts=_FIRST_ATTEMPTS))
    listed = document.get("data")
    found = [mapping_or_empty(card) for card in cast(list[object], listed if isinstance(listed, list) else [])]
    cards = {card["id"]: card for card in found if isinstance(card.get("id"), str)}
    if not cards:
        raise EndpointError(f"{where}: lists no model. Pass the address of vLLM or SGLang.")
    if (len(cards) > 1 and model is None) or (model is not None and model not in cards):
        names = redacted(", ".join(shortened(name) for name in list(cards)[:5]))
        raise EndpointError(f"{where}: serves {names}. Choose one of them with {option}.")
    name = next(iter(cards)) if model is None else model
    room = cards[name].get("max_model_len")
    root = cards[name].get("root")
    return Endpoint(
        connection,
        "sglang" if cards[name].get("owned_by") == "sglang" else "vllm",
        redacted(name),
        redacted(root) if isinstance(root, str) else "",
        room if type(room) is int and room > 1 else None,
    )


def _parse(where: str, data: bytes) -> dict[str, Any]:
    text = redacted(data.decode(errors="replace"))
    try:
        document = parse_json(text)
    except ValueError as error:
        what = "a page" if text.lstrip().startswith("<") else quoted(text)
        raise EndpointError(
            f"{where}: answers with {what}, not JSON ({error}). Pass the address of vLLM or SGLang."
        ) from None
    if not isinstance(document, dict):
        raise EndpointError(f"{where}: answers with JSON of another form. Pass the address of vLLM or SGLang.")
    return cast(dict[str, Any], document)


def _vllm_rows(document: Mapping[str, Any]) -> list[Row | None]:
    rows = cast(list[dict[str, dict[str, Any]] | None], document["choices"][0]["prompt_logprobs"])
    return [
        None
        if row is None
        else {int(key): (entry["logprob"], entry.get("decoded_token")) for key, entry in row.items()}
        for row in rows
    ]


def _sglang_rows(document: Mapping[str, Any]) -> list[Row | None]:
    information = document["meta_info"]
    tokens = information["input_token_logprobs"]
    tops = information["input_top_logprobs"]
    rows: list[Row | None] = []
    for token, top in zip(tokens, tops, strict=True):
        if token[0] is None or top is None:
            rows.append(None)
            continue
        row = {key: (value, text) for value, key, text in top}
        if len(row) < len(top):
            raise ValueError("an id is there twice")
        rows.append({token[1]: (token[0], token[2])} | row)
    return rows


def _explained(where: str, error: RequestError, top_k: int) -> EndpointError:
    """Say what to do about a request that the server understood and refused."""
    if error.status not in (400, 422):
        return error
    if allowed := re.search(r"prompt.logprobs.*max allowed: (\d{1,6})", error.words):
        remedy = f"Start vLLM with --max-logprobs {top_k}, or pass --top-k {allowed[1]}."
    elif "logprobs" in error.words:
        remedy = "It must give prompt_logprobs: vLLM and SGLang do, also without speculative decoding."
    elif "vocab" in error.words:
        remedy = "The text has token ids that its model does not have. Use the tokenizer of the same checkpoint."
    elif "context length" in error.words:
        remedy = "Pass a smaller --window."
    else:
        return error
    return EndpointError(f"{where}: refuses the request ({error.words}). {remedy}")
