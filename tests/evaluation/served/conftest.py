"""Servers of small models, a text of token ids, and an environment without keys and without long pauses."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import WINDOW, Compare, Serve
from command import run_here

from k2convert.evaluation import connection
from scripts.engine_checks.model_server import VOCABULARY, Model, ModelServer


@pytest.fixture(autouse=True)
def calm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a folder of its own, without keys, with pauses of milliseconds."""
    for name in (connection.KEY_NAME, connection.OTHER_KEY_NAME):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(connection, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(connection, "MAX_PAUSE_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that lasts for the test."""
    with ExitStack() as stack:

        def start(model: Model, **options: Any) -> ModelServer:
            return stack.enter_context(ModelServer(model, **options))

        yield start


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """240 token ids."""
    path = tmp_path / "ids.npy"
    np.save(path, np.random.default_rng(3).integers(0, VOCABULARY, 6 * WINDOW))
    return path


@pytest.fixture
def options(text: Path) -> list[object]:
    return ["--text", text, "--window", WINDOW, "--top-k", 32, "--quiet"]


@pytest.fixture
def compare(options: list[object]) -> Compare:
    """Compare, and return the JSON document."""

    def ask(*arguments: object) -> dict[str, Any]:
        return json.loads(run_here("compare", *arguments, *options, "--json", code=0).stdout)

    return ask
