"""A loopback Hub, the tiny checkpoint on it, and an environment in which the client library uses that Hub."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from command import RunCli, run_here
from loopback import TOKEN, LoopbackHub
from moves import OLD_CODE

from k2convert.hub.client import Hub, RepoRef
from k2convert.hub.source import RemoteRepo, resolve_source


@pytest.fixture(autouse=True)
def hub_environment(quick_pictures: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this folder can reach the real Hub or the user's login."""
    for name in [n for n in os.environ if n.startswith(("HF_", "HUGGING")) and n != "HF_HUB_DISABLE_XET"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("k2convert.hub.client.PATIENCE_SECONDS", 20.0)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A loopback Hub that knows one user, `me`, with write access."""
    with LoopbackHub(tmp_path / "hub-server") as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.api.token = TOKEN
        yield running


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A connection that retries at once."""
    monkeypatch.setattr("k2convert.hub.client.FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("k2convert.hub.client.MAX_RETRY_SECONDS", 0.05)
    monkeypatch.setattr("k2convert.hub.client.PATIENCE_SECONDS", 0.3)
    return Hub()


@pytest.fixture
def without_xet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload by plain LFS, here and in other processes, so that the server's log shows every upload."""
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


@pytest.fixture
def cli(cwd: Path, hub_environment: None, monkeypatch: pytest.MonkeyPatch) -> RunCli:
    """The command in this process; fails if its output has the token."""
    monkeypatch.chdir(cwd)

    def run(*args: object, code: int | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        done = run_here(*args, code=code, **env)
        assert TOKEN not in done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def tiny_hub(server: LoopbackHub, tiny: Path) -> LoopbackHub:
    """The loopback Hub with the tiny checkpoint as moon/tiny."""
    server.store.add_folder("moon/tiny", tiny)
    return server


@pytest.fixture
def upstream(tiny: Path, server: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    folder = Path(shutil.copytree(tiny, tmp_path / "upstream"))
    (folder / "chat_template.jinja").write_text("{{ old }}")
    (folder / OLD_CODE).write_text("OLD = True\n")
    server.store.add_folder("moon/tiny", folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    return server


@pytest.fixture
def source(tiny_hub: LoopbackHub, hub: Hub) -> RemoteRepo:
    return resolve_source(hub, RepoRef("moon/tiny"))


@pytest.fixture(scope="session")
def local_result(local_result: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for this folder, because publishing leaves a note in it."""
    return Path(shutil.copytree(local_result, tmp_path_factory.mktemp("local") / "out"))


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.arange(200) * 7)
    return path
