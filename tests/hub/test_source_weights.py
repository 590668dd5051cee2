"""The weights of a source change after a conversion: no verb judges the result by them, and every remedy works."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from command import RunCli, messages_of
from damaged_files import flip
from loopback import LoopbackHub
from moves import SHARD, SOURCE, entry, forget, move, moved, retrained, with_config


def follow(cli: RunCli, refused: str) -> None:
    """Run each command that a message names, as it is written there."""
    for line in re.findall(r"`(k2convert [^`]+)`", refused):
        words = [str(word).replace("NEW", "new") for word in shlex.split(line)[1:]]
        shutil.rmtree("new", ignore_errors=True)
        cli(*words, code=0)


def against(destination: str, source: object) -> list[tuple[object, ...]]:
    verbs: list[tuple[object, ...]] = [("validate", destination), ("report", destination, "--out", "report")]
    if not destination.startswith("hf://"):
        verbs.append(("publish", destination, "--repo", "me/copy", "--yes"))
    return [(*words, "--source", source) for words in verbs]


@pytest.mark.slow
@pytest.mark.parametrize("is_gone", [True, False], ids=["commit gone", "commit there"])
@pytest.mark.parametrize("destination", ["out", "hf://me/out"])
def test_other_weights_are_no_verdict_and_every_remedy_works(
    destination: str, is_gone: bool, upstream: LoopbackHub, cli: RunCli, tiny: Path, tmp_path: Path
) -> None:
    """Template and weights have changed. The folder of the job knows it, also if the commit is gone."""
    yes = ("--yes",) if destination.startswith("hf://") else ()
    cli("run", SOURCE, destination, *yes, code=0)
    repo = upstream.store.repos["moon/tiny"]
    first = repo.refs["main"]
    now = repo.commit("main", moved(retrained(upstream, tiny, tmp_path / "retrained")))
    if is_gone:
        forget(upstream, first)
    for words in against(destination, f"{SOURCE}@main"):
        shown = cli(*words, "--quiet", code=1)
        assert "Do not publish" not in shown.stderr
        assert "onvert it again" not in shown.stderr
        assert f"moon/tiny at commit {now[:7]} has other weights than moon/tiny at commit {first[:7]}" in shown.stderr
        assert SHARD in shown.stderr
        assert shown.stdout == ""
        follow(cli, shown.stderr)
        address = re.search(r"Pass (hf://\S+) with --source", shown.stderr)
        assert (address is None) is is_gone
        if address is not None:
            cli(*words[:-1], address[1], code=0)
    refused = cli("run", f"{SOURCE}@main", destination, *yes, code=1).stderr
    assert f"{SHARD}: this source shard has other bytes than when the job" in refused
    assert "takes over" not in refused
    way_back = re.search(r"add @(\w+) to it", refused)
    assert (way_back is None) is is_gone
    if way_back is not None:
        cli("run", f"{SOURCE}@{way_back[1]}", destination, *yes, code=0)
    else:
        assert f"moon/tiny does not have the commit {first[:7]} any more" in refused


@pytest.mark.slow
def test_a_repository_is_judged_by_its_work_folder(upstream: LoopbackHub, cli: RunCli, cwd: Path, tiny: Path) -> None:
    """It knows a source in a folder. Without it nobody does, and the failure says that the source may have changed."""
    source = Path(shutil.copytree(tiny, cwd / "source"))
    cli("run", source, "hf://me/out", "--yes", code=0)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 7, "n_routed_experts": 8}))
    (source / "chat_template.jinja").write_text("{{ new }}")
    validate, report = against("hf://me/out", source)
    shown = cli(*validate, COLUMNS="300", code=0).stdout
    assert "chat_template.jinja: missing: the source is not as at the conversion" in shown
    assert "n_routed_experts was 16, now 8; it no longer describes the tensors" in shown
    flip(source / SHARD, -1000)
    for words in (validate, report):
        assert SHARD in cli(*words, code=1).stderr
    shutil.rmtree(cwd / "k2convert-work")
    for words, code in ((validate, 3), (report, 0)):
        shown = cli(*words, code=code)
        assert f"If {source} has changed since the conversion, what differs may be its own" in messages_of(shown.stderr)
    assert upstream.store.repos["me/out"].num_commits("main") == 2


@pytest.mark.slow
def test_a_gone_commit_without_the_work_folder_excuses_only_what_compares_with_the_source(
    upstream: LoopbackHub, cli: RunCli, cwd: Path
) -> None:
    cli("run", SOURCE, "hf://me/out", "--yes", code=0)
    first, now = move(upstream)
    forget(upstream, first)
    assert "passed" in cli("validate", "hf://me/out", "--source", SOURCE, code=0).stdout
    shutil.rmtree(cwd / "k2convert-work")
    words = f"does not have the commit {first[:7]}, which was converted: what differs from {now[:7]} may have changed"
    validate, report = against("hf://me/out", SOURCE)
    for command, code in ((validate, 1), (report, 0)):
        shown = cli(*command, code=code).stderr
        assert words in messages_of(shown)
        assert "Do not publish" not in shown
    result = upstream.store.repos["me/out"]
    result.commit("main", with_config(result.files(), quantization_config={}))
    for command, code in ((validate, 3), (report, 0)):
        shown = cli(*command, code=code).stderr
        assert words in messages_of(shown)
        assert "Do not publish" in shown


def test_a_folder_whose_shard_has_changed_is_not_compared(tiny: Path, cli: RunCli, cwd: Path) -> None:
    source = Path(shutil.copytree(tiny, cwd / "source"))
    cli("run", source, "out", code=0)
    flip(source / SHARD, -1000)
    for words in (*against("out", source)[:2], ("run", source, "out"), ("run", source, "out", "--verify")):
        refused = cli(*words, code=1)
        assert refused.stdout == ""
        assert SHARD in refused.stderr
        assert "Do not publish" not in refused.stderr
    follow(cli, cli("validate", "out", "--source", source, code=1).stderr)
    flip(source / SHARD, -1000)
    assert "passed" in cli("validate", "out", "--source", source, code=0).stdout


@pytest.mark.slow
def test_a_faulty_result_still_fails_while_its_source_is_the_same(
    upstream: LoopbackHub, cli: RunCli, cwd: Path
) -> None:
    """Also after a force-push that keeps the weights."""
    cli("run", SOURCE, "out", code=0)
    before, _ = move(upstream)
    forget(upstream, before)
    shard = cwd / "out" / SHARD
    flip(shard, -1000)
    assert "Do not publish" in cli("validate", "out", "--source", SOURCE, code=3).stderr
    cli("publish", "out", "--repo", "me/copy", "--yes", "--source", SOURCE, code=3)


@pytest.mark.slow
def test_publish_goes_on_after_a_force_push(upstream: LoopbackHub, cli: RunCli) -> None:
    """As validate and report do: main is read instead."""
    cli("run", SOURCE, "out", code=0)
    before, _ = move(upstream)
    forget(upstream, before)
    for words in against("out", SOURCE):
        assert f"moon/tiny does not have the commit {before[:7]}: main is read" in cli(*words, "--quiet", code=0).stderr


@pytest.mark.slow
def test_publish_goes_on_without_the_source(upstream: LoopbackHub, cli: RunCli) -> None:
    cli("run", SOURCE, "out", code=0)
    before = upstream.store.repos.pop("moon/tiny").refs["main"]
    shown = cli("publish", "out", "--repo", "me/other", "--yes", code=0).stderr
    assert f"moon/tiny does not have the commit {before[:7]}: the card states no license of it" in shown
    assert b"base_model: moon/tiny" in upstream.store.read("me/other", "README.md")


@pytest.mark.slow
def test_an_evaluation_against_other_weights_says_so(
    upstream: LoopbackHub, cli: RunCli, tiny: Path, tmp_path: Path, ids: Path
) -> None:
    """The user named them. Without a revision, the weights of then are the reference."""
    cli("run", SOURCE, "out", code=0)
    repo = upstream.store.repos["moon/tiny"]
    first = repo.refs["main"]
    repo.commit("main", retrained(upstream, tiny, tmp_path / "retrained"))
    options = ("out", "--text", ids, "--tokens", "64", "--window", "32", "--device", "cpu", "--dry-run", "--quiet")
    words = f"{SOURCE}@main: is not at the commit {first[:7]}, which a result was converted from"
    assert words in cli("evaluate", f"{SOURCE}@main", *options, code=0).stderr
    shown = cli("evaluate", SOURCE, *options, code=0).stderr
    assert f", not at {first[:7]} of the conversion: " in shown
    assert "is not at" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("is_gone", [True, False])
def test_without_the_work_folder_no_weights_are_replaced(
    is_gone: bool, upstream: LoopbackHub, cli: RunCli, cwd: Path, tiny: Path, tmp_path: Path
) -> None:
    """Whether the commit that was published is gone, or its weights are known to be others."""
    cli("run", SOURCE, "hf://me/out", "--yes", code=0)
    repo = upstream.store.repos["moon/tiny"]
    first = repo.refs["main"]
    repo.commit("main", retrained(upstream, tiny, tmp_path / "retrained"))
    words = f"the source has other weights than at commit {first[:7]}, which was published: {SHARD}"
    if is_gone:
        forget(upstream, first)
        words = f"moon/tiny does not have the commit {first[:7]} that was published"
    shutil.rmtree(cwd / "k2convert-work")
    refused = cli("run", f"{SOURCE}@main", "hf://me/out", "--yes", "--quiet", code=1).stderr
    assert words in refused
    assert "Publish to hf://me/out@v2" in refused
    cli("run", f"{SOURCE}@main", "hf://me/out@v2", "--yes", code=0)
    assert upstream.store.repos["me/out"].num_commits("main") == 2


def test_a_result_in_place_of_the_source_is_named(local_result: Path, cli: RunCli) -> None:
    refused = cli("validate", local_result, "--source", local_result, code=1).stderr
    assert "its weights are NVFP4, so it is not the source" in refused


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("field", "value"), [("n_routed_experts", 8), ("num_hidden_layers", 3), ("model_type", "llama")]
)
@pytest.mark.parametrize("source", ["source", SOURCE])
def test_validate_and_run_judge_a_config_alike(
    source: str, field: str, value: object, upstream: LoopbackHub, cli: RunCli, cwd: Path, tiny: Path
) -> None:
    """config.json no longer describes the tensors. The result of then is right."""
    shutil.copytree(tiny, cwd / "source")
    cli("run", source, "out", code=0)
    repo = upstream.store.repos["moon/tiny"]
    repo.commit("main", with_config(repo.files(), **{field: value}))
    config = cwd / "source" / "config.json"
    before = json.loads(config.read_text())
    config.write_text(json.dumps(before | {field: value}))
    problem = (
        f"config.json has changed: {field} was {before[field]!r}, now {value!r}; it no longer describes the tensors"
    )
    shown = cli("validate", "out", "--source", source, COLUMNS="300", code=0)
    assert problem in shown.stdout + shown.stderr
    assert "takes" not in shown.stdout + shown.stderr
    refused = cli("run", source if source == "source" else f"{SOURCE}@main", "out", code=1)
    assert messages_of(refused.stderr).startswith(f"error: out: {problem}. To go on")


@pytest.mark.slow
def test_publish_says_what_has_moved_also_if_it_sends_nothing(tiny: Path, upstream: LoopbackHub, cli: RunCli) -> None:
    source = Path(shutil.copytree(tiny, "source"))
    cli("run", source, "out", code=0)
    publish = against("out", source)[2]
    (source / "chat_template.jinja").write_text("{{ new }}")
    for words in (publish, publish, against("out", source)[1]):
        shown = messages_of(cli(*words, "--quiet", code=0).stderr)
        assert "source is not as at the conversion: chat_template.jinja is new" in shown
    flip(source / SHARD, -1000)
    assert SHARD in cli(*publish, code=1).stderr
    assert upstream.store.repos["me/copy"].num_commits("main") == 2


@pytest.mark.slow
def test_a_gone_repository_leaves_the_check_of_the_result_alone(upstream: LoopbackHub, cli: RunCli) -> None:
    cli("run", SOURCE, "out", code=0)
    del upstream.store.repos["moon/tiny"]
    refused = cli("validate", "out", "--source", SOURCE, code=1).stderr
    assert "`k2convert validate out` checks the result alone" in messages_of(refused)
    assert "main is read" not in refused
    follow(cli, refused)


@pytest.mark.slow
def test_what_a_result_does_not_have_makes_no_commit(upstream: LoopbackHub, cli: RunCli) -> None:
    """A new model card changes nothing. What the index says beside the places of tensors is kept, so it is said."""
    job = ("run", f"{SOURCE}@main", "hf://me/out", "--yes", "--quiet")
    cli(*job, code=0)
    repo = upstream.store.repos["moon/tiny"]
    result = upstream.store.repos["me/out"]
    repo.commit("main", repo.files() | {"README.md": entry(b"A card."), ".notes": entry(b"A note.")})
    assert "already holds this result" in cli(*job, code=0).stderr
    assert "of the conversion" not in cli("validate", "hf://me/out", "--source", SOURCE, code=0).stderr
    assert result.num_commits("main") == 2
    name = "model.safetensors.index.json"
    index = json.loads(upstream.store.read("moon/tiny", name))
    index["metadata"]["note"] = "new"
    repo.commit("main", repo.files() | {name: entry(json.dumps(index).encode())})
    assert f"takes over what has changed at the source: {name} differs" in cli(*job, code=0).stderr
    assert result.num_commits("main") == 3
    assert json.loads(upstream.store.read("me/out", name))["metadata"]["note"] == "new"
