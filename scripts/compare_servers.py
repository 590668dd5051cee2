"""How far the model of one server is from that of another: a lower bound of the KL divergence on one text.

    vllm serve Kimi-K2-Thinking --max-logprobs 64 ...
    vllm serve Kimi-K2-Thinking-NVFP4 --port 8001 --max-logprobs 64 ...
    python scripts/compare_servers.py http://localhost:8000/v1 http://localhost:8001/v1 --text novel.txt

It needs httpx and NumPy. A is the reference. Both servers get the same windows of token ids. vLLM answers by
`prompt_logprobs` and needs --max-logprobs; SGLang answers by /generate (`logprob_start_len`, `input_token_logprobs`).
The text is UTF-8, tokenized by the servers, or token ids in .npy, [ids] or [windows, ids]. K2CONVERT_API_KEY is the key
of both servers, K2CONVERT_API_KEY_B that of B if it has its own. No message repeats a key. A is asked for some windows
twice: a KL of up to twice that of A from itself is no difference.

A server gives only the K most likely tokens of a distribution over the vocabulary. Let S be the tokens whose
probability both servers gave: those that are among the K of both, and the text's next token. Merge all others into one
bucket R. P and Q become distributions over S and R, and by the data processing inequality (the log-sum inequality on R)

    sum over S of p log(p / q)  +  P(R) log(P(R) / Q(R))  <=  KL(P || Q)

S may be any set, and may differ from token to token, as long as it is the same for both. A token that only one server
gave must go into R, of both: its other probability is unknown. The bound is exact if S is the vocabulary.

P(R) is 1 less a sum of rounded numbers. Where Q(R) is rounding alone it counts as FLOOR, which only lowers the bound.
"""

import argparse
import json
import math
import os
import re
import ssl
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import httpx
import numpy as np
from numpy.typing import NDArray

Row = Mapping[int, float]  # log-probabilities of the next token, by id: the K most likely ones, and the text's own

KEYS = ("K2CONVERT_API_KEY", "K2CONVERT_API_KEY_B")
FLOOR = 1e-6  # the least probability that a sum of float32 numbers leaves
NOISE_WINDOWS = 8  # A is asked for so many windows twice
HINTS = {
    400: ". vLLM needs --max-logprobs K; else pass a smaller --top-k or --window",
    401: f". Set {KEYS[0]} to the server's key",
    404: ". Pass the address of vLLM or SGLang. One without /tokenize needs token ids in .npy",
}


def lower_bound(reference: Row, model: Row) -> float:
    """Return the bound of KL(reference || model) in nats; both have the text's next token."""
    shared = [(min(reference[i], 0.0), min(model[i], 0.0)) for i in reference.keys() & model.keys()]
    terms = math.fsum(math.exp(p) * (p - q) for p, q in shared)
    p_rest = max(1 - math.fsum(math.exp(p) for p, _ in shared), 0.0)
    q_rest = max(1 - math.fsum(math.exp(q) for _, q in shared), FLOOR)
    rest = p_rest * math.log(p_rest / q_rest) if p_rest > 0 else 0.0
    return max(terms + rest, 0.0)


class Server:
    """One model of a server. Connections are direct: no proxy, and no redirect is followed with the key."""

    def __init__(self, address: str, key: str, model: str | None) -> None:
        self.address = re.sub(r"(/v1)?/*$", "", address)
        if not re.fullmatch(r"https?://(\[[\da-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?(/[\w./-]*)?", self.address, re.ASCII):
            raise ValueError(f"not the address of a server. Write http://HOST[:PORT]/v1; a key belongs in {KEYS[0]}")
        if not re.fullmatch("[!-~]*", key):
            raise ValueError(f"{' or '.join(KEYS)} has a character that no key has")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._options = {"verify": ssl.create_default_context(), "headers": headers, "timeout": 600, "trust_env": False}
        cards = {c["id"]: c for c in self._request("/v1/models", field="data") if isinstance(c, dict) and "id" in c}
        if not cards or (len(cards) > 1 and model is None) or (model is not None and model not in cards):
            self._fail(f"serves {', '.join(cards) or 'no model'}. Choose one with --model-a or --model-b")
        self.model = model or next(iter(cards))
        self._is_sglang = cards[self.model].get("owned_by") == "sglang"

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        question = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return self._request("/tokenize", question, field="tokens")

    def ask(self, ids: list[int], top_k: int) -> list[Row]:
        """Return the log-probabilities of every token of a window but the first."""
        try:
            if self._is_sglang:
                question = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
                question |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k}
                meta = self._request("/generate", question, field="meta_info")
                pairs = zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True)
                rows = [{i: p for p, i, *_ in [token, *(top or [])]} for token, top in pairs]
            else:
                question = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
                question["prompt_logprobs"] = top_k
                given = self._request("/v1/completions", question, field="choices")[0]["prompt_logprobs"]
                rows = [{int(i): entry["logprob"] for i, entry in (row or {}).items()} for row in given]
            return self._checked(rows, ids, top_k)
        except (LookupError, TypeError, AttributeError):
            self._fail("its answer has no log-probabilities of the prompt. A proxy in between may drop them")

    def _checked(self, rows: list[Row], ids: list[int], top_k: int) -> list[Row]:
        if len(rows) != len(ids) or any(i not in row for i, row in zip(ids[1:], rows[1:], strict=True)):
            self._fail("answers for other tokens than it was asked for: it cuts the text off, or changes it")
        if (fewest := min(map(len, rows[1:]))) < top_k:
            self._fail(f"gives {fewest} of {top_k} log-probabilities: start vLLM with --max-logprobs {top_k}")
        if not all(type(p) in (int, float) and -1e6 <= p <= 1e-3 for row in rows[1:] for p in row.values()):
            self._fail("gives a value that is no finite log-probability. Look for NaN in its log")
        if max(math.fsum(map(math.exp, row.values())) for row in rows[1:]) > 1.01:
            self._fail("gives probabilities that add up to more than 1. Check what it does to them")
        return rows[1:]

    def _request(self, path: str, question: dict[str, Any] | None = None, *, field: str) -> Any:
        """Return one field of the JSON of an answer."""
        try:
            url, method = self.address + path, "POST" if question else "GET"
            response = httpx.request(method, url, json=question, **self._options)
            document = response.json() if response.status_code == 200 else {}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            self._fail(f"{path}: {str(error) or type(error).__name__}. Check the address and the server")
        if (status := response.status_code) != 200:
            self._fail(f"{path} answers {status}{HINTS.get(status, '')} ({response.text})")
        if not isinstance(document, dict) or not isinstance(document.get(field), list | dict):
            self._fail(f"{path}: its answer has no {field}. Pass the address of vLLM or SGLang")
        return document[field]

    def _fail(self, reason: str) -> NoReturn:
        for key in filter(None, (os.environ.get(name, "").strip() for name in KEYS)):
            reason = reason.replace(key, "[key]")
        raise ValueError(f"{self.address}: {' '.join(reason.split())[:500]}") from None


