"""What planning needs of a remote repository: names, the pinned commit, headers by range, small files."""

import shutil
import time
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest
from command import run_here
from faults import Fault, Kind
from huggingface_hub.utils import validate_repo_id
from loopback import TOKEN, LoopbackHub

from k2convert.checkpoint.index import Checkpoint, open_checkpoint
from k2convert.errors import CheckpointError, DestinationWriteError, HubError
from k2convert.hub.client import Hub, RepoRef, parse_repo
from k2convert.hub.request_errors import HubRequestError
from k2convert.hub.source import RemoteRepo, open_remote, resolve_source
from k2convert.job.locations import read_destination

NAMES = ("a/b", "a_/b", "me/a-b_c.d", "me/1", "a.b/c", "me/" + "a" * 93)
FOREIGN = (
    *("", "me", "me/..", "me/a@", "/a", "me/a--b"),
    *("a/b/c", "a/b..c", "me-/out", "moon./tiny", "moon/naïve", "a/b.git"),
)


def test_a_name_is_a_repository_if_it_has_the_form_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_repo("hf://me/a@v1") == RepoRef("me/a", "v1")
    assert parse_repo("moonshotai/Kimi-K2.5@main") == RepoRef("moonshotai/Kimi-K2.5", "main")
    assert {parse_repo(text) for text in ("/data/model", "./me/model", "model", "a/b/c")} == {None}
    for name in NAMES:
        validate_repo_id(name)
        assert parse_repo(f"hf://{name}") == RepoRef(name)
    for name in FOREIGN:
        with pytest.raises(HubError, match="hf://owner/name"):
            parse_repo(f"hf://{name}")
    (tmp_path / "me" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_repo("me/model") is None, "an existing path is never a repository"
    assert read_destination("hf://me/out@main") == read_destination("hf://me/out"), "main is the branch without a name"
    assert read_destination("hf://me/out@v2").folder != read_destination("hf://me/out").folder
    assert parse_repo("hf://me/model") == RepoRef("me/model")


def test_a_remote_checkpoint_opens_like_the_local_one_with_two_range_requests_a_shard(
    server: LoopbackHub, hub: Hub, source: RemoteRepo, tiny: Path, tmp_path: Path
) -> None:
    remote = open_remote(hub, source, folder=tmp_path / "small")
    local = open_checkpoint(tiny)
    assert (remote.headers, remote.config, remote.tensors) == (local.headers, local.config, local.tensors)
    assert (tmp_path / "small" / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    requests = server.traffic.matching("GET", r"\.safetensors$")
    assert len(requests) == 2 * len(remote.headers)
    assert sum(r.sent for r in requests) == sum(h.data_begin for h in remote.headers.values()), "no tensor byte"


def open_tiny(hub: Hub, folder: Path) -> Checkpoint:
    return open_remote(hub, resolve_source(hub, RepoRef("moon/tiny")), folder=folder / "small")


@pytest.mark.slow
def test_all_of_k2_is_planned_from_headers(server: LoopbackHub, hub: Hub, k2_headers: Path, tmp_path: Path) -> None:
    server.store.add_folder("moon/k2", k2_headers, hash_shards=False)
    remote = open_remote(hub, resolve_source(hub, RepoRef("moon/k2")), folder=tmp_path / "small")
    assert (len(remote.headers), len(remote.tensors)) == (62, 208_215)
    assert remote.tensor_bytes == 594_205_904_896
    assert server.traffic.bytes_sent(r"\.safetensors$") < 60_000_000


def test_a_push_changes_no_pinned_source(server: LoopbackHub, hub: Hub, source: RemoteRepo, tmp_path: Path) -> None:
    server.store.repos["moon/tiny"].commit("main", {})
    assert open_remote(hub, source, folder=tmp_path / "small").config["model_type"] == "kimi_k2"
    assert source.commit in server.traffic.matching("GET", r"config\.json$")[0].path


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        (RepoRef("moon/absent"), "look up moon/absent.*404.*Check the spelling"),
        (RepoRef("moon/tiny", "v9"), "revision v9.*404"),
    ],
)
@pytest.mark.usefixtures("tiny_hub")
def test_missing_repository_or_revision_says_what_to_check(hub: Hub, ref: RepoRef, words: str) -> None:
    with pytest.raises(HubError, match=words):
        resolve_source(hub, ref)


PAST = ["Mon, 01 Jan 2024 00:00:00 GMT", "Mon, 01 Jan 2024 00:00:00 -0000"]


@pytest.mark.parametrize(
    ("retry_after", "seconds"), [(1, 1), *((retry_after, 0) for retry_after in (*PAST, "\N{SUPERSCRIPT TWO}", "soon"))]
)
def test_retry_after_is_obeyed_if_it_is_one(
    tiny_hub: LoopbackHub, hub: Hub, retry_after: int | str, seconds: int
) -> None:
    notices: list[str] = []
    tiny_hub.traffic.inject(Fault("GET", "/api/models/moon/tiny", status=429, retry_after=retry_after))
    resolve_source(replace(hub, notify=notices.append), RepoRef("moon/tiny"))
    assert notices == [f"the Hub answered 429 (injected); trying again in {seconds} s"]


