"""Something else answers in the Hub's place: a captive portal, a proxy, a mirror. Every command says so in one line."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from command import RunCli, said

ANSWERS = {
    "a login page": ("text/html", b"<html><title>Log in to the airport</title></html>"),
    "an empty object": ("application/json", b"{}"),
    "a list": ("application/json", b"[]"),
    "a number": ("application/json", b"5"),
    "text": ("application/json", b'"log in first"'),
    "null": ("application/json", b"null"),
    "names of a wrong kind": (
        "application/json",
        b'{"name": 7, "orgs": 7, "auth": [], "id": [1], "sha": 5, "siblings": 7, "private": "x", "lastModified": 1}',
    ),
    "a list of something": (
        "application/json",
        b'[1, {"path": 3}, {"type": "file", "path": 3, "size": "x", "oid": 1}]',
    ),
    "half of a surrogate pair": ("application/json", b'{"name": "\\ud800", "sha": "\\ud800", "id": "\\ud800"}'),
    "nothing": ("application/json", b""),
}
COMMANDS = {
    "inspect": ["inspect", "hf://moon/tiny"],
    "run from the Hub": ["run", "hf://moon/tiny", "out", "--dry-run"],
    "run to the Hub": ["run", "TINY", "hf://me/out", "--yes"],
    "publish": ["publish", "RESULT", "--repo", "me/out", "--yes"],
}


@contextmanager
def portal(kind: str, body: bytes) -> Iterator[str]:
    """A server that gives every request the same answer; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = answer  # noqa: N815 - names the base class calls

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.usefixtures("hub")
@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (name, answer)
        for name in COMMANDS
        for answer in ANSWERS
        if name.endswith(("inspect", "to the Hub")) or "of" in answer
    ],
)
def test_an_answer_that_is_not_the_hubs_is_one_line(
    name: str, answer: str, tiny: Path, local_result: Path, cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with portal(*ANSWERS[answer]) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        words = [{"TINY": str(tiny), "RESULT": str(local_result)}.get(word, word) for word in COMMANDS[name]]
        done = cli(*words)
    assert done.returncode == 1, done.stderr
    errors = [line for line in said(done.stderr).splitlines() if "trying again" not in line]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    assert len(errors[0]) < 600