def read_windows(path: Path, servers: list[Server], *, tokens: int, window: int) -> NDArray[np.int64]:
    """Return windows of token ids [windows, ids]."""
    if path.suffix == ".npy":
        ids = np.load(path, allow_pickle=False)
    else:
        text = path.read_text(encoding="utf-8")[: 16 * tokens]  # no token needs more characters in the mean
        ids, other = (np.array(server.tokenize(text)) for server in servers)
        if not np.array_equal(ids, other):
            raise ValueError("the servers tokenize the text differently. Serve conversions of one model")
    window = ids.shape[1] if ids.ndim == 2 else min(window, ids.size)
    if window < 2 or tokens < window or ids.dtype.kind not in "iu":
        raise ValueError(f"{path}: has no window of token ids. Pass a longer text, or more --tokens")
    return ids.ravel()[: min(tokens, ids.size) // window * window].reshape(-1, window).astype(np.int64)


def compare(servers: list[Server], windows: NDArray[np.int64], top_k: int) -> dict[str, float]:
    """Ask both servers, and the first one for some windows again; return the figures."""
    questions = [(server, ids) for server in servers for ids in windows.tolist()]
    questions += [(servers[0], ids) for ids in windows[:NOISE_WINDOWS].tolist()]
    with ThreadPoolExecutor(4) as pool:
        rows = [row for answer in pool.map(lambda pair: pair[0].ask(pair[1], top_k), questions) for row in answer]
    text = windows[:, 1:].ravel().tolist()
    a, b, again = rows[: len(text)], rows[len(text) : 2 * len(text)], rows[2 * len(text) :]
    kl = np.array([lower_bound(p, q) for p, q in zip(a, b, strict=True)])
    means = kl.reshape(len(windows), -1).mean(axis=1)
    loss_a, loss_b = (-np.array([row[i] for row, i in zip(rows, text, strict=True)]) for rows in (a, b))
    best_a, best_b = ([min(row, key=lambda i, row=row: (-row[i], i)) for row in rows] for rows in (a, b))
    figures = {
        "predictions": len(text),
        "top_k": top_k,
        "kl_at_least": kl.mean(),
        "kl_standard_error": means.std(ddof=1) / len(means) ** 0.5 if len(means) > 1 else 0.0,
        "kl_99_percent_below": np.quantile(kl, 0.99),
        "kl_of_a_from_itself": np.mean([lower_bound(p, q) for p, q in zip(a, again, strict=False)]),
        "perplexity_a": np.exp(loss_a.mean()),
        "perplexity_b": np.exp(loss_b.mean()),
        "same_likeliest_token": np.mean([i == j for i, j in zip(best_a, best_b, strict=True)]),
    }
    return {name: float(value) for name, value in figures.items()}


def main() -> int:
    """Print the figures as JSON, or a one-line error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("a", metavar="A", help="address of the reference, http://HOST[:PORT]/v1")
    parser.add_argument("b", metavar="B", help="address of the other server")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8, or token ids in .npy")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to ask for (default: 8192)")
    parser.add_argument("--window", type=int, default=2048, help="tokens that are seen together (default: 2048)")
    parser.add_argument("--top-k", type=int, default=64, help="log-probabilities of each token (default: 64)")
    parser.add_argument("--model-a", help="which model of A, if it serves several")
    parser.add_argument("--model-b", help="the same of B")
    options = parser.parse_args()
    key, key_b = (os.environ.get(name, "").strip() for name in KEYS)
    try:
        servers = [Server(options.a, key, options.model_a), Server(options.b, key_b or key, options.model_b)]
        windows = read_windows(options.text, servers, tokens=options.tokens, window=options.window)
        figures = compare(servers, windows, options.top_k)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