def test_a_wait_is_at_most_an_hour(tiny_hub: LoopbackHub, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k2convert.hub.client.NUM_ATTEMPTS", 1)
    for seconds, least, most in ((100, 90, 100), (10**6, 3600, 3600)):
        retry_after = formatdate(time.time() + seconds, usegmt=True)
        tiny_hub.traffic.inject(Fault("GET", "/api/models/moon/tiny", status=429, retry_after=retry_after))
        with pytest.raises(HubRequestError) as caught:
            resolve_source(hub, RepoRef("moon/tiny"))
        assert least <= (caught.value.retry_after or 0) <= most


def test_a_shard_outside_the_index_is_accepted(tiny_hub: LoopbackHub, hub: Hub, tiny: Path, tmp_path: Path) -> None:
    repo = tiny_hub.store.repos["moon/tiny"]
    repo.commit("main", repo.files() | {"stray.safetensors": repo.files()["config.json"]})
    remote = open_tiny(hub, tmp_path)
    assert remote.tensors == open_checkpoint(tiny).tensors
    assert remote.stray_shards == ("stray.safetensors",)
    assert tiny_hub.traffic.matching("GET", "stray") == []


@pytest.mark.slow
def test_a_large_file_that_is_no_weights_is_left_out_and_named(server: LoopbackHub, tiny: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    with (source / "samples.tar").open("wb") as file:
        file.truncate(300_000_000)
    server.store.add_folder("moon/tiny", source)
    notices: list[str] = []
    open_tiny(Hub(warn=notices.append), tmp_path)
    assert len(notices) == 1
    assert "samples.tar is left out: 300.00 MB" in notices[0]
    assert (tmp_path / "small" / "tokenizer.json").exists()
    assert not (tmp_path / "small" / "samples.tar").exists()
    assert server.traffic.matching("GET", "samples") == []


def test_a_missing_shard_and_a_path_outside_are_named(tiny_hub: LoopbackHub, hub: Hub, tmp_path: Path) -> None:
    repo = tiny_hub.store.repos["moon/tiny"]
    shard = "model-00002-of-000005.safetensors"
    files = repo.files()
    repo.commit("main", {name: entry for name, entry in files.items() if name != shard})
    with pytest.raises(HubError, match=f"{shard} is missing, but the index names it"):
        open_tiny(hub, tmp_path)
    repo.commit("main", files | {"../evil.json": files["config.json"]})
    with pytest.raises(HubError, match="outside"):
        open_tiny(hub, tmp_path)
    assert not (tmp_path / "evil.json").exists()


HEADER = r"00002-of.*safetensors$"
RETRIED = {
    **{
        f"status {status}": [
            Fault("GET", "/revision|/api/models/moon/tiny$", status=status),
            Fault("GET", "/tree/", status=status),
            Fault("GET", r"config\.json$", status=status, times=2),
            Fault("GET", r"\.safetensors$", status=status, times=3),
        ]
        for status in (429, 500, 502, 503, 504)
    },
    **{
        kind: [Fault("GET", r"tokenizer\.json$", kind, times=2), Fault("GET", HEADER, kind, after_bytes=3)]
        for kind in (Kind.RESET, Kind.SHORT)
    },
    "a wrong byte": [Fault("GET", r"tokenizer\.json$", Kind.CORRUPT, times=2)],  # a header has no hash
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", RETRIED)
def test_wrong_answers_are_retried(tiny_hub: LoopbackHub, hub: Hub, tiny: Path, tmp_path: Path, name: str) -> None:
    tiny_hub.traffic.inject(*RETRIED[name])
    assert open_tiny(hub, tmp_path).tensors == open_checkpoint(tiny).tensors
    assert (tmp_path / "small" / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert len(tiny_hub.traffic.injected) == sum(fault.times for fault in RETRIED[name])


def test_offline_mode_fails_at_once(server: LoopbackHub, hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        resolve_source(hub, RepoRef("moon/tiny"))
    run_here("inspect", tiny, code=0)  # a folder needs no Hub
    assert server.traffic.requests == []


@pytest.mark.parametrize(
    ("address", "words"),
    [
        *(
            (of, r"HF_ENDPOINT is .*not an address")
            for of in ("http://[::1", "localhost:8080", "https://", "http://a:b")
        ),
        ("http://127.0.0.1:1", r"connection to the Hub failed.*Check the network"),
    ],
)
def test_an_unusable_endpoint_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch, address: str, words: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(HubError, match=words):
        resolve_source(hub, RepoRef("moon/tiny"))


def test_private_source_needs_a_token(tiny_hub: LoopbackHub, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_hub.store.repos["moon/tiny"].private = True
    assert resolve_source(hub, RepoRef("moon/tiny")).private
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match=r"hf auth login") as caught:
        resolve_source(hub, RepoRef("moon/tiny"))
    assert TOKEN not in str(caught.value)


def test_a_damaged_header_names_the_shard(server: LoopbackHub, hub: Hub, source: RemoteRepo, tmp_path: Path) -> None:
    server.traffic.inject(Fault("GET", r"00003-of.*safetensors$", Kind.CORRUPT, after_bytes=6))
    with pytest.raises(CheckpointError, match=r"moon/tiny/model-00003-of-000005\.safetensors"):
        open_remote(hub, source, folder=tmp_path / "small")


def test_a_small_file_that_cannot_be_kept_is_named(hub: Hub, source: RemoteRepo, tmp_path: Path) -> None:
    (tmp_path / "small").write_text("in the way")
    with pytest.raises(DestinationWriteError, match=r"small/.*cannot be written.*TMPDIR"):
        open_remote(hub, source, folder=tmp_path / "small")
