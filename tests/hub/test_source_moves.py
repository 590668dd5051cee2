"""The source moves: whatever changes beside the weights after a conversion, no right result is called wrong.

Each row of a trip is a command that a user types after upstream has changed small files, in the order of the table.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command import RunCli
from damaged_files import flip
from evaluation_makers import evaluation_of, write_evaluation
from loopback import LoopbackHub
from moves import OLD_CODE, SHARD, SOURCE, move, moved, retrained

from k2convert.checkpoint.files import file_digest
from k2convert.job import run as executor
from k2convert.records.evaluation import find_evaluation, fresh_evaluation
from k2convert.records.ledger import read_ledger
from scripts.fixture_maker import damage


def forbid_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every conversion of a shard fail from now on."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a shard was converted")

    monkeypatch.setattr(executor, "convert_shard", refuse)


def verbs(destination: str) -> list[tuple[str, ...]]:
    """The commands after the change: each ends well and names both commits, and none converts a shard."""
    against = ("--source", SOURCE)
    table: list[tuple[str, ...]] = [
        ("validate", destination, *against),
        ("report", destination, *against, "--out", "report"),
        ("run", SOURCE, destination),
        ("validate", destination, "--source", f"{SOURCE}@main"),
    ]
    if destination.startswith("hf://"):
        table[2] += ("--yes",)
    else:
        table.append(("publish", destination, "--repo", "me/copy", "--yes", *against))
    return table


@pytest.mark.slow
@pytest.mark.parametrize("destination", ["out", "hf://me/out"])
def test_small_files_that_moved_are_named_and_taken_over(
    destination: str, upstream: LoopbackHub, cli: RunCli, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_hub = destination.startswith("hf://")
    yes = ("--yes",) if to_hub else ()
    cli("run", SOURCE, destination, *yes, code=0)
    before, after = move(upstream)
    with monkeypatch.context() as patch:
        forbid_conversion(patch)
        words = f"main is at {after[:7]}, not at {before[:7]} of the conversion: chat_template.jinja, config.json, "
        for command in verbs(destination):
            shown = cli(*command, code=0)
            assert words in shown.stderr, command
            assert "(eos_token_id was 0, now [0, 1])" in shown.stderr, command
            assert "FAILED" not in shown.stdout + shown.stderr
        assert "of the conversion" not in cli("status", destination, code=0).stderr
        taken = cli("run", f"{SOURCE}@main", destination, *yes, code=0)
        notice = taken.stderr
        for change in (
            "chat_template.jinja differs",
            "tokenization_new.py is new",
            f"{OLD_CODE} is gone",
            "eos_token_id was 0, now [0, 1]",
        ):
            assert change in notice
        for command in (*verbs(destination), ("validate", destination, "--source", f"{SOURCE}@{after}")):
            assert "of the conversion" not in cli(*command, code=0).stderr
        if not to_hub:
            measured = json.loads(cli("report", destination, "--out", "report", "--json", code=0).stdout)["worst"]
            assert measured, "the records of the conversion are those of the result"
        cli("status", destination, code=0)
        again = cli("run", f"{SOURCE}@main", destination, *yes, code=0).stderr
        assert ("already holds this result" if to_hub else "already complete") in again
    assert not upstream.traffic.matching("PUT", "/_lfs/") or not to_hub, "no shard was uploaded again"
    cli("run", f"{SOURCE}@main", "fresh", code=0)
    fresh = {path.name: path.read_bytes() for path in (cwd / "fresh").glob("*") if path.is_file()}
    repo = upstream.store.repos["me/out" if to_hub else "me/copy"]
    stored = {name: upstream.store.read("me/out" if to_hub else "me/copy", name) for name in repo.files()}
    assert repo.num_commits("main") == 3, "the Hub's own, the result, and one more"
    for name, data in fresh.items():
        if name != ".gitignore":
            assert stored[name] == data, name
    assert OLD_CODE not in stored
    if not to_hub:
        ours = {path.name: path.read_bytes() for path in (cwd / "out").glob("*") if path.is_file()}
        assert ours == fresh


@pytest.mark.slow
def test_without_the_work_folder_a_repository_is_compared_by_its_ledger(
    upstream: LoopbackHub, cli: RunCli, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new files need the records of the shards: these are converted again, and none is uploaded."""
    cli("run", SOURCE, "hf://me/out", "--yes", code=0)
    before, after = move(upstream)
    shutil.rmtree(cwd / "k2convert-work")
    with monkeypatch.context() as patch:
        forbid_conversion(patch)
        shown = cli("run", SOURCE, "hf://me/out", "--yes", code=0).stderr
        assert f"main is at {after[:7]}, not at {before[:7]} of the conversion" in shown
        assert "me/out: main already holds this result" in shown
    shutil.rmtree(cwd / "k2convert-work")
    upstream.traffic.requests.clear()
    shown = cli("run", f"{SOURCE}@main", "hf://me/out", "--yes", code=0).stderr
    assert "every shard is converted again" in shown
    assert not upstream.traffic.matching("PUT", "/_lfs/")
    repo = upstream.store.repos["me/out"]
    assert repo.num_commits("main") == 3
    assert upstream.store.read("me/out", "chat_template.jinja") == b"{{ messages }}"
    assert "passed" in cli("validate", "hf://me/out", "--source", SOURCE, code=0).stdout


