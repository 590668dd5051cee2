"""`prune`: the copy is a source like any other, and its conversion is what version 0.3 made of the kept experts."""

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from command import ROOT, assert_refused, run, run_here
from job.crash_runs import assert_resumed, crash
from job.results import contents, files_of, raw_tensors, read_json

import k2convert
from k2convert.checkpoint.index import open_checkpoint
from k2convert.models import read_architecture
from k2convert.prune import read_list
from scripts.fixture_maker.damage import edit_config, edit_json
from scripts.fixture_maker.k3 import TINY_SHAPE, make_k3_edges, make_k3_tiny
from scripts.fixture_maker.layouts import reap_survivors

EIGHT = list(range(8))
LISTS = {
    "survivors": {layer: list(experts) for layer, experts in reap_survivors().items()},
    "first": dict.fromkeys((1, 2, 3), EIGHT),
    "mixed": {1: [1, 3, 5, 7, 9, 11, 13, 15], 2: [0, 2, 4, 6, 8, 10, 12, 14], 3: [0, 1, 2, 3, 12, 13, 14, 15]},
    "three": {1: [1, 2, 3], 2: [0, 1, 3], 3: [0, 2, 3]},
    "two": {1: [0, 3], 2: [1, 2], 3: [2, 3]},
}
FORMS = {
    "modelopt w4a4": ("--layout", "modelopt", "--activations", "w4a4"),
    "modelopt w4a16": ("--layout", "modelopt", "--activations", "w4a16"),
    "compressed-tensors w4a4": ("--layout", "compressed-tensors", "--activations", "w4a4"),
    "compressed-tensors w4a16": ("--layout", "compressed-tensors", "--activations", "w4a16"),
    "bf16": ("--set", "target=bf16"),
    "max": ("--rule", "max"),
}
DIGESTS = json.loads((ROOT / "tests" / "data" / "pruned-digests.json").read_text())
"""Of shards, index and configs that version 0.3 made, which dropped experts while it converted."""
K3_OF_0_3 = {"k3_tiny": make_k3_tiny, "k3_edges": make_k3_edges}
"""Then they had 64 tokens."""
LEDGER_OF_0_3 = ROOT / "tests" / "data" / "pruned-by-0.3.json"
"""The ledger of ("tiny", "survivors", "modelopt w4a4")."""


def write_list(path: Path, experts: dict[int, list[int]], **others: Any) -> Path:
    path.write_text(json.dumps({"experts": {str(layer): numbers for layer, numbers in experts.items()}, **others}))
    return path


def digest_of(result: Path) -> str:
    """The digest of shards, index and configs, whatever version made them."""
    hasher = blake3()
    shards = sorted(path.name for path in result.glob("*.safetensors"))
    for name in (*shards, "model.safetensors.index.json", "config.json", "hf_quant_config.json"):
        if (result / name).exists():
            data = (result / name).read_bytes()
            if name in ("config.json", "hf_quant_config.json"):
                data = data.replace(k2convert.__version__.encode(), b"VERSION")
            hasher.update(name.encode() + b"\0" + blake3(data).digest())
    return hasher.hexdigest()[:32]


