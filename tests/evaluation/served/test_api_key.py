"""The API key is sent to the servers that the user named, and appears nowhere else, even if a server repeats it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import WINDOW, Serve
from command import run_here

from k2convert.evaluation.connection import KEY_NAME, OTHER_KEY_NAME
from scripts.engine_checks.model_server import Handler, ModelServer, Spoil, markov

KEY = "sk-a1B2c3D4e5F6g7H8"
OTHER = "sk-of-the-other-server"


def run(
    server: ModelServer, text: Path, *more: object, other: ModelServer | None = None, code: int | None = 0, **env: str
) -> Any:
    words = ["compare", server.url, (other or server).url, "--text", text, "--window", WINDOW, "--top-k", 16, *more]
    return run_here(*words, code=code, **({KEY_NAME: KEY} | env))


def assert_is_nowhere(folder: Path, done: Any, *keys: str) -> None:
    for key in keys or (KEY,):
        parts = {key, key[: len(key) // 2], key[len(key) // 2 :]}
        assert not [part for part in parts if part in done.stdout + done.stderr], done.stderr
        for path in folder.rglob("*"):
            assert not path.is_file() or key.encode() not in path.read_bytes(), path
            assert key not in path.name


def test_the_key_opens_the_servers_and_is_written_nowhere(serve: Serve, text: Path, tmp_path: Path) -> None:
    server = serve(markov(1), key=KEY)
    done = run(server, text, "--save", "kept", "--json")
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in server.headers)
    assert list(tmp_path.glob("kept/window-*.json"))
    assert_is_nowhere(tmp_path, done)


def test_each_server_gets_its_own_key(serve: Serve, text: Path, tmp_path: Path) -> None:
    first = serve(markov(1), key=KEY)
    second = serve(markov(1), key=OTHER)
    done = run(first, text, other=second, **{OTHER_KEY_NAME: OTHER})
    assert not [headers for headers in second.headers if KEY in str(headers)]
    assert_is_nowhere(tmp_path, done, KEY, OTHER)


def test_without_the_variable_no_key_is_sent(serve: Serve, text: Path) -> None:
    server = serve(markov(1))
    run(server, text, **{KEY_NAME: "", "OPENAI_API_KEY": KEY})
    assert not [headers for headers in server.headers if "Authorization" in headers]


def refusing(status: int, body: Callable[[str], Any], *, method: str = "POST") -> Spoil:
    def spoil(handler: Handler, _: dict[str, Any]) -> bool:
        if handler.command == method:
            handler.send(body(handler.headers["Authorization"]), status)
        return handler.command == method

    return spoil


def in_every_word(handler: Handler, document: dict[str, Any]) -> bool:
    if handler.command == "POST":
        for row in document["choices"][0]["prompt_logprobs"][1:]:
            for entry in row.values():
                entry["decoded_token"] = handler.headers["Authorization"]
    return False


def in_the_name(handler: Handler, document: dict[str, Any]) -> bool:
    if handler.command == "GET":
        document["data"][0] |= {"id": f"model-{KEY}", "root": f"/{KEY}"}
    return False


def bad_status_line(handler: Handler, _: dict[str, Any]) -> bool:
    handler.wfile.write(f"{handler.headers['Authorization']}\r\n\r\n".encode())
    handler.close_connection = True
    return True


ECHOES: dict[str, Spoil] = {
    "an error in JSON": refusing(400, lambda key: {"error": {"message": f"bad request with {key}"}}),
    "an error about logprobs": refusing(400, lambda key: {"error": {"message": f"{key}: prompt_logprobs is off"}}),
    "a refusal": refusing(401, lambda key: {"error": f"{key} is not known"}),
    "a page": refusing(200, lambda key: f"<html>{key}</html>".encode()),
    "half an answer": refusing(200, lambda key: f"{'x' * 70}{key}".encode()),
    "a key of an object": refusing(200, lambda key: f'{{"{"y" * 60}{key}": 1, "{"y" * 60}{key}": 2}}'.encode()),
    "an error that comes after blanks": refusing(400, lambda key: b" " * 65530 + key.encode()),
    "a list of models": refusing(500, lambda key: {"error": key}, method="GET"),
    "every word": in_every_word,
    "the model's name": in_the_name,
    "the status line": bad_status_line,
}


@pytest.mark.parametrize("name", ECHOES)
def test_a_server_that_repeats_the_key_in(name: str, serve: Serve, text: Path, tmp_path: Path) -> None:
    server = serve(markov(1), spoil=ECHOES[name])
    done = run(server, text, "--json", "--save", "kept", code=None)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert any("Authorization" in headers for headers in server.headers)
    assert_is_nowhere(tmp_path, done)


@pytest.mark.parametrize("key", [f"{KEY}\n{KEY}", f"{KEY} {KEY}", f"{KEY}é"])
def test_a_key_that_no_header_carries_is_refused_without_printing_it(
    key: str, serve: Serve, text: Path, tmp_path: Path
) -> None:
    done = run(serve(markov(1)), text, code=1, **{KEY_NAME: key})
    assert KEY_NAME in done.stderr
    assert_is_nowhere(tmp_path, done)
