"""A running loopback Hub, the tiny checkpoint on it, and an environment in which the client library talks to it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from loopback import TOKEN, LoopbackHub

from k2convert.hub.client import Hub, Retry

QUICK = Retry(num_attempts=6, first_seconds=0.01, max_seconds=0.05)


@pytest.fixture(autouse=True)
def hub_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this folder can reach the real Hub or the user's login."""
    for name in [n for n in os.environ if n.startswith(("HF_", "HUGGING")) and n != "HF_HUB_DISABLE_XET"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A loopback Hub that knows one user, `me`, with write access."""
    with LoopbackHub(tmp_path / "hub-server") as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.api.token = TOKEN
        yield running


@pytest.fixture
def hub() -> Hub:
    """A connection that retries at once."""
    return Hub(retry=QUICK)


@pytest.fixture
def without_xet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload by plain LFS, as with HF_HUB_DISABLE_XET=1, so that the server's log shows every upload."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
