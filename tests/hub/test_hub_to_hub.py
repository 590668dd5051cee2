"""The whole job in one command: Hub to Hub, Hub to folder, folder to Hub, and refusals before the start."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import RunCli, said
from faults import Fault
from loopback import TOKEN, LoopbackHub
from loopback_store import Entry
from published import JOB, WITHOUT_SOURCE, assert_published, stop_before_main

from k2convert.job import run as executor
from k2convert.job.shard import ShardTask
from k2convert.records.shard_record import ShardRecord
from scripts.fixture_maker.damage import edit_config

SHARDS = [f"model-0000{i}-of-000005.safetensors" for i in range(1, 6)]


@pytest.mark.parametrize("disable_xet", ["0", "1"], ids=["Xet", "LFS"])
def test_hub_to_hub_in_one_command(
    tiny_on_hub: LoopbackHub, hub_process: RunCli, workplace: Path, local_result: Path, disable_xet: str
) -> None:
    done = hub_process(*JOB, HF_HUB_DISABLE_XET=disable_xet)
    assert done.returncode == 0, done.stderr
    assert_published(tiny_on_hub, local_result)
    assert tiny_on_hub.store.repos["me/out"].private
    assert bool(tiny_on_hub.traffic.matching("PUT", "/_lfs/")) == (disable_xet == "1")
    assert list(workplace.rglob("*.safetensors")) == []
    again = hub_process(*JOB, HF_HUB_DISABLE_XET=disable_xet)
    assert again.returncode == 0, again.stderr
    assert "already holds this result" in again.stderr
    assert_published(tiny_on_hub, local_result)


def test_hub_to_folder_gives_the_local_bytes(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path, local_result: Path
) -> None:
    done = hub_cli("run", "hf://moon/tiny@main", "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["commit"] is None
    for name in SHARDS:
        assert (workplace / "out" / name).read_bytes() == (local_result / name).read_bytes()
    commit = tiny_on_hub.store.repos["moon/tiny"].refs["main"]
    assert json.loads((workplace / "out" / "k2convert.json").read_text())["source"]["revision"] == commit
    assert hub_cli("validate", "out").returncode == 0


def test_several_shards_are_converted_at_once_if_requested(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, local_result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, convert = threading.Barrier(2), executor.convert_shard

    def together(task: ShardTask, **options: Any) -> ShardRecord:
        if task.shard.name in SHARDS[:2]:
            both.wait(timeout=300)  # the first waits here until another thread has come with the second
        return convert(task, **options)

    monkeypatch.setattr(executor, "convert_shard", together)
    done = hub_cli(*JOB, "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert_published(tiny_on_hub, local_result)


def test_folder_to_hub_keeps_the_source(server: LoopbackHub, hub_cli: RunCli, tiny: Path, local_result: Path) -> None:
    before = sorted((p.name, p.stat().st_mtime_ns) for p in tiny.iterdir())
    done = hub_cli("run", tiny, "hf://team/out", "--yes", "--public")
    assert done.returncode == 0, done.stderr
    assert_published(server, local_result, "team/out")
    assert not server.store.repos["team/out"].private
    assert sorted((p.name, p.stat().st_mtime_ns) for p in tiny.iterdir()) == before


def test_publish_sends_a_finished_folder_and_keeps_it(server: LoopbackHub, hub_cli: RunCli, local_result: Path) -> None:
    done = hub_cli("publish", local_result, "--repo", "me/out", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "repo": "me/out",
        "commit": server.store.repos["me/out"].refs["main"],
        "private": True,
    }
    assert_published(server, local_result, checked=WITHOUT_SOURCE)
    assert WITHOUT_SOURCE in " ".join(done.stderr.split())
    assert server.store.read("me/out", "k2convert.json") == (local_result / "k2convert.json").read_bytes()
    assert all((local_result / name).exists() for name in SHARDS)


@pytest.mark.parametrize("where", ["folder", "Hub"])
def test_publish_with_the_source_checks_all_rules(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, local_result: Path, tiny: Path, where: str
) -> None:
    source = tiny if where == "folder" else "hf://moon/tiny"
    done = hub_cli("publish", local_result, "--repo", "me/out", "--source", source, "--yes")
    assert done.returncode == 0, done.stderr
    assert_published(tiny_on_hub, local_result)


def test_publish_refuses_what_does_not_validate(
    server: LoopbackHub, hub_cli: RunCli, workplace: Path, local_result: Path
) -> None:
    for path in local_result.iterdir():
        if path.is_file():
            (workplace / path.name).write_bytes(path.read_bytes())
    shard = workplace / SHARDS[2]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    done = hub_cli("publish", workplace, "--repo", "me/out", "--yes")
    assert done.returncode == 3
    assert "does not validate" in done.stderr
    assert server.store.repos == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--repo", "me/out@refs/pr/1"), "results go to a branch, and refs/pr/1 is not one of yours"),
        (("--repo", "me-/out"), "not a repository"),
        (("--repo", "me/out", "--base-model", "x"), "hf://x: not a repository"),
        (("--repo", "me/out", "--base-model", "moon/tiny@v1"), "Leave out @v1"),
    ],
)
def test_publish_refuses_odd_names_at_once(
    server: LoopbackHub, hub_cli: RunCli, local_result: Path, options: tuple[str, ...], words: str
) -> None:
    done = hub_cli("publish", local_result, *options, "--yes")
    assert done.returncode == 1
    assert words in " ".join(done.stderr.split())
    assert server.traffic.requests == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shards", None),
        ("shards", [1]),
        ("shards", {"model-00001-of-000005.safetensors": {}}),
        ("shards", {"../x.safetensors": {"bytes": 1}}),
        ("fingerprint", None),
        ("source", {"repo": 5}),
    ],
)
def test_publish_names_a_damaged_ledger(
    server: LoopbackHub, hub_cli: RunCli, workplace: Path, local_result: Path, key: str, value: object
) -> None:
    ledger = json.loads((local_result / "k2convert.json").read_text())
    (workplace / "k2convert.json").write_text(json.dumps(ledger | {key: value}))
    done = hub_cli("publish", workplace, "--repo", "me/out", "--yes")
    assert done.returncode == 1
    assert f"k2convert.json: {key}" in " ".join(done.stderr.split())


@pytest.mark.parametrize("verb", ["run", "publish"])
def test_publishing_without_a_terminal_needs_yes(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, local_result: Path, verb: str
) -> None:
    arguments = ("hf://moon/tiny", "hf://me/out") if verb == "run" else (local_result, "--repo", "me/out")
    done = hub_cli(verb, *arguments)
    assert done.returncode == 1
    assert "needs --yes" in done.stderr
    assert list(tiny_on_hub.store.repos) == ["moon/tiny"]


def test_a_repository_is_shown_as_it_was_given(
    server: LoopbackHub, hub_cli: RunCli, local_result: Path, tiny: Path, tmp_path: Path
) -> None:
    server.store.add_folder("me/out", local_result)
    done = hub_cli("inspect", "hf://me/out@main")
    assert done.stdout.startswith("hf://me/out@main: kimi-k2-thinking (")
    assert "cannot be converted: hf://me/out@main: model." in done.stdout
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    edit_config(source, model_type="deepseek_v3")
    server.store.add_folder("moon/other", source)
    refused = hub_cli("run", "hf://moon/other", "out")
    assert refused.returncode == 1
    assert said(refused.stderr).startswith("error: hf://moon/other: config.json: model_type is 'deepseek_v3'")


def test_planning_a_remote_source_downloads_no_shard_and_writes_nothing(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path, tiny: Path
) -> None:
    inspected = hub_cli("inspect", "hf://moon/tiny", "--json")
    assert json.loads(inspected.stdout)["int4_projections"] == 144
    planned = hub_cli("run", "hf://moon/tiny", "hf://me/out", "--dry-run", "--json")
    plan = json.loads(planned.stdout)
    assert plan["source_commit"] == tiny_on_hub.store.repos["moon/tiny"].refs["main"]
    assert plan["branch"].startswith("k2convert-")
    weighed = [hub_cli("fit", place, "--gpu", "b200", "--count", "2", "--json") for place in ("hf://moon/tiny", tiny)]
    assert json.loads(weighed[0].stdout) == json.loads(weighed[1].stdout) | {"checkpoint": "hf://moon/tiny"}
    sent = tiny_on_hub.traffic.bytes_sent(r"\.safetensors$")
    assert sent < 0.3 * sum((tiny / name).stat().st_size for name in SHARDS)
    assert list(workplace.iterdir()) == []
    assert list(tiny_on_hub.store.repos) == ["moon/tiny"]


def test_too_little_disk_is_refused_at_the_plan(tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path) -> None:
    done = hub_cli(*JOB, "--max-disk", "2MB")
    assert done.returncode == 1
    assert "bytes of disk at once, but may use 2,000,000. Allow more with --max-disk" in done.stderr
    assert list(workplace.iterdir()) == []


def test_a_repository_with_other_weights_is_left_alone(tiny_on_hub: LoopbackHub, hub_cli: RunCli, tiny: Path) -> None:
    tiny_on_hub.store.add_folder("me/out", tiny, private=True)
    done = hub_cli(*JOB)
    assert done.returncode == 1
    assert "me/out: main already holds other weights, and they are not replaced. " in done.stderr
    assert "Publish to hf://me/out@v2, or choose a new repository.\n" in done.stderr
    assert tiny_on_hub.store.repos["me/out"].num_commits("main") == 2


def test_a_job_that_stopped_at_its_commits_goes_on_as_it_began(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path, local_result: Path, tmp_path: Path
) -> None:
    """Meanwhile the source moved on, a record was damaged, and a file got into the work folder by chance."""
    repo, work = tiny_on_hub.store.repos["moon/tiny"], workplace / "k2convert-work" / "me--out"
    first = repo.refs["main"]
    tiny_on_hub.traffic.inject(Fault("POST", "/commit/main", status=412))
    stopped = hub_cli(*JOB)
    assert stopped.returncode == 1
    assert "run the same command again" in stopped.stderr
    shown = hub_cli("status", work)
    assert "published" not in shown.stdout
    assert "the same `k2convert run` command finishes the job" in shown.stderr
    found = hub_cli("status", "hf://me/out")
    assert (found.returncode, found.stdout) == (1, "")
    assert "has no k2convert.json" in found.stderr

    repo.commit("main", dict(repo.files()) | {"news.md": repo.files()["README.md"]})
    record = sorted((work / ".k2convert" / "shards").iterdir())[0]
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b'"file_bytes":1', b'"file_bytes":2', 1))
    assert record.read_bytes() != whole
    (work / "run.log").write_text("private")
    tiny_on_hub.traffic.clear()
    tiny_on_hub.traffic.inject(
        Fault("POST", "/commit/main", status=500, times=2), Fault("DELETE", "/branch/", status=403)
    )
    assert hub_cli(*JOB).returncode == 1
    assert record.read_bytes() == whole, "the branch has the record, undamaged"
    assert tiny_on_hub.traffic.bytes_sent(r"\.safetensors$") < 200_000, "only headers were fetched"
    done = hub_cli(*JOB)
    assert done.returncode == 0, done.stderr
    assert_published(tiny_on_hub, local_result)
    assert "run.log" not in tiny_on_hub.store.repos["me/out"].files()
    assert json.loads(tiny_on_hub.store.read("me/out", "k2convert.json"))["source"]["revision"] == first
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        assert TOKEN.encode() not in path.read_bytes(), path
    assert os.environ["HF_TOKEN"] == TOKEN


@pytest.mark.parametrize("damaged", [False, True])
def test_another_machine_continues_from_the_branch_alone(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path, local_result: Path, damaged: bool
) -> None:
    stop_before_main(tiny_on_hub, hub_cli)
    if damaged:  # such a record is ignored
        repo = tiny_on_hub.store.repos["me/out"]
        branch = next(name for name in repo.refs if name != "main")
        record = next(name for name in sorted(repo.files(branch)) if name.startswith(".k2convert/shards/"))
        repo.commit(branch, repo.files(branch) | {record: Entry(2, b"{}")})
    (workplace / "k2convert-work").rename(workplace / "elsewhere")
    assert hub_cli(*JOB).returncode == 0
    assert_published(tiny_on_hub, local_result)
    assert damaged or tiny_on_hub.traffic.bytes_sent(r"\.safetensors$") < 200_000
    ours, theirs = (workplace / top / "me--out" / "k2convert.json" for top in ("k2convert-work", "elsewhere"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_what_a_server_says_is_printed_without_tokens(tiny_on_hub: LoopbackHub, hub_cli: RunCli) -> None:
    other = "hf_QzAbCdEfGhIjKlMnOpQrStUv"
    words = f"no access with Authorization: Bearer {TOKEN}; {other}; https://me:secret@proxy/?token=s3cret&x=1 hf_xet"
    tiny_on_hub.traffic.inject(
        Fault("GET", "/api/models/moon/tiny", status=503, words=words),
        Fault("GET", "/api/models/moon/tiny", status=403, words=words),
    )
    done = hub_cli("inspect", "hf://moon/tiny")  # which fails if its output has the token
    assert done.returncode == 1
    said = done.stderr.replace("\n", " ")
    assert "trying again" in said
    assert said.count("no access with Authorization: Bearer [token]") == 2
    assert said.count("https://[token]@proxy/?token=[token]&x=1 hf_xet") == 2
    assert not any(secret in said for secret in (other, "secret", "s3cret"))


def test_a_source_that_the_hub_lists_with_another_hash_is_refused(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path
) -> None:
    assert hub_cli("run", "hf://moon/tiny", "out").returncode == 0
    path = workplace / "out" / ".k2convert" / "job.json"
    job = json.loads(path.read_text())
    assert job["source"][SHARDS[1]] == tiny_on_hub.store.repos["moon/tiny"].files()[SHARDS[1]].sha256
    job["source"][SHARDS[1]] = "0" * 64
    path.write_text(json.dumps(job))
    done = hub_cli("run", "hf://moon/tiny", "out")
    assert done.returncode == 1
    assert f"{SHARDS[1]}: this source shard has a different size or time" in done.stderr


@pytest.mark.parametrize("inside", ["\x0b", "\u200b"])
def test_a_token_that_no_request_can_carry_is_refused_unseen(
    tiny_on_hub: LoopbackHub, hub_process: RunCli, inside: str
) -> None:
    done = hub_process(*JOB, HF_TOKEN=f"hf_Part{inside}Other")
    assert done.returncode == 1
    assert "has a character that tokens never have" in done.stderr
    assert "Part" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["run", "publish"])
def test_a_card_that_the_hub_would_refuse_is_settled_before_the_work(
    server: LoopbackHub, hub_cli: RunCli, tiny: Path, workplace: Path, local_result: Path, verb: str
) -> None:
    source = workplace / "source"
    shutil.copytree(tiny, source)
    (source / "README.md").write_bytes(
        b"---\nlicense: modified-mit\npipeline_tag: chat\n---\n# caf\xe9, which is not UTF-8\n"
    )
    server.store.add_folder("moon/odd", source)
    arguments = ("hf://moon/odd", "hf://me/out") if verb == "run" else (local_result, "--repo", "me/out")
    more = () if verb == "run" else ("--base-model", "moon/odd")
    done = hub_cli(verb, *arguments, "--yes", *more)
    assert done.returncode == 0, done.stderr
    card = server.store.read("me/out", "README.md").decode()
    assert "--tool-call-parser kimi_k2" in card
    matter = yaml.safe_load(card.split("---")[1])
    assert "kimi-k2" in matter["tags"]
    assert (matter["license"], matter["license_name"]) == ("other", "modified-mit")
    assert matter["pipeline_tag"] == "text-generation"


@pytest.mark.parametrize("name", ["source", "download", "shards"])
def test_a_file_in_place_of_a_work_folder_is_refused(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path, name: str
) -> None:
    path = workplace / "w" / ".k2convert" / name
    path.parent.mkdir(parents=True)
    path.write_text("x")
    done = hub_cli(*JOB, "--work-dir", "w")
    assert done.returncode == 1
    assert f"{name}: is not a folder" in " ".join(done.stderr.split())


@pytest.mark.parametrize("suffix", ["", ".part", ".part.json"])
def test_a_folder_in_place_of_a_download_is_named(
    tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path, suffix: str
) -> None:
    (workplace / "w" / ".k2convert" / "download" / f"{SHARDS[0]}{suffix}").mkdir(parents=True)
    done = hub_cli(*JOB, "--work-dir", "w")
    assert done.returncode == 1
    assert f"{SHARDS[0]}" in "".join(done.stderr.split())
    assert "Is a directory" in done.stderr.replace("\n", " ")


def test_a_work_folder_that_cannot_be_made_is_named(tiny_on_hub: LoopbackHub, hub_cli: RunCli, workplace: Path) -> None:
    (workplace / "link").symlink_to("nowhere")
    arguments = ("run", "hf://moon/tiny", "hf://me/out", "--work-dir", "link/w")
    done = hub_cli(*arguments, "--yes")
    assert done.returncode == 1
    assert "link/w/.k2convert: cannot be created" in done.stderr
    assert hub_cli(*arguments, "--dry-run").returncode == 0