def test_an_unfinished_job_goes_on_with_the_files_it_began_with_or_takes_the_new_ones(
    upstream: LoopbackHub, cli: RunCli, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("run", SOURCE, "out", code=0)
    (cwd / "out" / "config.json").unlink()
    (cwd / "out" / "model-00002-of-000005.safetensors").unlink()
    move(upstream)
    cli("run", f"{SOURCE}@main", "out", code=0)
    cli("run", f"{SOURCE}@main", "fresh", code=0)
    files = ({p.name: p.read_bytes() for p in (cwd / name).glob("*") if p.is_file()} for name in ("out", "fresh"))
    assert next(files) == next(files)


@pytest.mark.slow
def test_other_weights_are_named_and_never_taken_over(
    upstream: LoopbackHub, cli: RunCli, cwd: Path, tiny: Path, tmp_path: Path
) -> None:
    """Everything that was said of small files holds; the result of the old commit is still right."""
    cli("run", SOURCE, "out", code=0)
    cli("run", SOURCE, "hf://me/out", "--yes", code=0)
    repo = upstream.store.repos["moon/tiny"]
    first = repo.refs["main"]
    repo.commit("main", moved(retrained(upstream, tiny, tmp_path / "retrained")))
    for destination in ("out", "hf://me/out"):
        shown = cli("validate", destination, "--source", SOURCE, code=0)
        assert f"to convert {SOURCE}@main, choose a new destination" in shown.stderr
        cli("validate", destination, "--source", f"{SOURCE}@main", code=1)
    refused = cli("run", f"{SOURCE}@main", "out", code=1).stderr
    assert f"{SHARD}: this source shard has other bytes than when the job in out was begun" in refused
    assert f"To go on with the source of then, add @{first} to it" in refused
    assert "already complete" in cli("run", f"{SOURCE}@{first}", "out", code=0).stderr
    refused = cli("run", f"{SOURCE}@main", "hf://me/out", "--yes", code=1)
    assert SHARD in refused.stderr


def other_scale(out: Path) -> None:
    """Up of one expert no longer has the global scale of its gate."""
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale_2"
    damage.edit_tensor(out, name, lambda scale: scale * 2)


def other_weight(out: Path) -> None:
    shard = out / "model-00002-of-000005.safetensors"
    flip(shard, shard.stat().st_size - 1000)


FAULTS: dict[str, tuple[Callable[[Path], object], set[int]]] = {
    "a weight": (other_weight, {19}),
    "a shared scale": (other_scale, {6, 19}),
    "a missing tensor": (
        lambda out: damage.edit_tensor(out, "model.layers.1.mlp.experts.2.up_proj.weight_scale_2", lambda _: None),
        {1, 19},
    ),
    "a config that no engine loads": (
        lambda out: damage.edit_json(out / "config.json", lambda config: config.pop("quantization_config")),
        {11},
    ),
    "a copied file": (lambda out: (out / "chat_template.jinja").write_text("{{ mine }}"), {17}),
    "a config field": (lambda out: damage.edit_config(out, eos_token_id=5), {12}),
    "a removed file": (lambda out: (out / "chat_template.jinja").unlink(), {17}),
}


def failed_rules(done: subprocess.CompletedProcess[str]) -> set[int]:
    document = json.loads(done.stdout)
    return {rule["number"] for rule in document["contract"]["rules"] if rule["verdict"] == "fail"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_result_still_fail_after_the_source_has_moved(
    fault: str, upstream: LoopbackHub, cli: RunCli, cwd: Path
) -> None:
    """Before the source moves, after it, and after the new files are taken over, the same rules fail."""
    spoil, rules = FAULTS[fault]
    cli("run", SOURCE, "out", code=0)
    shutil.copytree("out", "taken")
    spoil(cwd / "out")
    before = failed_rules(cli("validate", "out", "--source", SOURCE, "--json", code=3))
    assert before >= rules
    move(upstream)
    assert failed_rules(cli("validate", "out", "--source", f"{SOURCE}@main", "--json", code=3)) == before
    cli("run", f"{SOURCE}@main", "taken", code=0)
    spoil(cwd / "taken")
    for folder in ("out", "taken"):
        shown = cli("report", folder, "--source", SOURCE, "--out", "report", code=0)
        assert "Do not publish or serve this result" in shown.stderr
        cli("publish", folder, "--repo", "me/copy", "--yes", "--source", SOURCE, code=3)
    assert failed_rules(cli("validate", "taken", "--source", SOURCE, "--json", code=3)) == before
    assert "me/copy" not in upstream.store.repos


FIELDS: dict[str, tuple[dict[str, object], str]] = {
    "the end of text": ({"eos_token_id": 7}, "eos_token_id was 0, now 7"),
    "a field of attention": ({"rope_theta": 1.0}, "rope_theta was 50000.0, now 1.0"),
    "a new field": ({"note": "new"}, "note was missing, now 'new'"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", FIELDS)
def test_a_folder_whose_small_files_change_is_taken_over(
    name: str, tiny: Path, cli: RunCli, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither tells the weights: the journal knows what was copied, so nothing that was right fails."""
    fields, words = FIELDS[name]
    source = Path(shutil.copytree(tiny, cwd / "source"))
    (source / "old.py").write_text("OLD = True\n")
    cli("run", source, "out", code=0)
    forbid_conversion(monkeypatch)
    document = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(document | fields))
    (source / "generation_config.json").write_text("{}")
    (source / "old.py").rename(source / "new.py")
    shown = cli("validate", "out", "--source", source, code=0)
    assert "the source is not as at the conversion" in shown.stdout
    taken = cli("run", source, "out", code=0).stderr
    for change in (words, "generation_config.json differs", "new.py is new", "old.py is gone"):
        assert change in taken
    assert "the source is not as" not in cli("validate", "out", "--source", source, code=0).stdout
    assert (cwd / "out" / "new.py").exists()
    assert not (cwd / "out" / "old.py").exists()
    assert "already complete" in cli("run", source, "out", code=0).stderr
    (cwd / "out" / "new.py").write_text("edited")
    assert "new.py: differs from the source's" in cli("validate", "out", "--source", source, code=3).stdout


def test_a_field_that_shapes_tensors_is_named_with_both_values(tiny: Path, cli: RunCli, cwd: Path) -> None:
    source = Path(shutil.copytree(tiny, cwd / "source"))
    cli("run", source, "out", code=0)
    document = json.loads((source / "config.json").read_text())
    for field, value in (("moe_intermediate_size", 64), ("n_routed_experts", 8), ("model_type", "other")):
        (source / "config.json").write_text(json.dumps(document | {field: value}))
        refused = cli("run", source, "out", code=1).stderr
        assert f"config.json has changed: {field} was {document[field]!r}, now {value!r}" in refused


@pytest.mark.slow
def test_a_calibration_survives_what_cannot_change_it(
    short: Path, text: Path, cli: RunCli, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(short, cwd / "source"))
    job = ("run", source, "out", "--calibrate", text, "--set", "calibration={tokens: 128, window: 64}")
    cli(*job, "--device", "cpu", code=0)
    before = read_ledger(cwd / "out")
    document = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(document | {"eos_token_id": 7}))
    forbid_conversion(monkeypatch)
    assert "eos_token_id was 0, now 7" in cli(*job, "--device", "cpu", code=0).stderr
    assert read_ledger(cwd / "out").calibration == before.calibration
    assert "passed" in cli("validate", "out", "--source", source, code=0).stdout
    (source / "config.json").write_text(json.dumps(document | {"rope_theta": 1.0}))
    refused = cli(*job, "--device", "cpu", code=1).stderr
    assert "what was converted depends on it. To convert what is there now, choose a new destination" in refused
    assert "rope_theta was 50000.0, now 1.0" in refused
    assert "passed" in cli("validate", "out", "--source", source, code=0).stdout


SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja", "modeling_new.py")


@pytest.mark.parametrize(("field", "survives"), [("eos_token_id", True), ("rope_theta", False)])
def test_an_evaluation_survives_what_cannot_change_it(
    field: str, survives: bool, tiny: Path, cli: RunCli, cwd: Path
) -> None:
    """No small file can change it, and of config.json only what the network computes with."""
    source = Path(shutil.copytree(tiny, cwd / "source"))
    cli("run", source, "out", code=0)
    out = cwd / "out"
    evaluation = evaluation_of(out)
    digest = file_digest(out / "config.json")
    for row in evaluation.rows:
        object.__setattr__(row.model, "config", digest)
    write_evaluation(out, evaluation)
    document = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(document | {field: 7.0}))
    for name in SMALL_FILES:
        (source / name).write_text("{}")
    shown = cli("run", source, "out", code=0)
    assert ("measures the whole model" in shown.stderr) is not survives
    assert ("evaluation.json measured another config.json" in shown.stderr) is not survives
    cli("validate", "out", "--source", source, code=0)
    assert (find_evaluation(out) is not None) is survives
    assert (out / ".k2convert" / "evaluation.json").exists() is not survives
    assert ("measured another config.json" in cli("status", "out", code=0).stderr) is not survives
    if survives:
        retained = fresh_evaluation(out, weights=read_ledger(out).weights)
        assert retained is not None
        assert [row.figures for row in retained.rows] == [row.figures for row in evaluation.rows]


def test_a_link_out_of_a_result_is_not_published(
    server: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path
) -> None:
    out = Path(shutil.copytree(local_result, cwd / "out"))
    (cwd / "private").mkdir()
    for name in ("notes.txt", "README.md", "weights.bin"):
        (cwd / "private" / name).write_text("PRIVATE")
        (out / name).symlink_to(cwd / "private" / name)
    (out / "docs").symlink_to(cwd / "private")
    shown = cli("publish", "out", "--repo", "me/out", "--yes", code=0).stderr
    for name in ("notes.txt", "README.md", "weights.bin", "docs/notes.txt"):
        assert f"out: {name}: left out: a link to {cwd / 'private' / Path(name).name}" in shown
    stored = server.store.repos["me/out"].files()
    assert not {name for name in stored if name.startswith(("notes", "docs", "weights"))}
    assert not any(file.data is not None and b"PRIVATE" in file.data for file in stored.values())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "hf_quant_config.json"])
def test_a_result_is_not_published_without_a_file_that_engines_read(
    name: str, server: LoopbackHub, cli: RunCli, cwd: Path, local_result: Path
) -> None:
    out = Path(shutil.copytree(local_result, cwd / "out"))
    (out / name).rename(cwd / name)
    (out / name).symlink_to(cwd / name)
    assert f"out/{name}: is a link to {cwd / name}, out of" in cli("publish", "out", "--repo", "me/out", code=1).stderr
    assert "me/out" not in server.store.repos


def test_a_job_for_the_hub_needs_every_file_that_engines_read(
    server: LoopbackHub, cli: RunCli, cwd: Path, tiny: Path
) -> None:
    source = Path(shutil.copytree(tiny, cwd / "source"))
    (cwd / "template").write_text("{{ messages }}")
    (source / "chat_template.jinja").symlink_to(cwd / "template")
    shown = cli("run", "source", "hf://me/out", code=1).stderr
    assert f"source/chat_template.jinja: is a link to {cwd / 'template'}, out of the checkpoint" in shown
    assert "me/out" not in server.store.repos
