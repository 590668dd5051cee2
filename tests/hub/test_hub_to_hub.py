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
from damaged_files import flip
from faults import Fault
from loopback import TOKEN, LoopbackHub
from loopback_store import Entry
from published import ALL_RULES, JOB, WITHOUT_SOURCE, assert_published, stop_before_main

from k2convert.job import run as executor
from k2convert.job.shard import ShardTask
from k2convert.records.ledger import ShardRecord
from scripts.fixture_maker.damage import edit_config

SHARDS = [f"model-0000{i}-of-000005.safetensors" for i in range(1, 6)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("disable_xet", ["0", "1"], ids=["Xet", "LFS"])
def test_hub_to_hub(
    tiny_hub: LoopbackHub, cli_process: RunCli, cwd: Path, local_result: Path, disable_xet: str
) -> None:
    cli_process(*JOB, HF_HUB_DISABLE_XET=disable_xet, code=0)
    assert_published(tiny_hub, local_result)
    assert tiny_hub.store.repos["me/out"].private
    assert bool(tiny_hub.traffic.matching("PUT", "/_lfs/")) == (disable_xet == "1")
    assert list(cwd.rglob("*.safetensors")) == []
    again = cli_process(*JOB, HF_HUB_DISABLE_XET=disable_xet, code=0)
    assert "already holds this result" in again.stderr
    assert_published(tiny_hub, local_result)


@pytest.mark.slow
def test_kimi_k3_from_hub_to_hub(server: LoopbackHub, cli: RunCli, k3_tiny: Path, tmp_path: Path) -> None:
    """The card says what was proven of the written bytes, and what engines need."""
    server.store.add_folder("moon/tiny", k3_tiny)
    cli("run", k3_tiny, tmp_path / "local", code=0)
    cli(*JOB, code=0)
    store = server.store
    for path in sorted((tmp_path / "local").glob("*.safetensors")):
        assert store.read("me/out", path.name) == path.read_bytes()
    assert store.read("me/out", "config.json") == (tmp_path / "local" / "config.json").read_bytes()
    card = store.read("me/out", "README.md").decode()
    assert ALL_RULES in card
    assert "All 36 tensors are lossless: read back, every value is the source's." in card
    assert "MXFP4 has 4.25 bits per weight, NVFP4 4.5" in card
    assert "no pipeline parallelism" in card
    assert "INT4" not in card


@pytest.mark.slow
def test_kimi_k3_from_the_hub_to_a_folder_and_published(
    server: LoopbackHub, cli: RunCli, cwd: Path, k3_tiny: Path
) -> None:
    server.store.add_folder("moon/tiny", k3_tiny)
    cli("run", "hf://moon/tiny", "out", code=0)
    done = cli("publish", "out", "--repo", "me/out", "--source", "hf://moon/tiny", "--yes", "--json", code=0)
    store = server.store
    commit = server.store.repos["me/out"].refs["main"]
    assert json.loads(done.stdout)["commit"] == commit
    for name in (*(path.name for path in (cwd / "out").glob("*.safetensors")), "config.json", "hf_quant_config.json"):
        assert store.read("me/out", name) == (cwd / "out" / name).read_bytes()
    assert ALL_RULES in store.read("me/out", "README.md").decode()
    assert f"published as hf://me/out at commit {commit}\n" in cli("status", "out", code=0).stdout
    cli("validate", "hf://me/out", "--source", "hf://moon/tiny", code=0)


def test_hub_to_folder_gives_the_local_bytes(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path) -> None:
    done = cli("run", "hf://moon/tiny@main", "out", "--json", code=0)
    assert json.loads(done.stdout)["commit"] is None
    for name in SHARDS:
        assert (cwd / "out" / name).read_bytes() == (local_result / name).read_bytes()
    commit = tiny_hub.store.repos["moon/tiny"].refs["main"]
    assert json.loads((cwd / "out" / "k2convert.json").read_text())["source"]["revision"] == commit
    cli("validate", "out", code=0)


@pytest.mark.slow
def test_several_shards_are_converted_at_once_if_requested(
    tiny_hub: LoopbackHub, cli: RunCli, local_result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    convert = executor.convert_shard

    def together(task: ShardTask, **options: Any) -> ShardRecord:
        if task.shard.name in SHARDS[:2]:
            both.wait(timeout=300)  # the first waits here until another thread has come with the second
        return convert(task, **options)

    monkeypatch.setattr(executor, "convert_shard", together)
    cli(*JOB, "--workers", "2", code=0)
    assert_published(tiny_hub, local_result)


def test_folder_to_hub_keeps_the_source(server: LoopbackHub, cli: RunCli, tiny: Path, local_result: Path) -> None:
    before = sorted((p.name, p.stat().st_mtime_ns) for p in tiny.iterdir())
    cli("run", tiny, "hf://team/out", "--yes", "--public", code=0)
    assert_published(server, local_result, "team/out")
    assert not server.store.repos["team/out"].private
    assert sorted((p.name, p.stat().st_mtime_ns) for p in tiny.iterdir()) == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["nowhere", "folder", "Hub"])
def test_publish_sends_a_folder(tiny_hub: LoopbackHub, cli: RunCli, local_result: Path, tiny: Path, where: str) -> None:
    """All rules are checked if the source is given."""
    source = {"nowhere": (), "folder": ("--source", tiny), "Hub": ("--source", "hf://moon/tiny")}[where]
    checked = ALL_RULES if source else WITHOUT_SOURCE
    done = cli("publish", local_result, "--repo", "me/out", *source, "--yes", "--json", code=0)
    document = json.loads(done.stdout)
    assert (document["repo"], document["private"]) == ("me/out", True)
    assert document["commit"] == tiny_hub.store.repos["me/out"].refs["main"]
    assert_published(tiny_hub, local_result, checked=checked)
    assert checked in " ".join(done.stderr.split())
    assert tiny_hub.store.read("me/out", "k2convert.json") == (local_result / "k2convert.json").read_bytes()
    assert all((local_result / name).exists() for name in SHARDS)


def test_publish_refuses_an_invalid_result(server: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path) -> None:
    out = Path(shutil.copytree(local_result, cwd / "out"))
    flip(out / SHARDS[2], -1)
    done = cli("publish", out, "--repo", "me/out", "--yes", code=3)
    assert "does not validate" in done.stderr
    assert server.store.repos == {}


def test_publish_refuses_odd_names_and_damaged_ledgers(
    server: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path
) -> None:
    for options, words in (
        (("--repo", "me/out@refs/pr/1"), "results go to a branch, and refs/pr/1 is not one of yours"),
        (("--repo", "me-/out"), "not a repository"),
        (("--repo", "me/out", "--base-model", "x"), "hf://x: not a repository"),
        (("--repo", "me/out", "--base-model", "moon/tiny@v1"), "Leave out @v1"),
    ):
        assert words in " ".join(cli("publish", local_result, *options, "--yes", code=1).stderr.split())
    assert server.traffic.requests == []
    ledger = json.loads((local_result / "k2convert.json").read_text())
    for key, value in (
        ("shards", None),
        ("shards", [1]),
        ("shards", {"model-00001-of-000005.safetensors": {}}),
        ("shards", {"../x.safetensors": {"bytes": 1}}),
        ("fingerprint", None),
        ("source", {"repo": 5}),
    ):
        (cwd / "k2convert.json").write_text(json.dumps(ledger | {key: value}))
        done = cli("publish", cwd, "--repo", "me/out", "--yes", code=1)
        assert f"k2convert.json: {key}" in " ".join(done.stderr.split())


@pytest.mark.parametrize("verb", ["run", "publish"])
def test_publishing_unattended_needs_yes(tiny_hub: LoopbackHub, cli: RunCli, local_result: Path, verb: str) -> None:
    arguments = ("hf://moon/tiny", "hf://me/out") if verb == "run" else (local_result, "--repo", "me/out")
    done = cli(verb, *arguments, code=1)
    assert "needs --yes" in done.stderr
    assert list(tiny_hub.store.repos) == ["moon/tiny"]


def test_repositories_keep_names(
    server: LoopbackHub, cli: RunCli, local_result: Path, tiny: Path, tmp_path: Path
) -> None:
    server.store.add_folder("me/out", local_result)
    done = cli("inspect", "hf://me/out@main")
    assert done.stdout.startswith("hf://me/out@main: kimi-k2-thinking (")
    assert "cannot be converted" not in done.stdout
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    edit_config(source, model_type="deepseek_v3")
    server.store.add_folder("moon/other", source)
    refused = cli("run", "hf://moon/other", "out", code=1)
    assert said(refused.stderr).startswith("error: hf://moon/other: config.json: model_type is 'deepseek_v3'")


def test_planning_a_remote_source_writes_nothing(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, tiny: Path) -> None:
    inspected = cli("inspect", "hf://moon/tiny", "--json")
    assert json.loads(inspected.stdout)["int4_projections"] == 144
    planned = cli("run", "hf://moon/tiny", "hf://me/out", "--dry-run", "--json")
    plan = json.loads(planned.stdout)
    assert plan["source_commit"] == tiny_hub.store.repos["moon/tiny"].refs["main"]
    assert plan["branch"].startswith("k2convert-")
    weighed = [cli("fit", place, "--gpu", "b200", "--count", "2", "--json") for place in ("hf://moon/tiny", tiny)]
    assert json.loads(weighed[0].stdout) == json.loads(weighed[1].stdout) | {"checkpoint": "hf://moon/tiny"}
    sent = tiny_hub.traffic.bytes_sent(r"\.safetensors$")
    assert sent < 0.3 * sum((tiny / name).stat().st_size for name in SHARDS)
    assert list(cwd.iterdir()) == []
    assert list(tiny_hub.store.repos) == ["moon/tiny"]


def test_too_little_disk_is_refused_at_the_plan(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path) -> None:
    done = cli(*JOB, "--max-disk", "2MB", code=1)
    assert "MB of disk at once, but may use 2.00 MB. Allow more with --max-disk" in done.stderr
    assert list(cwd.iterdir()) == []


def test_a_repository_with_other_weights_is_left_alone(tiny_hub: LoopbackHub, cli: RunCli, tiny: Path) -> None:
    tiny_hub.store.add_folder("me/out", tiny, private=True)
    done = cli(*JOB, code=1)
    assert "me/out: main already holds other weights, and they are not replaced. " in done.stderr
    assert "Publish to hf://me/out@v2, or choose a new repository.\n" in done.stderr
    assert tiny_hub.store.repos["me/out"].num_commits("main") == 2


@pytest.mark.slow
def test_a_job_that_stopped_at_its_commits_goes_on_as_it_began(
    tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, tmp_path: Path
) -> None:
    """Meanwhile the source moved on, a record was damaged, and a file got into the work folder by chance."""
    repo = tiny_hub.store.repos["moon/tiny"]
    work = cwd / "k2convert-work" / "me--out"
    first = repo.refs["main"]
    tiny_hub.traffic.inject(Fault("POST", "/commit/main", status=412))
    stopped = cli(*JOB, code=1)
    assert "run the same command again" in stopped.stderr
    shown = cli("status", work)
    assert "published" not in shown.stdout
    assert "the same `k2convert run` command finishes the job" in shown.stderr
    found = cli("status", "hf://me/out")
    assert (found.returncode, found.stdout) == (1, "")
    assert "has no k2convert.json" in found.stderr

    repo.commit("main", dict(repo.files()) | {"news.md": repo.files()["README.md"]})
    record = sorted((work / ".k2convert" / "shards").iterdir())[0]
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b'"file_bytes":1', b'"file_bytes":2', 1))
    assert record.read_bytes() != whole
    (work / "run.log").write_text("private")
    tiny_hub.traffic.clear()
    tiny_hub.traffic.inject(Fault("POST", "/commit/main", status=500, times=2), Fault("DELETE", "/branch/", status=403))
    cli(*JOB, code=1)
    assert record.read_bytes() == whole, "the branch has the record, undamaged"
    assert tiny_hub.traffic.bytes_sent(r"\.safetensors$") < 200_000, "only headers were fetched"
    cli(*JOB, code=0)
    assert_published(tiny_hub, local_result)
    assert "run.log" not in tiny_hub.store.repos["me/out"].files()
    assert json.loads(tiny_hub.store.read("me/out", "k2convert.json"))["source"]["revision"] == first
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        assert TOKEN.encode() not in path.read_bytes(), path
    assert os.environ["HF_TOKEN"] == TOKEN


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_another_machine(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path, damaged: bool) -> None:
    stop_before_main(tiny_hub, cli)
    if damaged:  # such a record is ignored
        repo = tiny_hub.store.repos["me/out"]
        branch = next(name for name in repo.refs if name != "main")
        record = next(name for name in sorted(repo.files(branch)) if name.startswith(".k2convert/shards/"))
        repo.commit(branch, repo.files(branch) | {record: Entry(2, b"{}")})
    (cwd / "k2convert-work").rename(cwd / "elsewhere")
    cli(*JOB, code=0)
    assert_published(tiny_hub, local_result)
    assert damaged or tiny_hub.traffic.bytes_sent(r"\.safetensors$") < 200_000
    ours, theirs = (cwd / top / "me--out" / "k2convert.json" for top in ("k2convert-work", "elsewhere"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_what_a_server_says_is_printed_without_tokens(tiny_hub: LoopbackHub, cli: RunCli) -> None:
    other = "hf_QzAbCdEfGhIjKlMnOpQrStUv"
    words = f"no access with Authorization: Bearer {TOKEN}; {other}; https://me:secret@proxy/?token=s3cret&x=1 hf_xet"
    tiny_hub.traffic.inject(
        Fault("GET", "/api/models/moon/tiny", status=503, words=words),
        Fault("GET", "/api/models/moon/tiny", status=403, words=words),
    )
    done = cli("inspect", "hf://moon/tiny", code=1)  # which fails if its output has the token
    said = done.stderr.replace("\n", " ")
    assert "trying again" in said
    assert said.count("no access with Authorization: Bearer [token]") == 2
    assert said.count("https://[token]@proxy/?token=[token]&x=1 hf_xet") == 2
    assert not any(secret in said for secret in (other, "secret", "s3cret"))


def test_a_source_with_another_hash_is_refused(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path) -> None:
    cli("run", "hf://moon/tiny", "out", code=0)
    path = cwd / "out" / ".k2convert" / "job.json"
    job = json.loads(path.read_text())
    assert job["source"][SHARDS[1]] == tiny_hub.store.repos["moon/tiny"].files()[SHARDS[1]].sha256
    job["source"][SHARDS[1]] = "0" * 64
    path.write_text(json.dumps(job))
    done = cli("run", "hf://moon/tiny", "out", code=1)
    assert f"{SHARDS[1]}: this source shard has other bytes" in done.stderr


@pytest.mark.quick(1)
@pytest.mark.parametrize("inside", ["\x0b", "\u200b"])
def test_a_token_for_no_request_is_refused_unseen(tiny_hub: LoopbackHub, cli_process: RunCli, inside: str) -> None:
    done = cli_process(*JOB, HF_TOKEN=f"hf_Part{inside}Other", code=1)
    assert "has a character that tokens never have" in done.stderr
    assert "Part" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "publish"])
