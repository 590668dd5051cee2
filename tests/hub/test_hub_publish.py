"""A job's destination: early refusals, shards on the work branch, one commit on main, no upload twice."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from command import RunCli
from faults import Fault, Kind
from loopback import TOKEN, LoopbackHub
from loopback_store import sha256_of

from k2convert.errors import HubError
from k2convert.hub.branch import Branch, Upload
from k2convert.hub.client import Hub, RepoRef
from k2convert.hub.preflight import Target, check_target
from k2convert.hub.source import resolve_source

MIT = "mit"
BRANCH = "k2convert-0123"
SHARDS = [f"model-0000{i}-of-000005.safetensors" for i in range(1, 4)]


def target_of(hub: Hub, *, repo: str = "me/out", private: bool = True, total: int = 10**6) -> Target:
    return check_target(hub, repo=repo, private=private, file_bytes={"a.safetensors": total}, licence=MIT, source=None)


def uploads(folder: Path) -> list[Upload]:
    return [Upload(n, folder / n, sha256_of(folder / n), (folder / n).stat().st_size) for n in SHARDS]


def opened(hub: Hub) -> Branch:
    branch = Branch(hub, target_of(hub), BRANCH)
    branch.open()
    return branch


def sent(hub: Hub, folder: Path) -> Branch:
    branch = opened(hub)
    for upload in uploads(folder):
        if not branch.has(upload.name, upload.sha256, upload.num_bytes):
            branch.add(upload, branch.send(upload), records={f"done/{upload.name}.json": b"{}"})
    branch.commit_group()
    return branch


def hashes_of(folder: Path) -> dict[str, tuple[str, int]]:
    return {upload.name: (upload.sha256, upload.num_bytes) for upload in uploads(folder)}


def publish_all(hub: Hub, folder: Path, files: dict[str, Path | bytes] | None = None) -> str:
    files = files or {"config.json": b"{}\n"}
    return sent(hub, folder).commit_to_main(shards=hashes_of(folder), files=files, message="Add the model")


def test_main_is_empty_until_the_end(server: LoopbackHub, hub: Hub, tiny: Path, without_xet: None) -> None:
    first = opened(hub)
    for upload in uploads(tiny)[:2]:
        first.add(upload, first.send(upload), records={})
    assert [u.name for u in first.commit_group()] == SHARDS[:2]
    assert list(server.store.repos["me/out"].files()) == [".gitattributes"]
    server.traffic.clear()
    for _ in range(2):
        publish_all(hub, tiny)
        again = [r.path for r in server.traffic.matching("PUT", "/_lfs/")]
        assert again == [f"/_lfs/{sha256_of(tiny / SHARDS[2])}"]
        assert server.store.repos["me/out"].num_commits("main") == 2


def test_an_upload_by_hand(server: LoopbackHub, hub: Hub, cli: RunCli, cwd: Path, tiny: Path) -> None:
    cli("run", tiny, "out", code=0)
    server.store.create("me/out")
    hub.api().upload_folder(folder_path=cwd / "out", repo_id="me/out")
    files = server.store.repos["me/out"].files()
    assert {*SHARDS, "config.json", "k2convert.json"} < set(files)
    assert [name for name in files if name.startswith(".k2convert")] == []


def test_a_gitignore_on_main_hides_no_records(server: LoopbackHub, hub: Hub, tiny: Path, without_xet: None) -> None:
    server.store.create("me/out", private=True)
    hub.api().upload_file(path_or_fileobj=b"/.k2convert/\n", path_in_repo=".gitignore", repo_id="me/out")
    branch = sent(hub, tiny)
    records = opened(hub).read_records(wanted=lambda name: name.startswith("done/"))
    assert sorted(records) == [f"done/{name}.json" for name in SHARDS]
    branch.commit_to_main(shards=hashes_of(tiny), files={"config.json": b"{}\n"}, message="Add the model")
    assert server.store.read("me/out", ".gitignore") == b"/.k2convert/\n"


def test_a_moved_main_is_a_clear_error_and_running_again_ends_it(server: LoopbackHub, hub: Hub, tiny: Path) -> None:
    branch = sent(hub, tiny)
    repo = server.store.repos["me/out"]
    repo.commit("main", dict(repo.files()) | {"notes.md": repo.files()[".gitattributes"]})
    with pytest.raises(HubError, match=r"412.*branch moved while this ran"):
        branch.commit_to_main(shards=hashes_of(tiny), files={}, message="Add")
    assert SHARDS[0] not in repo.files()
    publish_all(hub, tiny)
    assert {*SHARDS, "notes.md"} < set(repo.files())


def test_a_lost_answer_to_the_last_commit_is_not_an_error(server: LoopbackHub, hub: Hub, tiny: Path) -> None:
    publish_all(hub, tiny)
    branch = opened(hub)
    branch.head = server.store.repos["me/out"].history[0][1]  # as it was before the commit whose answer got lost
    branch.commit_to_main(shards=hashes_of(tiny), files={"config.json": b"{}\n"}, message="Add the model")
    assert server.store.repos["me/out"].num_commits("main") == 2


def test_a_shard_whose_hash_differs_on_the_branch_is_an_error(server: LoopbackHub, hub: Hub, tiny: Path) -> None:
    branch = opened(hub)
    good = uploads(tiny)[0]
    operation = branch.send(good)
    branch.add(Upload(good.name, good.path, "0" * 64, good.num_bytes), operation, records={})
    with pytest.raises(HubError, match=r"a different sha256.*Nothing was deleted"):
        branch.commit_group()


def test_what_others_put_on_the_branch_does_not_reach_main(server: LoopbackHub, hub: Hub, tiny: Path) -> None:
    branch = sent(hub, tiny)
    repo = server.store.repos["me/out"]
    files = repo.files(BRANCH)
    assert files[SHARDS[0]].size != files[SHARDS[2]].size
    repo.commit(BRANCH, files | {SHARDS[0]: files[SHARDS[2]]})
    with pytest.raises(HubError, match=f"{SHARDS[0]} is not on {BRANCH} as it was uploaded"):
        branch.commit_to_main(shards=hashes_of(tiny), files={}, message="Add the model")
    assert repo.num_commits("main") == 1


def test_a_repository_that_became_public_meanwhile_is_refused(server: LoopbackHub, hub: Hub) -> None:
    target = target_of(hub)
    server.store.create("me/out", private=False)
    with pytest.raises(HubError, match="is public, but a private one was requested"):
        Branch(hub, target, BRANCH).open()
    with pytest.raises(HubError, match="--public"):
        target_of(hub)
    assert not target_of(hub, private=False).private


PICTURE = b"\x89PNG" * 100
PICTURE_PATH = f"/_lfs/{hashlib.sha256(PICTURE).hexdigest()}"
PAGES = (("GET", ("/revision/main", "/tree/")), ("POST", ("/preupload/", "/commit/", "/objects/batch", "/paths-info/")))
RETRIED = {
    **{f"a page for {path}": [Fault(method, path, Kind.PAGE)] for method, paths in PAGES for path in paths},
    "the last upload": [Fault("PUT", PICTURE_PATH)],
    "all at once": [
        Fault("POST", "/preupload/", status=503),
        Fault("POST", "/commit/", status=503, times=2),
        Fault("POST", "/commit/", status=429, retry_after=0),
        Fault("PUT", "/_lfs/", Kind.RESET),
        Fault("GET", "/tree/", status=502),
        Fault("POST", "/branch/", status=500),
    ],
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", RETRIED)
def test_faults_are_retried(server: LoopbackHub, hub: Hub, tiny: Path, without_xet: None, name: str) -> None:
    server.api.lfs_suffixes = (".safetensors", ".png")
    server.traffic.inject(*RETRIED[name])
    publish_all(hub, tiny, {"report.png": PICTURE})
    assert len(server.traffic.injected) == sum(fault.times for fault in RETRIED[name])
    assert server.store.read("me/out", "report.png") == PICTURE
    assert server.store.repos["me/out"].num_commits("main") == 2


def test_a_refused_upload_is_no_commit(server: LoopbackHub, hub: Hub, tiny: Path, without_xet: None) -> None:
    server.api.lfs_suffixes = (".safetensors", ".png")
    server.traffic.inject(Fault("PUT", PICTURE_PATH, status=403))
    with pytest.raises(HubError, match=r"could not commit the model to main.*403"):
        publish_all(hub, tiny, {"report.png": PICTURE})
    assert server.store.repos["me/out"].num_commits("main") == 1


def test_commits_are_limited(server: LoopbackHub, hub: Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("k2convert.hub.branch.MAX_COMMITS_PER_HOUR", 2)
    monkeypatch.setattr("k2convert.hub.branch.time.sleep", waits.append)
    branch = opened(hub)
    for upload in uploads(tiny):
        branch.add(upload, branch.send(upload), records={})
        branch.commit_group()
    assert len(waits) == 1
    assert 3500 < waits[0] <= 3600


def account(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"name": "me", "type": "user", "isPro": False, "orgs": []}
    return base | {"auth": {"type": "access_token", "accessToken": {"role": "write"}}} | changes


def role(name: str, **more: Any) -> dict[str, Any]:
    return {"auth": {"type": "access_token", "accessToken": {"role": name, **more}}}


def scoped(name: str, *permissions: str) -> dict[str, Any]:
    return {"fineGrained": {"scoped": [{"entity": {"type": "user", "name": name}, "permissions": list(permissions)}]}}


@pytest.mark.parametrize(
    ("who", "words"),
    [
        (account(**role("read")), "can only read"),
        (account(name="you"), "cannot write to me. Choose from: you"),
        (account(name="you", orgs=[{"name": "me", "roleInOrg": "read"}]), "can only read in me"),
        (account(**role("fineGrained", **scoped("me", "repo.content.read"))), "fine-grained token"),
        (account(**role("fineGrained", **scoped("you", "repo.write"))), "fine-grained token"),
        (account(), None),
        (account(name="you", orgs=[{"name": "me", "roleInOrg": "admin"}]), None),
        (account(**role("fineGrained", **scoped("me", "repo.write"))), None),
        (account(**role("fineGrained", **scoped("me/out", "repo.write"))), None),
    ],
)
def test_a_token_must_be_able_to_write(server: LoopbackHub, hub: Hub, who: dict[str, Any], words: str | None) -> None:
    server.api.account = who
    if words is None:
        assert target_of(hub).head is None
    else:
        with pytest.raises(HubError, match=words):
            target_of(hub)
    assert server.store.repos == {}


def test_no_token_is_unlike_a_wrong_one(server: LoopbackHub, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match=r"401.*valid token") as caught:
        target_of(hub)
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="needs a token with write access"):
        target_of(hub)


def test_limits_are_named_before_the_start(server: LoopbackHub, hub: Hub) -> None:
    with pytest.raises(HubError, match="50 GB, the Hub's limit per file"):
        target_of(hub, total=60 * 10**9)
    shards = {f"{i}.safetensors": 9_800_000_000 for i in range(61)}
    target = check_target(hub, repo="me/out", private=True, file_bytes=shards, licence=None, source=None)
    assert "a free account has 100 GB of private storage" in target.notices[0]
    assert "no license" in target.notices[1]
    public = check_target(hub, repo="me/out", private=False, file_bytes=shards, licence=MIT, source=None)
    assert public.notices == ()


def test_the_source_is_never_the_destination(server: LoopbackHub, hub: Hub, tiny: Path) -> None:
    server.store.add_folder("me/out", tiny)
    source = resolve_source(hub, RepoRef("me/out"))
    with pytest.raises(HubError, match="is the source itself"):
        check_target(hub, repo="me/out", private=True, file_bytes={}, licence=MIT, source=source)


def test_making_a_private_source_public_is_said(server: LoopbackHub, hub: Hub, tiny: Path) -> None:
    server.store.add_folder("me/secret", tiny, private=True)
    source = resolve_source(hub, RepoRef("me/secret"))
    for private in (True, False):
        target = check_target(hub, repo="me/out", private=private, file_bytes={}, licence=MIT, source=source)
        assert any("me/secret is private" in notice for notice in target.notices) == (not private)


def test_only_requests_to_the_hub_have_the_token(server: LoopbackHub, hub: Hub, tiny: Path, without_xet: None) -> None:
    publish_all(hub, tiny)
    uploads_seen = server.traffic.matching("PUT", "/_lfs/")
    assert uploads_seen
    assert not any(r.authorized for r in uploads_seen)  # signed addresses of the storage need none
    assert TOKEN not in repr(server.traffic.requests)
