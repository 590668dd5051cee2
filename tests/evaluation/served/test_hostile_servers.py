"""A server that answers something else ends the comparison in one line with the remedy, and loses no answer."""

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import Serve
from command import run_here

from k2convert.evaluation import connection, endpoints
from scripts.engine_checks.model_server import Handler, ModelServer, markov

Document = dict[str, Any]
Change = Callable[[Document], Any]


def rows_of(document: Document) -> list[Any]:
    return document["choices"][0]["prompt_logprobs"]


def first_entry(document: Document) -> Document:
    return next(iter(rows_of(document)[3].values()))


def set_logprob(value: Any) -> Change:
    return lambda document: first_entry(document).update(logprob=value)


def rename_ids(document: Document) -> None:
    rows_of(document)[2] = {str(int(key) + 1): value for key, value in rows_of(document)[2].items()}


def likely_twice(document: Document) -> None:
    for entry in list(rows_of(document)[2].values())[:3]:
        entry["logprob"] = -0.1


def nested(_: Document) -> bytes:
    return b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def repeated(document: Document) -> bytes:
    text = json.dumps(document)
    return text.replace('"prompt_logprobs": [null, {', '"prompt_logprobs": [null, {"5": 1, "5": 2, ').encode()


ANSWERS: dict[str, tuple[Change, list[str]]] = {
    "cut off": (lambda d: rows_of(d).pop(), ["cuts the text off"]),
    "a token more": (lambda d: rows_of(d).append(rows_of(d)[-1]), ["adds tokens"]),
    "of other ids": (rename_ids, ["other token ids"]),
    "without log-probabilities": (lambda d: d["choices"][0].pop("prompt_logprobs"), ["no log-probabilities", "proxy"]),
    "null": (lambda d: d["choices"][0].update(prompt_logprobs=None), ["no log-probabilities"]),
    "without choices": (lambda d: d.pop("choices"), ["no log-probabilities"]),
    "an empty list": (lambda d: d.update(choices=[]), ["no log-probabilities"]),
    "a number": (lambda d: d.update(choices=7), ["no log-probabilities"]),
    "an empty row": (lambda d: rows_of(d).__setitem__(2, {}), ["other token ids"]),
    "a row of null": (lambda d: rows_of(d).__setitem__(2, None), ["other token ids"]),
    "a key that is no id": (lambda d: rows_of(d)[2].update(x={"logprob": -1.0}), ["no log-probabilities"]),
    "an id below zero": (lambda d: rows_of(d)[2].update({"-1": {"logprob": -1.0}}), ["finite", "NaN"]),
    "an enormous id": (lambda d: rows_of(d)[2].update({"9" * 30: {"logprob": -1.0}}), ["finite", "NaN"]),
    "NaN": (set_logprob(float("nan")), ["NaN"]),
    "infinite": (set_logprob(float("inf")), ["NaN"]),
    "minus infinity": (set_logprob(float("-inf")), ["NaN"]),
    "an enormous number": (set_logprob(-(10**400)), ["NaN"]),
    "text": (set_logprob("-1.5"), ["NaN"]),
    "true": (set_logprob(True), ["NaN"]),
    "above zero": (set_logprob(0.5), ["more than 1"]),
    "adding up to more than 1": (likely_twice, ["more than 1"]),
    "fewer than asked for": (
        lambda d: [rows_of(d)[5].pop(k) for k in list(rows_of(d)[5])[-8:]],
        ["--max-logprobs", "--top-k"],
    ),
    "the same key twice": (repeated, ["duplicate"]),
    "a page": (lambda _: b"<html>Log in</html>", ["a page", "not JSON"]),
    "nothing": (lambda _: b"", ["not JSON"]),
    "a list": (lambda _: b"[1, 2]", ["another form"]),
    "not UTF-8": (lambda _: b'{"a": "\xff"}', ["no log-probabilities"]),
    "deep": (nested, ["not JSON"]),
}


def spoiled(change: Change) -> Callable[[Handler, Document], bool]:
    def spoil(handler: Handler, document: Document) -> bool:
        if handler.command == "POST":
            changed = change(document)
            handler.send(changed if isinstance(changed, bytes) else document)
        return handler.command == "POST"

    return spoil


def refused(*arguments: object) -> str:
    done = run_here("compare", *arguments, code=1)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert len(lines[0]) < 700
    return lines[0]


@pytest.mark.quick(14)
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is(name: str, serve: Serve, options: list[object]) -> None:
    change, words = ANSWERS[name]
    good = serve(markov(1))
    bad = serve(markov(1), spoil=spoiled(change))
    message = refused(good.url, bad.url, *options)
    assert bad.url.removesuffix("/v1") in message
    assert all(word in message for word in words), message
    assert list(Path.cwd().glob("compare-*/a/window-000.json")), "the good server's answer is kept"


