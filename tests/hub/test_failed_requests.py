"""Which failed requests pass by themselves: what nobody answers may, what is refused does not."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from command import RunCli
from huggingface_hub import HfApi
from huggingface_hub.utils import get_session
from loopback import LoopbackHub

import k2convert
from k2convert.hub import client
from k2convert.hub.client import NUM_ATTEMPTS, Hub
from k2convert.hub.request_errors import HubRequestError, explain_transport

REPO = "moon/tiny"


def no_pause(_: float) -> None:
    """Take no time."""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which take no time."""
    seconds: list[float] = []
    monkeypatch.setattr(client, "sleep", seconds.append)
    monkeypatch.setattr(time, "sleep", no_pause)  # of the library, which has attempts of its own
    return seconds


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hub that takes every connection and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(client, "ANSWER_SECONDS", 0.1)
        yield


REQUESTS: dict[str, Callable[[HfApi], object]] = {
    "read": lambda api: api.model_info(REPO),
    "list": lambda api: list(api.list_repo_tree(REPO)),
    "make a branch": lambda api: api.create_branch(REPO, branch="work"),
    "delete it": lambda api: api.delete_branch(REPO, branch="work"),
    "commit": lambda api: api.create_commit(REPO, [], commit_message="none"),
}


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_hub_that_says_nothing_is_an_outage(kind: str, pauses: list[float]) -> None:
    hub = Hub(outages_pass=False)
    with pytest.raises(HubRequestError) as error:
        hub.call(kind, lambda: REQUESTS[kind](hub.api()))
    assert error.value.is_outage
    assert len(pauses) == NUM_ATTEMPTS - 1


@pytest.mark.usefixtures("silent")
def test_an_answer_about_a_card_is_not_waited_for_either(pauses: list[float]) -> None:
    with pytest.raises(HubRequestError):
        Hub(outages_pass=False).accepts_card("# card")
    assert len(pauses) == NUM_ATTEMPTS - 1


def test_the_requests_of_the_library_are_as_before(tiny_hub: LoopbackHub) -> None:
    k2convert.inspect(f"hf://{REPO}")
    assert [hook.__module__ for hook in get_session().event_hooks["request"]] == ["huggingface_hub.utils._http"]


@pytest.mark.parametrize(
    ("words", "status", "may_pass"),
    [
        ("HTTP status client error (404 Not Found) for url (https://x)", 404, False),
        ("HTTP status client error (400 Bad Request)", 400, False),
        ("HTTP status client error (413 Payload Too Large)", 413, False),
        ("Request error: 403 Forbidden", 403, False),
        ("HTTP status client error (429 Too Many Requests)", None, True),
        ("HTTP status server error (503 Service Unavailable)", None, True),
        ("I/O error: No space left on device (os error 28)", None, False),
        ("I/O error: No such file or directory (os error 2)", None, False),
        ("Connection reset by peer (os error 104)", None, True),
        ("Connection refused (os error 111)", None, True),
    ],
)
def test_words_of_hf_xet_tell_a_refusal_from_an_outage(words: str, status: int | None, may_pass: bool) -> None:
    error = explain_transport("send x", RuntimeError(words), failure="the upload failed")
    assert (error.status, error.transient, error.is_outage) == (status, may_pass, may_pass)


@pytest.mark.parametrize(("words", "may_pass"), [("407 Proxy Authentication Required", False), ("timed out", True)])
def test_a_proxy_that_refuses_is_not_waited_for(words: str, may_pass: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    error = explain_transport("ask", httpx.ProxyError(words))
    assert (error.transient, error.is_outage) == (may_pass, may_pass)
    assert "HTTPS_PROXY" in str(error)


def test_a_dry_run_does_not_wait_for_the_end_of_an_outage(
    cli: RunCli, cwd: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(client, "PATIENCE_SECONDS", 3600.0)
    shown = cli("run", f"hf://{REPO}", "out", "--dry-run", code=1)
    assert "Connection refused" in shown.stderr
    assert len(pauses) == NUM_ATTEMPTS - 1
