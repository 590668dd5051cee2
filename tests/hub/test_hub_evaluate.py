"""An evaluation of checkpoints on the Hub: layer by layer in bounded disk, with the figures of the same files here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command import RunCli, messages_of, run_here
from disk import Watched
from faults import refused_after
from loopback import LoopbackHub

from k2convert.records.evaluation import Evaluation, find_evaluation

SMALL = ("--tokens", "64", "--window", "32", "--device", "cpu", "--activations", "both")


@pytest.fixture(scope="module")
def here(tiny: Path, local_result: Path, ids: Path) -> Evaluation:
    path = ids.with_name("here.json")
    run_here("evaluate", tiny, local_result, "--text", ids, *SMALL, "--out", path, "--quiet", code=0)
    return unnamed(path)


def unnamed(path: Path) -> Evaluation:
    evaluation = find_evaluation(path)
    assert evaluation is not None
    rows = tuple(replace(row, model=replace(row.model, name="")) for row in evaluation.rows)
    return replace(evaluation, reference=replace(evaluation.reference, name=""), rows=rows)


@pytest.fixture
def both_on_hub(tiny_hub: LoopbackHub, local_result: Path) -> LoopbackHub:
    tiny_hub.store.add_folder("me/ours", local_result)
    return tiny_hub


ENDS = ("hf://moon/tiny", "hf://me/ours")


@pytest.mark.slow
@pytest.mark.parametrize("on_hub", [(True, True), (True, False), (False, True)])
def test_checkpoints_on_the_hub_have_the_same_figures(
    both_on_hub: LoopbackHub,
    cli: RunCli,
    tiny: Path,
    local_result: Path,
    ids: Path,
    cwd: Path,
    here: Evaluation,
    on_hub: tuple[bool, bool],
) -> None:
    addresses = [
        there if is_remote else own for is_remote, there, own in zip(on_hub, ENDS, (tiny, local_result), strict=True)
    ]
    words = ("evaluate", *addresses, "--text", ids, *SMALL, "--out", "found.json")
    document = json.loads(cli(*words, "--dry-run", "--json", code=0).stdout)
    needed = document["disk_needed"]
    shards = sum(p.stat().st_size for f in (tiny, local_result) for p in f.glob("*.safetensors"))
    assert needed < 0.6 * shards
    assert list(cwd.iterdir()) == []
    with Watched(cwd) as watched:
        cli(*words, "--max-disk", str(needed), code=0)
    assert unnamed(cwd / "found.json") == here
    assert 0 < watched.most <= needed + 64 * 4096
    assert sorted(path.name for path in cwd.iterdir()) == [".found.json.k2convert", "found.json"]


@pytest.mark.slow
def test_kimi_k3_on_the_hub_has_the_figures_of_the_same_run_here(
    server: LoopbackHub, cli: RunCli, k3_cut: Path, text: Path, cwd: Path
) -> None:
    """Also by its own tokenizer, which comes from the Hub too."""
    server.store.add_folder("moon/tiny", k3_cut)
    figures = dict[str, tuple[Evaluation, object]]()
    for name, source, result in (("here", k3_cut, "ours"), ("there", *ENDS)):
        cli("run", source, result, "--device", "cpu", *(("--yes",) if name == "there" else ()), code=0)
        cli("evaluate", source, result, "--text", text, *SMALL, "--out", f"{name}.json", code=0)
        proven = json.loads(cli("validate", result, "--source", source, "--json", code=0).stdout)
        figures[name] = unnamed(cwd / f"{name}.json"), proven["weights"]["totals"]
    assert figures["there"] == figures["here"]
    assert [row.figures.divergence.maximum == 0 for row in figures["here"][0].rows] == [True, False]


def test_without_a_folder_a_file_is_asked_for(both_on_hub: LoopbackHub, cli: RunCli, ids: Path, cwd: Path) -> None:
    done = cli("evaluate", *ENDS, "--text", ids, *SMALL, code=1)
    assert messages_of(done.stderr).startswith("error: no checkpoint is in a folder of its own")
    assert done.stderr.endswith("Name a file with --out.\n")
    done = cli("evaluate", *ENDS, "--text", ids, *SMALL, "--out", "x.json", "--max-disk", "1MB", "--quiet", code=1)
    assert messages_of(done.stderr).startswith("error: x.json.work: the evaluation needs ")
    assert "may use 1.00 MB. Allow more with --max-disk" in done.stderr
    assert list(cwd.iterdir()) == []


@pytest.mark.slow
def test_an_evaluation_that_the_hub_ended_goes_on_with_the_commits_it_began_with(
    both_on_hub: LoopbackHub, cli: RunCli, ids: Path, cwd: Path, here: Evaluation
) -> None:
    refused = refused_after(cwd / "found.json.work" / "layer-000.safetensors", both_on_hub.traffic)
    words = ("evaluate", *ENDS, "--text", ids, *SMALL, "--out", "found.json")
    done = cli(*words, code=1)
    assert "Traceback" not in done.stderr
    refused.join()
    both_on_hub.traffic.clear()
    for name in ("moon/tiny", "me/ours"):
        both_on_hub.store.repos[name].commit("main", {})
    done = cli(*words, code=0)
    assert "found.json.work: resuming: " in done.stderr
    assert unnamed(cwd / "found.json") == here