def test_a_card_that_the_hub_would_refuse_is_settled_before_the_work(
    server: LoopbackHub, cli: RunCli, tiny: Path, cwd: Path, local_result: Path, verb: str
) -> None:
    source = cwd / "source"
    shutil.copytree(tiny, source)
    (source / "README.md").write_bytes(
        b"---\nlicense: modified-mit\npipeline_tag: chat\n---\n# caf\xe9, which is not UTF-8\n"
    )
    server.store.add_folder("moon/odd", source)
    arguments = ("hf://moon/odd", "hf://me/out") if verb == "run" else (local_result, "--repo", "me/out")
    more = () if verb == "run" else ("--base-model", "moon/odd")
    cli(verb, *arguments, "--yes", *more, code=0)
    card = server.store.read("me/out", "README.md").decode()
    assert "--tool-call-parser kimi_k2" in card
    matter = yaml.safe_load(card.split("---")[1])
    assert "kimi-k2" in matter["tags"]
    assert (matter["license"], matter["license_name"]) == ("other", "modified-mit")
    assert matter["pipeline_tag"] == "text-generation"


@pytest.mark.parametrize("name", ["source", "download", "shards"])
def test_a_file_as_a_work_folder_is_refused(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, name: str) -> None:
    path = cwd / "w" / ".k2convert" / name
    path.parent.mkdir(parents=True)
    path.write_text("x")
    done = cli(*JOB, "--work-dir", "w", code=1)
    assert f"{name}: is not a folder" in " ".join(done.stderr.split())


@pytest.mark.quick(1)
@pytest.mark.parametrize("suffix", ["", ".part", ".part.json"])
def test_a_folder_as_a_download_is_named(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path, suffix: str) -> None:
    (cwd / "w" / ".k2convert" / "download" / f"{SHARDS[0]}{suffix}").mkdir(parents=True)
    done = cli(*JOB, "--work-dir", "w", code=1)
    assert f"{SHARDS[0]}" in "".join(done.stderr.split())
    assert "Is a directory" in done.stderr.replace("\n", " ")


def test_a_work_folder_that_cannot_be_made_is_named(tiny_hub: LoopbackHub, cli: RunCli, cwd: Path) -> None:
    (cwd / "link").symlink_to("nowhere")
    arguments = (*JOB, "--work-dir", "link/w")
    assert "link/w/.k2convert: cannot be created" in cli(*arguments, code=1).stderr
    cli(*arguments, "--dry-run", code=0)
