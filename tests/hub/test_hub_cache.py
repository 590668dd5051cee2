"""`hf://` takes what the local cache of the client library holds, and fetches the rest."""

from pathlib import Path

import pytest
from command import RunCli
from damaged_files import flip
from huggingface_hub import hf_hub_download, snapshot_download
from loopback import LoopbackHub

SHARD = "model-00002-of-000005.safetensors"
REPO = "moon/tiny"
SOURCE = f"hf://{REPO}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def result(folder: Path) -> dict[str, bytes]:
    """The files of a result but its ledger, which names the source's commit."""
    files = (path for path in folder.glob("*") if path.is_file() and path.name != "k2convert.json")
    return {path.name: path.read_bytes() for path in files}


def download(server: LoopbackHub, cache: Path, *files: str) -> Path:
    """Fill the cache as `hf download` does: with some files, or with all."""
    for file in files:
        hf_hub_download(REPO, file, endpoint=server.url, cache_dir=cache)
    return Path(snapshot_download(REPO, endpoint=server.url, cache_dir=cache, local_files_only=bool(files)))


def fetched(server: LoopbackHub) -> set[str]:
    requests = [request for request in server.traffic.requests if "/resolve/" in request.path]
    return {request.path.rpartition("/")[2] for request in requests if request.method == "GET"}


def test_only_the_rest_is_fetched(
    tiny_hub: LoopbackHub, cache: Path, local_result: Path, cli: RunCli, cwd: Path
) -> None:
    download(tiny_hub, cache, SHARD, "config.json")
    tiny_hub.traffic.requests.clear()
    cli("run", SOURCE, "out", code=0)
    assert not fetched(tiny_hub) & {SHARD, "config.json"}
    assert "model-00001-of-000005.safetensors" in fetched(tiny_hub)
    assert result(cwd / "out") == result(local_result)


@pytest.mark.slow
def test_the_cache_alone_is_enough_without_a_network(
    tiny_hub: LoopbackHub, cache: Path, local_result: Path, text: Path, cli: RunCli, cwd: Path
) -> None:
    snapshot = download(tiny_hub, cache)
    tiny_hub.traffic.requests.clear()
    cli("run", SOURCE, "out", code=0, HF_HUB_OFFLINE="1")
    assert result(cwd / "out") == result(local_result)
    for source in (f"{SOURCE}@{snapshot.name}", f"{SOURCE}@main"):
        cli("run", source, "other", "--dry-run", code=0, HF_HUB_OFFLINE="1")
    cli("validate", "out", "--source", SOURCE, code=0, HF_HUB_OFFLINE="1")
    shown = cli("validate", "out", "--source", snapshot, "--layers", "1", code=0, HF_HUB_OFFLINE="1").stdout
    assert "passed" in shown
    words = ("--text", text, "--tokens", "64", "--window", "32", "--device", "cpu", "--quiet")
    cli("evaluate", SOURCE, snapshot, "--out", "found.json", *words, code=0, HF_HUB_OFFLINE="1")
    assert not tiny_hub.traffic.requests


def test_what_the_cache_lacks_offline_is_named(tiny_hub: LoopbackHub, cache: Path, cli: RunCli, cwd: Path) -> None:
    snapshot = download(tiny_hub, cache)
    (snapshot / SHARD).unlink()
    error = cli("run", SOURCE, "out", code=1, HF_HUB_OFFLINE="1").stderr
    assert f"HF_HUB_OFFLINE is set, and the cache lacks {SHARD}. Unset it, or run `hf download {REPO}`" in error
    (snapshot / "model.safetensors.index.json").unlink()
    error = cli("run", SOURCE, "out", code=1, HF_HUB_OFFLINE="1").stderr
    assert "the cache lacks model.safetensors.index.json" in error
    for source in (f"{SOURCE}@v2", "hf://moon/other"):
        error = cli("run", source, "out", code=1, HF_HUB_OFFLINE="1").stderr
        assert "does not hold it" in error
    assert error.count("\n") == 1
    assert not (cwd / "out").exists()


def test_a_damaged_cache(tiny_hub: LoopbackHub, cache: Path, local_result: Path, cli: RunCli, cwd: Path) -> None:
    snapshot = download(tiny_hub, cache)
    flip((snapshot / SHARD).resolve(), -1)
    error = cli("run", SOURCE, "out", code=1, HF_HUB_OFFLINE="1").stderr
    assert f"{SHARD}: is damaged: its bytes do not have the sha256 of its name" in error
    assert f"`hf download {REPO} {SHARD} --force-download` replaces it" in error
    assert not (cwd / "out" / SHARD).exists()
    tiny_hub.traffic.requests.clear()
    cli("run", SOURCE, "out", code=0)
    assert fetched(tiny_hub) == {SHARD}, "from the Hub"
    assert result(cwd / "out") == result(local_result)
