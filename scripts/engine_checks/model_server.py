"""A model behind HTTP on the loopback interface, in the wire formats of vLLM and SGLang.

The formats are those of vLLM 0.32 and SGLang 0.5.23; clients/questions.py compares them with the engines'
own classes. The model is a function from token ids [T] to log-probabilities [T, vocabulary].
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 96
Model = Callable[[list[int]], NDArray[np.float64]]
Spoil = Callable[["Handler", dict[str, Any]], bool]
"""Answers a question in its own way and returns True, or changes the document to send and returns False."""


def markov(seed: int, *, apart: float = 0.0, vocabulary: int = VOCABULARY) -> Model:
    """A model whose next token depends on the last one. `apart` is how far its logits are from those of the seed."""
    table = 3 * np.random.default_rng(seed).standard_normal((vocabulary, vocabulary))
    table += apart * np.random.default_rng(seed + 1).standard_normal(table.shape)
    table -= np.log(np.exp(table).sum(axis=1, keepdims=True))
    return lambda ids: table[ids]


def noisy(model: Model, amount: float) -> Model:
    """A model whose answers differ each time, as with batches of other sizes."""
    generator = np.random.default_rng(5)
    lock = threading.Lock()

    def answer(ids: list[int]) -> NDArray[np.float64]:
        with lock:
            logits = model(ids) + amount * generator.standard_normal((len(ids), VOCABULARY))
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    return answer


@dataclass(slots=True)
class ModelServer:
    """A running server; a context manager. `requests` are those for log-probabilities, `headers` those of all."""

    model: Model
    engine: str = "vllm"
    models: tuple[str, ...] = ("served",)
    max_logprobs: int = 64
    key: str | None = None
    spoil: Spoil | None = None
    encode: Callable[[str], list[int]] = lambda text: [int(word[1:]) for word in text.split()]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    _server: Any = None

    def __enter__(self) -> "ModelServer":
        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.owner = self
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def listing(self) -> dict[str, Any]:
        """The answer of /v1/models."""
        card = {"object": "model", "created": int(time.time()), "owned_by": self.engine, "parent": None}
        cards = [{"id": n, "root": f"/weights/{n}", "max_model_len": 4096} | card for n in self.models]
        return {"object": "list", "data": cards}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer of vLLM's /v1/completions, or of SGLang's /generate."""
        return self._vllm_answer(request) if self.engine == "vllm" else self._sglang_answer(request)

    def _vllm_answer(self, request: dict[str, Any]) -> dict[str, Any]:
        rows: list[dict[str, Any] | None] = [None]
        ids = request["prompt"]
        for token, log_p in zip(ids[1:], self.model(ids), strict=False):
            order = np.argsort(-log_p, kind="stable").tolist()
            row = dict.fromkeys([token, *order[: request["prompt_logprobs"]]])
            rows.append(
                {
                    str(i): {"logprob": _f32(log_p[i]), "rank": order.index(i) + 1, "decoded_token": f" w{i}"}
                    for i in row
                }
            )
        unused = ("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics")
        names = ("logprobs", "stop_reason", "token_ids", "prompt_token_ids", "routed_experts", "weight_versions")
        choice = dict.fromkeys(names)
        choice |= {"index": 0, "text": " w0", "finish_reason": "length", "prompt_logprobs": rows}
        usage = {"prompt_tokens": len(ids), "total_tokens": len(ids) + 1, "completion_tokens": 1}
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": request["model"]}
        head |= {"usage": usage | {"prompt_tokens_details": None, "completion_tokens_details": None}}
        return head | {"choices": [choice], "system_fingerprint": "vllm-0.33.0-74c970e5"} | dict.fromkeys(unused)

    def _sglang_answer(self, request: dict[str, Any]) -> dict[str, Any]:
        ids = request["input_ids"]
        count = request["top_logprobs_num"]
        tokens: list[Any] = [[None, ids[0], None]]
        tops: list[Any] = [None]
        for token, log_p in zip(ids[1:], self.model(ids), strict=False):
            order = np.argsort(-log_p, kind="stable")[:count]
            tokens.append([_f32(log_p[token]), token, None])
            tops.append([[_f32(log_p[i]), int(i), None] for i in order])
        information = {"id": "1", "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": len(ids)}
        information |= {"completion_tokens": 1, "cached_tokens": 0, "weight_version": "default", "e2e_latency": 0.1}
        logprobs = {"input_token_logprobs": tokens, "input_top_logprobs": tops}
        logprobs |= {"output_token_logprobs": [tokens[1]], "output_top_logprobs": [tops[1]]}
        return {"text": " w0", "output_ids": [0], "meta_info": information | logprobs}


def _f32(number: float) -> float:
    """Round a number as a server does."""
    return float(np.float32(number))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    owner: ModelServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close the connection early: the tests do that on purpose."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        if self._is_refused():
            return
        owner = self.server.owner
        document = owner.listing() if self.path == "/v1/models" else None
        self._answer(document)

    def do_POST(self) -> None:
        owner = self.server.owner
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_refused():
            return
        if self.path == "/tokenize":
            self.send({"tokens": owner.encode(request["prompt"])})
        elif self.path != ("/v1/completions" if owner.engine == "vllm" else "/generate"):
            self._answer(None)
        elif (problem := self._problem(request)) is not None:
            self.send({"error": {"message": problem, "type": "BadRequestError", "param": None, "code": 400}}, 400)
        else:
            owner.requests.append(request)
            self._answer(owner.answer(request))

    def _answer(self, document: dict[str, Any] | None) -> None:
        """Send a document, unless the test answers otherwise; None is a path that is not there."""
        spoil = self.server.owner.spoil
        if document is None:
            self.send({"detail": "Not Found"}, 404)
        elif spoil is None or not spoil(self, document):
            self.send(document)

    def _is_refused(self) -> bool:
        owner = self.server.owner
        owner.headers.append(dict(self.headers))
        is_refused = owner.key is not None and self.headers.get("Authorization") != f"Bearer {owner.key}"
        if is_refused:
            self.send({"error": "Unauthorized"}, 401)
        return is_refused

    def _problem(self, request: dict[str, Any]) -> str | None:
        """vLLM's own words for what it refuses."""
        owner = self.server.owner
        wanted = request.get("prompt_logprobs", 0)
        if wanted > owner.max_logprobs:
            return f"Requested prompt logprobs of {wanted}, which is greater than max allowed: {owner.max_logprobs}"
        largest = max(request["prompt"] if owner.engine == "vllm" else request["input_ids"])
        return f"Token id {largest} is out of vocabulary" if largest >= len(owner.model([0])[0]) else None

    def send(self, document: Any, status: int = 200) -> None:
        """Send JSON, or bytes as they are."""
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
