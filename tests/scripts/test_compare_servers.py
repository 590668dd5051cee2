"""scripts/compare_servers.py: a bound below the true KL, figures of both engines' answers, and one line of error."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("httpx")

from scripts.compare_servers import KEYS, Row, Server, lower_bound, main
from scripts.engine_checks.model_server import VOCABULARY, Handler, Model, ModelServer, markov, noisy

WINDOW = 40
KEY = "sk-a1B2c3D4e5F6g7H8"
Serve = Callable[..., ModelServer]
Run = Callable[..., CompletedProcess[str]]
Document = dict[str, Any]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that lasts for the test."""
    with ExitStack() as stack:

        def start(model: Model, **options: Any) -> ModelServer:
            return stack.enter_context(ModelServer(model, **options))

        yield start


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    """Six windows of token ids."""
    path = tmp_path / "ids.npy"
    np.save(path, np.random.default_rng(3).integers(0, VOCABULARY, 6 * WINDOW))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the script in this process; the environment has no keys but those that are passed."""

    def done(*arguments: object, **keys: str) -> CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name in KEYS:
                patch.delenv(name, raising=False)
            for name, key in keys.items():
                patch.setenv(name, key)
            words = [*map(str, arguments), "--window", str(WINDOW), "--top-k", "32"]
            patch.setattr("sys.argv", ["compare_servers.py", *words])
            return CompletedProcess(words, main(), *capsys.readouterr())

    return done


def figures(done: CompletedProcess[str]) -> dict[str, float]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def top(log_p: np.ndarray, token: int, top_k: int) -> Row:
    """A row as a server gives it, in float32."""
    return {int(i): float(np.float32(log_p[i])) for i in (*np.argsort(-log_p, kind="stable")[:top_k], token)}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 2.0, 5.0]), st.sampled_from([0.0, 0.05, 0.5, 3.0]))
def test_the_bound_is_below_the_divergence_and_may_reach_it(seed: int, spread: float, apart: float) -> None:
    generator = np.random.default_rng(seed)
    logits = spread * generator.standard_normal(60)
    p, q = (x - np.log(np.exp(x).sum()) for x in (logits, logits + apart * generator.standard_normal(60)))
    token = int(generator.integers(60))
    truth = float((np.exp(p) * (p - q)).sum())
    bounds = [lower_bound(top(p, token, top_k), top(q, token, top_k)) for top_k in (1, 5, 20, 60)]
    assert all(0 <= bound <= truth + 1e-5 for bound in bounds), "float32 in the answers"
    assert bounds[-1] == pytest.approx(truth, abs=1e-5)
    if apart == 0:
        assert bounds == [0, 0, 0, 0]


def test_the_bucket_has_the_tokens_of_one_server_only_and_no_rounding() -> None:
    p, q = (np.log(x) for x in ([0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.5, 0.3]))
    expected = 0.5 * np.log(5) + 0.5 * np.log(0.5 / 0.9)
    assert lower_bound(top(p, 0, 2), top(q, 0, 2)) == pytest.approx(expected, rel=1e-6)
    p, q = (np.log(np.array([1 - 3 * rest, rest, rest, rest])) for rest in (1e-9, 1e-12))
    assert 0 <= lower_bound(top(p, 0, 2), top(q, 0, 2)) <= (np.exp(p) * (p - q)).sum() + 1e-7


@pytest.mark.parametrize("engines", [("vllm", "vllm"), ("sglang", "vllm")])
def test_the_figures_are_those_of_the_models(engines: tuple[str, str], serve: Serve, run: Run, ids: Path) -> None:
    servers = [serve(markov(1, apart=a), engine=e) for a, e in zip((0, 0.4), engines, strict=True)]
    report = figures(run(*(server.url for server in servers), "--text", ids))
    windows = np.load(ids).reshape(-1, WINDOW)
    p, q = (np.stack([server.model(list(row))[:-1] for row in windows]) for server in servers)
    truth = (np.exp(p) * (p - q)).sum(axis=-1).mean()
    assert 0.5 * truth < report["kl_at_least"] < truth
    losses = [-np.take_along_axis(x, windows[:, 1:, None], axis=-1).mean() for x in (p, q)]
    assert [report["perplexity_a"], report["perplexity_b"]] == pytest.approx(np.exp(losses), rel=1e-6)
    assert report["same_likeliest_token"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert (report["predictions"], report["kl_of_a_from_itself"]) == (windows[:, 1:].size, 0)


def test_a_text_is_tokenized_by_the_servers_which_must_agree(serve: Serve, run: Run, ids: Path, tmp_path: Path) -> None:
    words = tmp_path / "text.txt"
    words.write_text("".join(f" w{token}" for token in np.load(ids)))
    server = serve(markov(1))
    done = [run(server.url, server.url, "--text", path) for path in (words, ids)]
    assert figures(done[0]) == figures(done[1])
    other = serve(markov(1), encode=lambda text: [0] * len(text.split()))
    assert "tokenize the text differently" in run(server.url, other.url, "--text", words).stderr


def test_noise_is_that_of_the_reference_asked_twice(serve: Serve, run: Run, ids: Path) -> None:
    server = serve(noisy(markov(1), 0.2))
    report = figures(run(server.url, server.url, "--text", ids))
    assert 0 < report["kl_at_least"] < 2 * report["kl_of_a_from_itself"]


def test_each_server_gets_its_own_key_and_no_message_has_it(serve: Serve, run: Run, ids: Path) -> None:
    servers = serve(markov(1), key=KEY), serve(markov(1), key="sk-other")
    urls = [server.url for server in servers]
    figures(run(*urls, "--text", ids, **{KEYS[0]: KEY, KEYS[1]: "sk-other"}))
    refused = run(*urls, "--text", ids, OPENAI_API_KEY=KEY)
    assert "401" in refused.stderr
    assert KEYS[0] in refused.stderr
    assert not [headers for headers in servers[1].headers if KEY in str(headers)]

    def echo(handler: Handler, _: Document) -> bool:
        handler.send(f"{'x' * 400}{handler.headers['Authorization']}".encode(), 500)
        return True

    echoing = serve(markov(1), spoil=echo)
    for key in (KEY, f"{KEY}\n{KEY}"):
        done = run(echoing.url, echoing.url, "--text", ids, **{KEYS[0]: key})
        assert done.returncode == 1
        assert KEY[:8] not in done.stderr


def rows_of(document: Document) -> list[Any]:
    return document["choices"][0]["prompt_logprobs"]


def set_logprob(value: Any) -> Callable[[Document], Any]:
    return lambda document: next(iter(rows_of(document)[3].values())).update(logprob=value)


BAD_ANSWERS: dict[str, tuple[Callable[[Document], Any], str]] = {
    "cut off": (lambda d: rows_of(d).pop(), "cuts the text off"),
    "a token more": (lambda d: rows_of(d).append(rows_of(d)[-1]), "cuts the text off, or changes it"),
    "a row of null": (lambda d: rows_of(d).__setitem__(2, None), "other tokens"),
    "without log-probabilities": (lambda d: d["choices"][0].pop("prompt_logprobs"), "no log-probabilities"),
    "without choices": (lambda d: d.pop("choices"), "no choices"),
    "fewer than asked for": (lambda d: rows_of(d).__setitem__(5, dict(list(rows_of(d)[5].items())[:9])), "--max-log"),
    "NaN": (set_logprob(float("nan")), "NaN"),
    "text": (set_logprob("-1.5"), "NaN"),
    "above zero": (set_logprob(0.5), "NaN"),
    "adding up to 2": (lambda d: [row.update(logprob=-0.1) for row in rows_of(d)[2].values()], "more than 1"),
    "a page": (lambda _: b"<html>Log in</html>", "Check the address"),
    "a list": (lambda _: b"[1, 2]", "address of vLLM or SGLang"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_an_answer_that_is_wrong_ends_in_one_line(name: str, serve: Serve) -> None:
    change, words = BAD_ANSWERS[name]

    def spoil(handler: Handler, document: Document) -> bool:
        if handler.command == "POST":
            changed = change(document)
            handler.send(changed if isinstance(changed, bytes) else document)
        return handler.command == "POST"

    server = Server(serve(markov(1), spoil=spoil).url, "", None)
    with pytest.raises(ValueError, match="^" + server.address) as error:
        server.ask(list(range(12)), 16)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_logprobs": 20}, "--max-logprobs"),
        ({"models": ("base", "tuned")}, "--model-a"),
        ({"models": ("",)}, "400"),
    ],
)
def test_refusals_name_the_option(options: dict[str, Any], words: str, serve: Serve, run: Run, ids: Path) -> None:
    server = serve(markov(1, vocabulary=60 if words == "400" else VOCABULARY), **options)
    done = run(server.url, server.url, "--text", ids)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith(f"error: {server.url.removesuffix('/v1')}: ")
    assert words in done.stderr


@pytest.mark.parametrize("host", ["[::1]", "[::1]:9", "127.0.0.1:9", "127.0.0.1"])
@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_an_address_is_a_host_with_or_without_port_and_v1(host: str, path: str) -> None:
    with pytest.raises(ValueError, match="Check the address and the server") as error:
        Server(f"http://{host}{path}", "", None)
    assert str(error.value).startswith(f"http://{host}: /v1/models: ")


@pytest.mark.parametrize(
    "address",
    ["http:///v1", "http:/x", "https://[::1", "ftp://h/v1", "http://ho st/v1", "http://h/v1?key=1", "http://u:p@h"],
)
def test_what_is_no_address_is_refused_without_repeating_it(address: str) -> None:
    with pytest.raises(ValueError, match="not the address of a server") as error:
        Server(address, "", None)
    assert address not in str(error.value)