SGLANG: dict[str, tuple[Change, list[str]]] = {
    "an id twice": (
        lambda m: m["input_top_logprobs"][3].append(m["input_top_logprobs"][3][0]),
        ["no log-probabilities"],
    ),
    "cut off": (lambda m: (m["input_top_logprobs"].pop(), m["input_token_logprobs"].pop()), ["cuts the text off"]),
    "lists of other lengths": (lambda m: m["input_top_logprobs"].pop(), ["no log-probabilities"]),
    "of other ids": (lambda m: m["input_token_logprobs"][3].__setitem__(1, 5000), ["other token ids"]),
    "null": (lambda m: m["input_token_logprobs"][3].__setitem__(0, None), ["other token ids"]),
    "fractions": (lambda m: m["input_top_logprobs"][3][0].__setitem__(1, 2.5), ["finite"]),
    "short rows": (lambda m: m["input_top_logprobs"][3][0].pop(), ["no log-probabilities"]),
}


@pytest.mark.parametrize("name", SGLANG)
def test_an_answer_of_sglang_with(name: str, serve: Serve, options: list[object]) -> None:
    change, words = SGLANG[name]

    def spoil(document: Document) -> None:
        change(document["meta_info"])

    bad = serve(markov(1), engine="sglang", spoil=spoiled(spoil))
    message = refused(bad.url, bad.url, *options)
    assert all(word in message for word in words), message