Prune = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def prune(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prune:
    """Prune a fixture by a list, once for each pair. Read it only."""
    folder = tmp_path_factory.mktemp("pruned")

    def pruned(source: str, experts: str) -> Path:
        out = folder / f"{source}-{experts}"
        if not out.exists():
            keep = write_list(folder / f"{experts}.json", LISTS[experts])
            whole = folder / source
            if source not in K3_OF_0_3:
                whole = request.getfixturevalue(source)
            elif not whole.exists():
                K3_OF_0_3[source](whole, replace(TINY_SHAPE, vocabulary=64))
            assert run("prune", whole, out, "--keep", keep, "--quiet") == 0
        return out

    return pruned


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", DIGESTS, ids=lambda case: "-".join([case["source"], case["experts"], case["form"]]))
def test_its_result_has_the_bytes_of_0_3(case: dict[str, str], prune: Prune, tmp_path: Path) -> None:
    source = prune(case["source"], case["experts"])
    assert run("run", source, tmp_path / "out", *FORMS[case["form"]], "--quiet") == 0
    assert digest_of(tmp_path / "out") == case["digest"]


def test_it_is_the_checkpoint_that_another_program_pruned(prune: Prune, tiny: Path, reap: Path) -> None:
    pruned = prune("tiny", "survivors")
    assert raw_tensors(pruned) == raw_tensors(reap)
    headers = [{n: (t.dtype, t.shape) for n, t in open_checkpoint(f).tensors.items()} for f in (pruned, reap)]
    assert headers[0] == headers[1]
    assert read_json(pruned) == read_json(tiny) | {"n_routed_experts": 10} == read_json(reap)
    index, theirs = (read_json(folder, "model.safetensors.index.json") for folder in (pruned, reap))
    assert index["weight_map"] == theirs["weight_map"]
    assert index["metadata"]["total_size"] == sum(map(len, raw_tensors(reap).values()))
    assert files_of(tiny).keys() - {"README.md"} == files_of(pruned).keys(), "a model card would describe other weights"
    assert (pruned / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "experts", "points"), [("tiny", "survivors", "spread"), ("k3_tiny", "three", "every")]
)
def test_kills(source: str, experts: str, points: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """job/test_crashes.py has a quick one, of a conversion."""
    keep = write_list(tmp_path / "keep.json", LISTS[experts])
    [report] = crash(
        tmp_path, ["prune", request.getfixturevalue(source), "OUT", "--keep", keep, "--quiet"], points=points
    )
    assert_resumed(report)


def test_running_it_again_writes_only_what_is_missing(prune: Prune, tiny: Path, tmp_path: Path) -> None:
    keep = write_list(tmp_path / "keep.json", LISTS["survivors"])
    before = contents(tiny)
    words = ("prune", tiny, tmp_path / "out", "--keep", keep, "--json")
    first = json.loads(run_here(*words, code=0).stdout)
    assert (first["experts"], first["of"], first["shards"], first["finished_shards"]) == (10, 16, 5, 0)
    assert first["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    lost = tmp_path / "out" / "model-00003-of-000005.safetensors"
    inodes = {path: path.stat().st_ino for path in (tmp_path / "out").glob("*.*") if path != lost}
    lost.write_bytes(lost.read_bytes()[:-1])
    again = json.loads(run_here(*words, code=0).stdout)
    assert again["finished_shards"] == 4
    assert {path: path.stat().st_ino for path in inodes} == inodes
    assert files_of(tmp_path / "out") == files_of(prune("tiny", "survivors"))
    assert contents(tiny) == before


def test_the_status_of_a_copy_names_the_command_that_finishes_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep = write_list(tmp_path / "keep.json", LISTS["survivors"])
    words = ["k2convert", "prune", str(tiny), "copy", "--keep", str(keep)]
    monkeypatch.setattr("sys.argv", words)
    run_here(*words[1:], code=0)
    (tmp_path / "copy" / "config.json").unlink()
    (tmp_path / "copy" / "model-00005-of-000005.safetensors").unlink()
    for verb in (("run", "copy", "out"), ("inspect", "copy"), ("prune", "copy", "out", "--keep", keep)):
        assert_refused(run_here(*verb), "copy: is not finished. `k2convert status copy` says how to finish it")
    shown = run_here("status", "copy", code=0)
    assert "copy: pruned copy not finished: 4 shards" in shown.stdout
    assert shown.stderr == f"next: {shlex.join(words)}\n"
    assert json.loads(run_here("status", "copy", "--json", code=0).stdout)["resume"] == shlex.join(words)
    run_here(*words[1:], code=0)
    assert "copy: pruned copy complete: 5 shards" in run_here("status", "copy", code=0).stdout


def test_a_snapshot_of_the_cache_is_a_source(prune: Prune, tiny: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs = snapshot.parents[1] / "blobs"
    shutil.copytree(tiny, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    keep = write_list(tmp_path / "keep.json", LISTS["survivors"])
    run_here("prune", snapshot, tmp_path / "out", "--keep", keep, code=0)
    assert files_of(tmp_path / "out") == files_of(prune("tiny", "survivors"))
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    for inside in (snapshot / "new", blobs.parent / "new"):
        assert_refused(run_here("prune", snapshot, inside, "--keep", keep), "is inside the source")


@pytest.mark.parametrize("name", [".k2convert", "config.json", "model-00001-of-000005.safetensors.tmp"])
def test_a_link_in_the_destination_is_refused(name: str, tiny: Path, prune: Prune, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(prune("tiny", "survivors"), out)
    elsewhere = tmp_path / "elsewhere"
    link = out / name
    if link.exists():
        link.rename(elsewhere)
    link.symlink_to(elsewhere)
    keep = write_list(tmp_path / "keep.json", LISTS["survivors"])
    before = contents(tmp_path)
    assert_refused(run_here("prune", tiny, out, "--keep", keep), f"{link}: is a link")
    assert contents(tmp_path) == before


def test_a_dry_run_and_its_next_commands(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep = write_list(tmp_path / "keep it.json", LISTS["survivors"])
    done = run_here("prune", tiny, "a copy", "--keep", keep, "--dry-run", code=0)
    assert not (tmp_path / "a copy").exists()
    assert "10 of 16 experts per layer" in done.stdout
    for _ in range(2):
        line = done.stderr.splitlines()[-1]
        assert line.startswith("next: k2convert ")
        done = run_here(*shlex.split(line)[2:], code=0)
    assert (tmp_path / "a copy-NVFP4" / "hf_quant_config.json").exists()


def other_bytes(source: Path) -> str:
    shard = source / "model-00002-of-000005.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    shard.write_bytes(data)
    return "from a different source: model-00002-of-000005.safetensors has other bytes"


def test_another_source_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    keep = write_list(tmp_path / "keep.json", LISTS["survivors"])
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    words = ("prune", source, tmp_path / "out", "--keep", keep, "--quiet")
    run_here(*words, code=0)
    moved = Path(shutil.copytree(tiny, tmp_path / "copy"))
    run_here("prune", moved, *words[2:], code=0)  # a copy is the same source
    edit_config(source, rope_theta=5.0)
    assert "config.json: differs at the source, and is taken over" in run_here(*words[:-1], code=0).stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 5.0
    before = contents(tmp_path / "out")
    problem = other_bytes(source)
    assert_refused(run_here(*words), f"was made {problem}. Choose a new folder, or delete this one.")
    assert contents(tmp_path / "out") == before


def test_another_list_and_other_files_are_refused(tiny: Path, tmp_path: Path) -> None:
    keep = write_list(tmp_path / "keep.json", LISTS["survivors"])
    out = tmp_path / "out"
    run_here("prune", tiny, out, "--keep", keep, "--quiet", code=0)
    other = write_list(tmp_path / "other.json", LISTS["survivors"] | {2: list(range(10))})
    assert_refused(run_here("prune", tiny, out, "--keep", other), "was made with a different list of experts (layer 2")
    for name in ("config.json", ".k2convert/job.json"):
        path = tmp_path / name.replace("/", "-") / name
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        refused = run_here("prune", tiny, tmp_path / name.replace("/", "-"), "--keep", keep)
        assert_refused(refused, f"{path}: is not from `k2convert prune`. Choose a new folder.")
    assert_refused(run_here("prune", tiny, tiny, "--keep", keep), "is the source, which is never written to")


def test_results_and_addresses_are_no_sources(local_result: Path, tmp_path: Path) -> None:
    keep = write_list(tmp_path / "keep.json", LISTS["survivors"])
    out = tmp_path / "out"
    assert_refused(run_here("prune", local_result, out, "--keep", keep), "is already NVFP4")
    assert_refused(run_here("prune", "hf://me/model", out, "--keep", keep), "not a folder of this machine")
    assert not out.exists()


def test_a_full_disk_is_known_before_the_start(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    keep = write_list(tmp_path / "keep.json", LISTS["survivors"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    refused = run_here("prune", tiny, tmp_path / "out", "--keep", keep)
    assert_refused(refused, "of disk at once, but may use 1.00 MB")
    assert not (tmp_path / "out").exists()


def test_every_form_of_a_list_is_read(tiny: Path, tmp_path: Path) -> None:
    source = open_checkpoint(tiny)
    for document in (
        {"experts": {str(layer): experts[::-1] for layer, experts in LISTS["survivors"].items()}},
        {
            "experts": {str(layer): experts for layer, experts in LISTS["survivors"].items()},
            "of": 16,
            "chosen_by": "me",
        },
        {f"model.layers.{layer}.mlp": experts for layer, experts in LISTS["survivors"].items()},
        json.loads(LEDGER_OF_0_3.read_text()),
    ):
        path = tmp_path / "keep.json"
        path.write_text(json.dumps(document))
        retained = read_list(path, read_architecture(source), source.config)
        assert {layer: list(experts) for layer, experts in retained.items()} == LISTS["survivors"]


def in_layer_2(experts: object, key: str = "2") -> dict[str, object]:
    return {"experts": {"1": EIGHT, key: experts, "3": EIGHT}}


BAD_LISTS: list[tuple[object, dict[str, int], str]] = [
    ({"experts": {"1": EIGHT, "2": EIGHT}}, {}, "has no layer 3"),
    (in_layer_2(EIGHT, "4"), {}, "has no layer 2"),
    ({"experts": dict.fromkeys("1234", EIGHT)}, {}, "has the layer 4"),
    (in_layer_2([*range(7), 16]), {}, "layer 2: expert 16 is not in the model, which has 0..15"),
    (in_layer_2([-1, *range(7)]), {}, "layer 2: expert -1 is not in the model"),
    (in_layer_2([0, 0, *range(1, 7)]), {}, "layer 2: expert 0 is in the list twice"),
    (in_layer_2(list(range(9))), {}, "layer 2 keeps 9 experts, but layer 1 keeps 8"),
    (in_layer_2([*range(7), 7.0]), {}, "experts.2.7 is 7.0"),
    (in_layer_2(EIGHT, "02"), {}, "'02' is not the number of a layer"),
    (in_layer_2(EIGHT) | {"of": 32}, {}, "is for a model with 32 experts per layer, but this model has 16"),
    (in_layer_2(EIGHT) | {"keep": 8}, {}, "keep is unknown"),
    ({"scores": {}}, {}, "`k2convert guide prune` shows the forms"),
    ({"layers.1.mlp": EIGHT, "a.layers.1.mlp": EIGHT}, {}, "has a layer twice"),
    ([EIGHT], {}, "not a JSON object"),
    (in_layer_2(EIGHT), {"num_experts_per_tok": 9}, "each token uses 9"),
    (in_layer_2(EIGHT), {"n_group": 3}, "cannot form 3 equal groups"),
    (in_layer_2(EIGHT), {"n_group": 2}, "8 experts of group 0 are kept, but the router needs 4"),
    (
        {"experts": {key: [0, 1, 8, 9] for key in "123"}},
        {"n_group": 2, "topk_group": 1},
        "1 groups (topk_group) hold fewer than the 4",
    ),
]


@pytest.mark.parametrize(("document", "config", "problem"), BAD_LISTS, ids=[case[2] for case in BAD_LISTS])
def test_a_wrong_list(document: object, config: dict[str, int], problem: str, tiny: Path, tmp_path: Path) -> None:
    keep = tmp_path / "keep.json"
    keep.write_text(json.dumps(document))
    source = tiny
    if config:
        source = Path(shutil.copytree(tiny, tmp_path / "source"))
        edit_config(source, **config)
    refused = run_here("prune", source, tmp_path / "out", "--keep", keep)
    assert_refused(refused, problem)
    assert refused.stderr.startswith(f"error: {keep}: ")
    assert not (tmp_path / "out").exists()


def test_a_router_that_is_not_the_models_is_refused(tiny: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    edit_config(source, n_routed_experts=12)
    keep = write_list(tmp_path / "keep.json", LISTS["first"])
    assert run_here("prune", source, tmp_path / "out", "--keep", keep).returncode == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def result_of_0_3(prune: Prune, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result with the ledger of version 0.3: its shards have the hashes that the ledger states."""
    out = tmp_path_factory.mktemp("old") / "out"
    assert run("run", prune("tiny", "survivors"), out, "--quiet") == 0
    shutil.copy(LEDGER_OF_0_3, out / "k2convert.json")
    ledger = read_json(out, "k2convert.json")
    shutil.rmtree(out / ".k2convert" / "done")  # its records are of another job
    edit_json(out / ".k2convert" / "job.json", lambda job: job.pop("version"))
    edit_json(
        out / ".k2convert" / "job.json", lambda job: job.update({k: ledger[k] for k in ("fingerprint", "pruning")})
    )
    return out


@pytest.mark.usefixtures("quick_pictures")
def test_a_result_that_0_3_pruned_validates_and_reports(result_of_0_3: Path, tmp_path: Path) -> None:
    run_here("validate", result_of_0_3, code=0)
    run_here("report", result_of_0_3, "--out", tmp_path, code=0)
    assert (tmp_path / "report.html").exists()


def test_0_3_needs_its_source(result_of_0_3: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run_here("validate", result_of_0_3, "--source", tiny)
    assert_refused(refused, f"has 10 experts per layer, but {tiny} has 16. Prune the source first")
    _, command, _ = refused.stderr.split("`")
    run_here(*shlex.split(command)[1:], code=0)
    document = json.loads(run_here("validate", result_of_0_3, "--source", "PRUNED", "--json", code=0).stdout)
    assert document["passed"]
    assert [rule["verdict"] for rule in document["contract"]["rules"]] == ["pass"] * 19