LISTS: dict[str, tuple[bytes, list[str]]] = {
    "no models": (b'{"data": []}', ["lists no model"]),
    "an error": (b'{"error": "no"}', ["lists no model"]),
    "numbers": (b'{"data": [1, {"id": 5}]}', ["lists no model"]),
    "a page": (b"<!DOCTYPE html><html></html>", ["a page"]),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_models_that_has(name: str, serve: Serve, options: list[object]) -> None:
    content, words = LISTS[name]

    def spoil(handler: Handler, _: Document) -> bool:
        handler.send(content)
        return True

    server = serve(markov(1), spoil=spoil)
    message = refused(server.url, server.url, *options)
    assert all(word in message for word in words), message


STATUSES: dict[int, list[str]] = {
    400: ["answers 400", "says why"],
    401: ["K2CONVERT_API_KEY"],
    404: ["has no /v1/completions"],
    429: ["answers 429", "run the same command again"],
    500: ["answers 500", "run the same command again"],
    503: ["answers 503"],
}


@pytest.mark.parametrize("status", STATUSES)
def test_a_status(status: int, serve: Serve, options: list[object]) -> None:
    asked: list[int] = []

    def spoil(handler: Handler, _: Document) -> bool:
        if handler.command == "POST":
            asked.append(status)
            handler.send({"error": {"message": "because"}}, status)
        return handler.command == "POST"

    server = serve(markov(1), spoil=spoil)
    message = refused(server.url, server.url, *options)
    assert all(word in message for word in STATUSES[status]), message
    assert len(asked) == (connection.NUM_ATTEMPTS if status in (429, 500, 503) else 1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_status_that_passes_is_waited_for(status: int, serve: Serve, options: list[object]) -> None:
    failures = [status] * 2

    def spoil(handler: Handler, _: Document) -> bool:
        if failures:
            handler.send({"error": "busy"}, failures.pop(), {"Retry-After": "0"})
            return True
        return False

    server = serve(markov(1), spoil=spoil)
    assert "no difference" in run_here("compare", server.url, server.url, *options, code=0).stdout


def test_a_connection_that_breaks_is_tried_again(serve: Serve, options: list[object]) -> None:
    broken = [1, 2, 3]

    def spoil(handler: Handler, document: Document) -> bool:
        if handler.command == "POST" and broken:
            broken.pop()
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{")
            handler.connection.shutdown(socket.SHUT_RDWR)
            return True
        return False

    server = serve(markov(1), spoil=spoil)
    assert "no difference" in run_here("compare", server.url, server.url, *options, code=0).stdout


def test_vllm_without_room_for_k_is_told_how_to_start(serve: Serve, options: list[object]) -> None:
    server = serve(markov(1), max_logprobs=20)
    message = refused(server.url, server.url, *options)
    assert "--max-logprobs 32" in message
    assert "--top-k 20" in message


def test_models_of_different_vocabularies_are_refused(serve: Serve, options: list[object]) -> None:
    small = serve(markov(1, vocabulary=60))
    assert "tokenizer of the same checkpoint" in refused(serve(markov(1)).url, small.url, *options)
    other = serve(markov(1), decode=lambda token: f" v{token + 1}")
    assert "different vocabularies" in refused(serve(markov(1)).url, other.url, *options)


def test_a_window_that_is_too_long_for_the_server_is_refused_at_once(serve: Serve, options: list[object]) -> None:
    server = serve(markov(1), max_model_len=32)
    assert "--window 31" in refused(serve(markov(1)).url, server.url, *options)
    assert server.questions == []


def test_an_enormous_answer_is_not_read_to_its_end(
    serve: Serve, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "_MODELS_BYTES", 20_000)
    monkeypatch.setattr(endpoints, "_ENTRY_BYTES", 100)
    sent = 0

    def spoil(handler: Handler, _: Document) -> bool:
        nonlocal sent
        if handler.command != "POST":
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        while sent < 1 << 30:
            handler.wfile.write(b" " * 65536)
            sent += 65536
        return True

    server = serve(markov(1), spoil=spoil)
    assert "more than" in refused(server.url, server.url, *options)
    assert sent < 1 << 26


@pytest.mark.quick(1)
@pytest.mark.parametrize("drip", [b"", b"H", b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n{"])
def test_an_answer_in_drips_is_not_waited_for(
    drip: bytes, serve: Serve, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.3)

    def spoil(handler: Handler, _: Document) -> bool:
        if handler.command != "POST":
            return False
        handler.wfile.write(drip)
        for _ in range(100):
            time.sleep(0.05)
            handler.wfile.write(b" " if drip.endswith(b"{") else b"\x00" if drip else b"")
        return True

    server = serve(markov(1), spoil=spoil)
    assert "did not answer within" in refused(server.url, server.url, *options)


def test_a_redirect_is_not_followed(serve: Serve, options: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(connection.KEY_NAME, "sk-secret-of-this-test")
    elsewhere = serve(markov(1))

    def spoil(handler: Handler, _: Document) -> bool:
        handler.send({}, 307, {"Location": elsewhere.url.replace("://", "://user:word@") + "/models"})
        return True

    server = serve(markov(1), spoil=spoil)
    message = refused(server.url, server.url, *options)
    assert elsewhere.url.removesuffix("/v1") in message
    assert "word" not in message
    assert elsewhere.headers == []


def test_a_certificate_must_be_trusted(serve: Serve, options: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = Path(__file__).parents[2] / "hub" / "loopback.pem"
    server = serve(markov(1), certificate=certificate)
    assert server.url.startswith("https://")
    assert "not trusted" in refused(server.url, server.url, *options)
    assert server.headers == []
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert "no difference" in run_here("compare", server.url, server.url, *options, code=0).stdout


def test_nobody_answers(options: list[object]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    assert "connection failed" in refused(url, url, *options)


ADDRESSES = ("http://", "http:/x", "https://[::1", "http://host:99999/v1", "http://ho st/v1", "http://host/v1?key=1")
ODD_ADDRESSES = ("http://h#m", "http://\x1b[2J/v1", "http://\u00e9/v1")


@pytest.mark.parametrize("address", [*ADDRESSES, *ODD_ADDRESSES])
def test_what_is_no_address_is_refused(address: str, options: list[object]) -> None:
    assert "address of a server" in refused(address, "http://127.0.0.1:1/v1", *options)


@pytest.mark.parametrize("host", ["[::1]", "[::1]:8000", "10.0.0.1", "h:8000", "h"])
@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_an_address_is_a_host_with_or_without_port_and_v1(host: str, path: str) -> None:
    assert connection.parse_address(f"http://{host}{path}") == f"http://{host}"


@pytest.mark.parametrize(
    "address", ["http://user:hidden@127.0.0.1:1/v1", "http://hidden@127.0.0.1:1", "https://:hidden@h/v1"]
)
def test_an_address_with_a_password_is_refused_without_repeating_it(address: str, options: list[object]) -> None:
    for arguments in ((address, "http://127.0.0.1:1/v1"), ("http://127.0.0.1:1/v1", address)):
        message = refused(*arguments, *options)
        assert "password" in message
        assert "hidden" not in message


def test_damaged_kept_answers_are_refused(serve: Serve, options: list[object], tmp_path: Path) -> None:
    server = serve(markov(1))
    run_here("compare", server.url, "--save", "kept", *options, code=0)
    path = tmp_path / "kept" / "window-002.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + b"x" + whole[101:])
    assert "window-002.json" in refused("kept", server.url, "--quiet")
    asked = len(server.questions)
    run_here("compare", server.url, "--save", "kept", *options, code=0)
    assert len(server.questions) == asked + 1, "only the damaged one"
    assert path.read_bytes() == whole
    (tmp_path / "kept" / "answers.json").write_text("{}")
    assert "folder of answers" in refused("kept", server.url, "--quiet")


def test_a_folder_with_other_files_or_answers_is_not_written_to(
    serve: Serve, options: list[object], tmp_path: Path
) -> None:
    server = serve(markov(1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("the only copy")
    assert "not from k2convert" in refused(server.url, "--save", "mine", *options)
    run_here("compare", server.url, "--save", "kept", *options, code=0)
    assert "holds other answers" in refused(server.url, "--save", "kept", *options, "--top-k", 16)


def test_many_threads_end_with_the_first_refusal(serve: Serve, options: list[object]) -> None:
    """A refusal after the first window ends the requests that are under way."""
    gate = threading.Event()
    waited_out = list[bool]()
    count = 0

    def spoil(handler: Handler, document: Document) -> bool:
        nonlocal count
        if handler.command != "POST":
            return False
        count += 1
        if count == 3:
            handler.send(b"<html>")
            return True
        if count > 3 and not gate.wait(60):
            waited_out.append(True)
        return False

    server: ModelServer = serve(markov(1), spoil=spoil)
    assert "not JSON" in refused(serve(markov(1)).url, server.url, *options)
    gate.set()
    assert not waited_out
